"""Does the decoder compute what Hugging Face computes, and do spec and rotary angles read a config as stated?"""

import json
import math
import warnings
from typing import Any

import pytest
import torch
from tiny import dense_logits, hf_config, tiny_model, tiny_spec, to_hf
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aspire.kernels.heads import Heads, rotate_heads
from aspire.model import ModelSpec
from aspire.model.rope import angles, inv_freq

KINDS = ("llama", "qwen2", "qwen3")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 96,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_hugging_face(kind: str, tied: bool) -> None:
    model = tiny_model(kind, tied=tied)
    ids = torch.randint(97, (33,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = to_hf(model)(ids[None]).logits[0]
    got = dense_logits(model, ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_logits_with_rope_scaling(scaling: dict[str, Any]) -> None:
    model = tiny_model("llama", head_dim=32, rope_scaling=scaling)
    ids = torch.randint(97, (90,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = to_hf(model)(ids[None]).logits[0]
    torch.testing.assert_close(dense_logits(model, ids), want, rtol=1e-4, atol=1e-4)


RULES = {
    "llama3": LLAMA3,
    "llama3 of Llama 3.1": {**LLAMA3, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn of Qwen3": {**YARN, "original_max_position_embeddings": 32768},
    "yarn of factor 1": {**YARN, "factor": 1.0},
    "yarn, factor given": {**YARN, "attention_factor": 1.5, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
    "linear": {"rope_type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", RULES)
def test_frequencies_have_the_bits_of_hugging_face(name: str, head_dim: int, theta: float) -> None:
    """A last bit of a frequency is an angle of 0.01 at position 131,071."""
    rule = RULES[name]
    spec = tiny_spec("qwen3", head_dim=head_dim, rope_theta=theta, rope_scaling=rule, max_len=131072)
    want, want_scale = ROPE_INIT_FUNCTIONS[rule["rope_type"]](AutoConfig.for_model(**hf_config(spec)), "cpu")
    got, scale = inv_freq(spec)
    assert torch.equal(got, want) and scale == want_scale


@pytest.mark.parametrize("max_len", [40960, 131072])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_c01_stated_yarn_factor_is_in_force(max_len: int, spelling: str) -> None:
    rule = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {**QWEN3, "max_position_embeddings": max_len}
    config |= {spelling: {**rule, "rope_theta": 1e6}} if spelling == "rope_parameters" else {"rope_theta": 1e6}
    config.setdefault(spelling, {"type": "yarn", **{key: rule[key] for key in list(rule)[1:]}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec = ModelSpec.from_hf(config)
    assert spec.rope_scaling == rule and spec.rope_theta == 1e6 and spec.max_len == 131072
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (max_len == 40960) and all("131072" in m and "40960" in m for m in messages)
    freq, scale = inv_freq(spec)
    assert scale == pytest.approx(0.1 * math.log(4) + 1) == pytest.approx(1.1386, abs=1e-4)
    plain, _ = inv_freq(ModelSpec.from_hf({**QWEN3, "rope_theta": 1e6}))
    assert freq[0] == plain[0] and freq[-1] == pytest.approx(float(plain[-1]) / 4)


@pytest.mark.parametrize("rule", [None, {**YARN, "original_max_position_embeddings": 32768}], ids=["plain", "yarn"])
def test_c03_angles_stay_fp32_after_a_cast(rule: dict[str, Any] | None) -> None:
    model = tiny_model("qwen3", head_dim=128, rope_theta=1e6, rope_scaling=rule).to(torch.bfloat16)
    assert model.inv_freq.dtype == torch.float32 and model.embed.dtype == torch.bfloat16
    exact = 1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    if rule is not None:  # the closed form in fp64, from turns 32 (dimension 23) to turn 1 (dimension 40)
        keep = 1 - ((torch.arange(64, dtype=torch.float64) - 23) / (40 - 23)).clamp(0, 1)
        exact = exact / 4 * (1 - keep) + exact * keep
    for position, bound in ((257, 2e-5), (4095, 2e-4), (32767, 1e-3), (131071, 1e-2)):
        at = angles(torch.tensor([position]), model.inv_freq, 1.0, torch.bfloat16)
        assert (at.cos[0].double() - (position * exact).cos()).abs().max() <= bound
        # where sine is steep the rounding of the fp32 angle shows in full; transformers gives the same bits
        assert (at.sin[0].double() - (position * exact).sin()).abs().max() <= 1.5 * bound


def test_bfloat16_stays_near_float32() -> None:
    model = tiny_model("qwen3")
    ids = torch.arange(40)
    want = dense_logits(model, ids)
    assert (dense_logits(model.to(torch.bfloat16), ids) - want).abs().max() < 0.1 * want.abs().max()


def test_rows_do_not_depend_on_their_batch() -> None:
    model = tiny_model("llama")

    def values(layer: int, heads: Heads) -> torch.Tensor:
        return rotate_heads(heads)[2].repeat_interleave(2, 1)

    one = model(torch.tensor([5]), torch.tensor([300]), values)
    many = model(torch.tensor([9, 5]), torch.tensor([3, 300]), values)
    torch.testing.assert_close(many[1:], one, rtol=1e-5, atol=1e-5)
    none = torch.tensor([], dtype=torch.long)
    assert model(none, none, values).shape == (0, 64)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer"),
    [(7, [7, 9], None), ([7, 9], None, None), (None, 7, 9), (7, {}, 9)],
)
def test_a06_end_ids_are_the_union(config: Any, generation: Any, tokenizer: int | None) -> None:
    spec = ModelSpec.from_hf({**QWEN3, "eos_token_id": config}, {"eos_token_id": generation or None}, tokenizer)
    assert spec.end_ids == (7, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_spec_survives_the_config_of_transformers(kind: str) -> None:
    spec = tiny_spec(kind, rope_scaling=LLAMA3 if kind == "llama" else None, end_ids=(1, 3))
    saved = json.loads(AutoConfig.for_model(**hf_config(spec)).to_json_string())
    assert ModelSpec.from_hf({**saved, "_name_or_path": spec.name}) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "llama, qwen2, qwen3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"num_key_value_heads": 3}, "KV heads"),
    ],
)
def test_a_config_it_would_compute_wrongly_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf({**QWEN3, **change})


@pytest.mark.parametrize("rule", [{"rope_type": "longrope"}, {"rope_type": "linear"}])
def test_a_scaling_rule_it_does_not_know_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope"):
        inv_freq(tiny_spec(rope_scaling=rule))


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "kib"),
    [(28, 8, 128, 112), (36, 8, 128, 144), (32, 8, 128, 128), (30, 3, 64, 22.5)],
    ids=["Qwen3-1.7B", "Qwen3-8B", "DS-R1-Llama-8B", "SmolLM2-135M"],
)
def test_kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, kib: float) -> None:
    spec = tiny_spec(layers=layers, heads=3 * kv_heads, kv_heads=kv_heads, head_dim=head_dim)
    assert spec.kv_bytes_per_token(torch.bfloat16) == kib * 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_count_every_parameter(kind: str, tied: bool) -> None:
    model = tiny_model(kind, tied=tied)
    assert model.spec.weight_bytes(torch.bfloat16) == 2 * sum(p.numel() for p in model.parameters())
