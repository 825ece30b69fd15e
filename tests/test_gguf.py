"""Does a GGUF file give back the tensors, the spec and the ids that were written into it?"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import LLAMA3, assert_same, refused, write_gguf
from tiny import dense_logits, tiny_model

from aspire.model import hf_state_dict, load, load_gguf, read_spec

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_f03_q8_0_within_half_a_step_of_every_block(tmp_path: Path, kind: str, tied: bool) -> None:
    """A block of 32 numbers has one fp16 scale, its largest number / 127; norms and biases are kept in fp32."""
    model = tiny_model(kind, heads=8, kv_heads=2, tied=tied)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.Q8_0))
    got, want = hf_state_dict(loaded), hf_state_dict(model)
    assert got.keys() == want.keys()
    for name, weight in want.items():
        if weight.ndim == 1:
            assert torch.equal(got[name], weight), name
            continue
        largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
        error = (got[name] - weight).unflatten(-1, (-1, 32)).abs()
        # fp16 rounds the scale by 2^-11 of itself, which 127 steps multiply
        assert (error <= largest * (0.5 / 127 + 2**-11) + 1e-7).all(), name
        assert error.max() > 0, name


@pytest.mark.parametrize(("kind", "step"), [("Q4_1", 1 / 15), ("Q4_0", 1 / 8)])
def test_f03_coarser_types_within_their_bound(tmp_path: Path, kind: str, step: float) -> None:
    model = tiny_model("llama", heads=8, kv_heads=2)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType[kind]))
    for name, view in hf_state_dict(loaded).items():
        want = hf_state_dict(model)[name]
        if view.ndim == 1:
            assert torch.equal(view, want), name
        else:
            assert (view - want).abs().max() <= (1.02 * float(want.abs().max()) + 1e-3) * step, name


def test_gguf_frequency_divisors_become_the_llama3_rule(tmp_path: Path) -> None:
    rule = {"rope_type": "llama3", **LLAMA3}
    model = tiny_model("llama", head_dim=64, rope_theta=500000.0, rope_scaling=rule)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model))
    assert loaded.spec.rope_scaling == rule
    torch.testing.assert_close(loaded.inv_freq, model.inv_freq)


def test_yarn_of_the_metadata_is_in_force(tmp_path: Path) -> None:
    model = tiny_model("qwen3", head_dim=128, rope_theta=1e6, rope_scaling=YARN, max_len=131072)
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", model))
    assert loaded.spec.rope_scaling == YARN and loaded.spec.max_len == 131072
    assert torch.equal(loaded.inv_freq, model.inv_freq) and loaded.attention_scale == model.attention_scale


@pytest.mark.parametrize("rule", [YARN, {"rope_type": "llama3", **LLAMA3}])
def test_a_stated_rule_replaces_that_of_the_file(tmp_path: Path, rule: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("qwen3", rope_theta=1e6, max_len=131072))
    want = tiny_model("qwen3", rope_theta=1e6, rope_scaling=rule)
    loaded = load(path, rope_scaling=rule)
    assert loaded.spec.rope_scaling == rule and torch.equal(loaded.inv_freq, want.inv_freq)
    assert read_spec(path, rule) == loaded.spec


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
