"""Which small models do the tests share? Random Llama, Qwen2 and Qwen3, their Hugging Face twins, dense attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from aspire.kernels.heads import Heads, rotate_heads
from aspire.model import Decoder, ModelSpec, hf_state_dict, random_weights


def tiny_spec(
    kind: str = "llama",
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int = 97,
    **kw: Any,
) -> ModelSpec:
    """A spec of that model type; `kw` overrides any field."""
    fields: dict[str, Any] = {
        "name": f"tiny-{kind}",
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 3 * heads * head_dim // 2,
        "rms_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_len": 512,
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
    }
    return ModelSpec(**{**fields, **kw})


def tiny_model(kind: str = "llama", seed: int = 0, **kw: Any) -> Decoder:
    """A random fp32 model on CPU."""
    return random_weights(tiny_spec(kind, **kw), torch.float32, "cpu", seed)


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json (transformers 5 spelling) of a spec."""
    return {
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_len,
        "rope_parameters": {"rope_type": "default", **(spec.rope_scaling or {}), "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "eos_token_id": list(spec.end_ids) or None,
        "bos_token_id": None,
    }


def to_hf(model: Decoder) -> PreTrainedModel:
    """The transformers model with the same weights, eager attention, same dtype; the oracle."""
    config = AutoConfig.for_model(**hf_config(model.spec))
    twin = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=model.embed.dtype)
    report = twin.load_state_dict(hf_state_dict(model), strict=False)
    assert not report.unexpected_keys
    assert set(report.missing_keys) <= ({"lm_head.weight"} if model.spec.tied else set())
    twin.tie_weights()
    return twin.eval()


def dense_attend(layer: int, heads: Heads) -> Tensor:
    """Causal attention of one sequence that starts at position 0; no cache. -> [T, Hq, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in rotate_heads(heads))  # [1, H, T, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def dense_logits(model: Decoder, ids: Tensor) -> Tensor:
    """Logits fp32 [T, V] of ids [T] at positions 0..T-1."""
    return model.logits(model(ids, torch.arange(len(ids)), dense_attend))
