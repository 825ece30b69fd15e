"""Which checkpoints do tests write? Folders of Hugging Face, whole or sharded, with a tokenizer, and GGUF files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from tiny import hf_config
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from tokenizers.pre_tokenizers import ByteLevel

from aspire.model import Decoder, ModelSpec, hf_state_dict
from aspire.model.files import INDEX
from aspire.model.gguf_file import NAMES
from aspire.model.rope import llama3_divisors

loader = import_module("aspire.model.load")  # the package exports a function of the same name
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BOS, EOS = 256, 257  # of `write_tokenizer`
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<e>{% endfor %}[assistant]"


def write_folder(folder: Path, model: Decoder, sharded: bool = False, **config: Any) -> Path:
    """A Hugging Face checkpoint of the model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**hf_config(model.spec), **config}))
    state = {name: view.clone() for name, view in hf_state_dict(model).items()}
    if not sharded:
        save_file(state, folder / "model.safetensors")
        return folder
    names = sorted(state)
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: state[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_gguf(path: Path, model: Decoder, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    """A GGUF file of the model, q and k rows permuted for the llama architecture as llama.cpp's converter does."""
    spec = model.spec
    writer = gguf.GGUFWriter(path, spec.model_type)
    writer.add_context_length(spec.max_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    short = {full: name for name, full in NAMES.items()}
    for name, view in hf_state_dict(model).items():
        stem, suffix = name.rsplit(".", 1)
        block = stem.split(".")[2] if ".layers." in stem else ""
        weight = view.float().numpy()
        if spec.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = spec.heads if stem.endswith("q_proj") else spec.kv_heads
            weight = weight.reshape(heads, 2, spec.head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        target = f"blk.{block}.{short[stem.split('.', 3)[3]]}" if block else short[stem]
        use = kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{target}.{suffix}", gguf.quants.quantize(weight, use), raw_dtype=use)
    rule = spec.rope_scaling or {}
    if rule.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rule["factor"])
        writer.add_rope_scaling_orig_ctx_len(rule["original_max_position_embeddings"])
    elif rule:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(spec.rope_theta, LLAMA3, spec.head_dim).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(folder: Path, bos_in_json: bool = True, **settings: Any) -> Path:
    """A byte-level tokenizer of 258 tokens with <s> and <e>; bos_in_json: tokenizer.json puts <s> before a text."""
    folder.mkdir(exist_ok=True)
    vocab = {token: index for index, token in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "<e>")])
    if bos_in_json:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<e>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(known | settings))
    return folder


def assert_same(got: Decoder, want: Decoder) -> None:
    """Every tensor equal."""
    left, right = hf_state_dict(got), hf_state_dict(want)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@contextmanager
def refused(match: str) -> Iterator[None]:
    """The block raises ValueError with that message, before the model's memory is allocated."""

    def build(spec: ModelSpec, dtype: torch.dtype, device: str) -> Decoder:
        assert device == "meta", "memory was allocated before the checks"
        return Decoder(spec, dtype, device)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=match):
        patch.setattr(loader, "Decoder", build)
        yield
