"""Does a checkpoint decode as transformers decodes it, to position 131,071? Saved there, loaded here, in fp32."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LLAMA3, write_tokenizer
from methods import METHODS
from tiny import dense_attend, tiny_model, to_hf
from torch import Tensor
from transformers import AutoModelForCausalLM

from aspire.engine import Engine
from aspire.model import Decoder, load_folder, load_tokenizer
from aspire.model.files import INDEX
from aspire.policies import Method
from aspire.request import Request
from aspire.settings import EngineSettings

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "qwen2": {"rope_theta": 1e6, "rope_scaling": None},
    "qwen3": {"rope_theta": 1e6, "rope_scaling": YARN},
}
STARTS = (0, 257, 8160, 32740, 131072 - 64)


def saved(folder: Path, kind: str, tied: bool) -> Any:
    """The transformers model of a tiny family member with head size 128, saved by transformers in several shards."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 128, "layers": 3, "max_len": 131072, "vocab": 211}
    twin = to_hf(tiny_model(kind, seed=3, tied=tied, **shape, **FAMILIES[kind]))
    twin.save_pretrained(folder, max_shard_size="1MB")
    assert (folder / INDEX).is_file()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def logits_at(model: Decoder, ids: Tensor, start: int) -> Tensor:
    return model.logits(model(ids, torch.arange(start, start + len(ids)), dense_attend))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_within_1e_5_and_64_greedy_ids_equal(tmp_path: Path, kind: str, tied: bool) -> None:
    """Positions up to 131,071 by sequences that start far away; what transformers multiplies is multiplied here."""
    twin = saved(tmp_path, kind, tied)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # factor, original length and context agree: nothing to warn of
        model = load_folder(tmp_path)
    assert model.spec.max_len == 131072 and model.spec.tied == tied
    ids = torch.randint(211, (64,), generator=torch.Generator().manual_seed(5))
    for start in STARTS:
        places = torch.arange(start, start + 64)
        with torch.no_grad():
            want = twin(ids[None], position_ids=places[None]).logits[0]
        got = logits_at(model, ids, start)
        assert (got - want).abs().max() <= 1e-5, start
        assert torch.equal(got.argmax(-1), want.argmax(-1)), start
    request = Request("greedy", ids.tolist(), max_new_tokens=64)
    Engine(model, EngineSettings(slots=1, max_len=256), Method()).generate([request])
    out = twin.generate(
        ids[None],
        attention_mask=torch.ones(1, 64),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert request.output_ids == out[0, 64:].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_comparison_sees_a_rule_that_is_left_out(tmp_path: Path, kind: str) -> None:
    """The same weights without scaling differ at far positions by far more than the bound."""
    twin = saved(tmp_path, kind, tied=True)
    plain = load_folder(tmp_path, rope_scaling={"rope_type": "default"})
    assert plain.spec.rope_scaling is None and plain.spec.rope_theta == FAMILIES[kind]["rope_theta"]
    ids = torch.arange(64)
    with torch.no_grad():
        want = twin(ids[None], position_ids=torch.arange(131008, 131072)[None]).logits[0]
    assert (logits_at(plain, ids, 131008) - want).abs().max() > 1e-2


def test_f09_rows_beyond_the_tokenizer_are_tokens_like_any_other(tmp_path: Path) -> None:
    """288 rows, 258 tokens, and only two padded rows ever win: every method says them, as transformers does."""
    model = tiny_model("llama", layers=3, vocab=288, heads=2, kv_heads=1)
    assert model.head is not None
    model.head.zero_()
    model.head[270] = torch.linspace(-1, 1, 32)
    model.head[271] = -model.head[270]  # whatever the sign, one of the two is the largest
    prompt, tokenizer = list(range(40)), load_tokenizer(write_tokenizer(tmp_path))
    out = to_hf(model).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 40), max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    want = out[0, 40:].tolist()
    assert set(want) <= {270, 271}
    for method in METHODS:
        request = Request("padded", prompt, max_new_tokens=20, stop=("no",), decode=tokenizer.decode)
        Engine(model, EngineSettings(slots=1, max_len=128), method).generate([request])
        assert (request.output_ids, request.text) == (want, ""), method.name  # such a row has no text
