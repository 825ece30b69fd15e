"""By which angle is a head rotated at a position? Rotary frequencies; the rotation is in kernels/heads.py.

Frequencies stay fp32 and angles are formed from integer positions on the fly: a bf16 phase is wrong by 0.1 at
position 257 and meaningless beyond 4k, and a table would cost memory at 131k positions for nothing.
"""

import math
from typing import Any

import torch
from torch import Tensor

from aspire.kernels.heads import Angles
from aspire.model.spec import ModelSpec


def inv_freq(spec: ModelSpec) -> tuple[Tensor, float]:
    """Frequencies fp32 [D/2] and the scale of cos and sin, for the rule in `spec.rope_scaling`; bits of transformers.

    Source: transformers modeling_rope_utils (the closed forms of Llama 3.1 and of YaRN, arXiv 2309.00071).
    ValueError for an unknown rule or one that lacks a number.
    """
    base = _plain(spec.rope_theta, spec.head_dim)
    rule = spec.rope_scaling or {"rope_type": "default"}
    kind = rule["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")
    try:
        if kind == "linear":
            return base / rule["factor"], 1.0
        if kind == "llama3":
            return _llama3(base, rule), 1.0
        if kind == "yarn":
            return _yarn(base, rule, spec), _yarn_scale(rule)
    except KeyError as error:
        raise ValueError(f"rope_scaling of type {kind} lacks {error}; state it in config.json") from None
    return base, 1.0


def _plain(theta: float, head_dim: int) -> Tensor:
    """Frequencies without scaling, [D/2]."""
    return 1.0 / _powers(theta, head_dim)


def _powers(theta: float, head_dim: int) -> Tensor:
    """theta^(2i/D), [D/2]."""
    powers: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return powers


def _llama3(base: Tensor, rule: dict[str, Any]) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between; rounded as transformers rounds."""
    low, high, old = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    length = 2 * math.pi / base  # wavelength in tokens
    blend = (old / length - low) / (high - low)
    mixed = (1 - blend) * base / rule["factor"] + blend * base
    mixed = torch.where(length < old / high, base, mixed)
    return torch.where(length > old / low, base / rule["factor"], mixed)


def llama3_divisors(theta: float, rule: dict[str, Any], head_dim: int) -> Tensor:
    """What the llama3 rule divides each plain frequency by, [D/2]; GGUF files carry this instead of the rule."""
    base = _plain(theta, head_dim)
    return base / _llama3(base, rule)


def _yarn(base: Tensor, rule: dict[str, Any], spec: ModelSpec) -> Tensor:
    """Keep dimensions that turn often within the original context, interpolate those that hardly turn."""
    original = rule["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return spec.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low, high = dimension(rule.get("beta_fast") or 32), dimension(rule.get("beta_slow") or 1)
    if rule.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    ramp = (torch.arange(spec.head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    stretched = 1.0 / (rule["factor"] * _powers(spec.rope_theta, spec.head_dim))
    return stretched * (1 - keep) + base * keep  # in this order: a last bit of a frequency is 0.01 at 131,071


def _yarn_scale(rule: dict[str, Any]) -> float:
    """Stated attention factor, else the quotient of two stated mscales, else 0.1 ln(factor) + 1."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rule["factor"]) + 1.0 if rule["factor"] > 1 else 1.0

    if rule.get("attention_factor") is not None:
        return float(rule["attention_factor"])
    above, below = rule.get("mscale"), rule.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def angles(positions: Tensor, freq: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Angles of int64 positions [T] under fp32 frequencies [D/2]; dtype is the model's."""
    angle = positions.to(torch.float32)[:, None] * freq  # [T, D/2]
    cos, sin = angle.cos(), angle.sin()
    return Angles(cos, sin, dtype) if scale == 1.0 else Angles(cos * scale, sin * scale, dtype)
