"""Which numbers fix the shape of a model? One frozen spec, read from a Hugging Face config.

Llama, Qwen2 and Qwen3 differ in two flags only (a bias on q, k, v; a norm on each head of q and k), so the spec
carries the flags and no model class. Everything the decoder, the loader and the KV pool need is here.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and constants of one decoder.

    max_len: longest context in tokens. tied: the head is the embedding. end_ids: every id that ends an answer.
    rope_scaling: None, or the scaling rule with its key `rope_type` (see rope.py).
    """

    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    max_len: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.heads} query heads do not divide over {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"{self.name}: head_dim must be even for rotary positions, got {self.head_dim}")

    @classmethod
    def from_hf(
        cls,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None = None,
        tokenizer_eos: int | None = None,
    ) -> "ModelSpec":
        """Read a config.json of transformers 4 or 5; ValueError for a model this decoder would compute wrongly."""
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
        _refuse_unsupported(config)
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        absent = [key for key in needed if config.get(key) is None]
        if absent:
            raise ValueError(f"config.json lacks {', '.join(absent)}; take the file of the original checkpoint")
        name = config.get("_name_or_path") or kind
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or (128 if kind == "qwen3" else config["hidden_size"] // heads)
        theta, scaling, max_len = _rope(config, name)
        return cls(
            name=name,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            intermediate_size=config["intermediate_size"],
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_len=max_len,
            rope_scaling=scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            end_ids=_end_ids(config, generation_config or {}, {"eos_token_id": tokenizer_eos}),
        )

    @property
    def model_type(self) -> str:
        """The transformers model type with these flags."""
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q, k, v weight: (Hq + 2 Hkv) * D."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V that one token keeps over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all parameters."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        attention = self.hidden_size * (self.qkv_rows + self.heads * self.head_dim)
        small = 2 * self.hidden_size + self.qkv_bias * self.qkv_rows + self.qk_norm * 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + small
        return (embeddings + self.layers * layer + self.hidden_size) * dtype.itemsize


def with_rope_scaling(config: dict[str, Any], rule: dict[str, Any] | None) -> dict[str, Any]:
    """The config with another scaling rule, None = its own; the base frequency stays."""
    if rule is None:
        return config
    kept = {key: value for key, value in (config.get("rope_parameters") or {}).items() if key == "rope_theta"}
    return {**config, "rope_scaling": rule, "rope_parameters": kept}


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """ValueError for the options of these families that would change the arithmetic."""
    rope = config.get("rope_parameters") or {}
    wrong = {
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "use_sliding_window": config.get("use_sliding_window", False),
        "quantization_config": config.get("quantization_config"),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": {config.get("partial_rotary_factor"), rope.get("partial_rotary_factor")} - {None, 1},
    }
    for key, bad in wrong.items():
        if bad:
            raise ValueError(f"{key} = {config.get(key, bad)!r} is not supported; use a checkpoint without it")


def _rope(config: dict[str, Any], name: str) -> tuple[float, dict[str, Any] | None, int]:
    """(theta, scaling rule or None, longest context), from transformers 4 or 5 spelling.

    The stated YaRN factor is the one in force; the context follows from it, with a warning where the config
    gives another length (transformers and vLLM versions differ silently here).
    """
    rule = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rule.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    old_key = rule.pop("type", None)
    rule.setdefault("rope_type", old_key or "default")
    stated = config.get("max_position_embeddings") or 2048
    if rule["rope_type"] == "default":
        return theta, None, stated
    if rule["rope_type"] != "yarn":
        return theta, rule, stated
    if not rule.get("factor"):
        raise ValueError(f"{name}: rope_scaling of type yarn lacks `factor`; state it")
    original = rule.setdefault("original_max_position_embeddings", stated)
    reach = round(rule["factor"] * original)
    if reach != stated:
        warnings.warn(
            f"{name}: YaRN factor {rule['factor']} x {original} reaches {reach} tokens, but max_position_embeddings "
            f"is {stated}; using factor {rule['factor']} and a context of {reach} tokens",
            stacklevel=3,
        )
    return theta, rule, reach


def _end_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    """Sorted union of every `eos_token_id`, scalar or list."""
    ids: set[int] = set()
    for source in sources:
        eos = source.get("eos_token_id")
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return tuple(sorted(ids))
