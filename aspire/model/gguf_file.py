"""What is in a GGUF file? Its metadata, tensors and spec, checked against the file size before any weight is read.

The reader of the `gguf` package takes seconds for a vocabulary of 49k strings, since it keeps every string as
arrays; this one walks the header once. Dequantisation stays with that package.
Source: the GGUF specification (ggml, docs/gguf.md), version 2 and 3, little endian.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from aspire.model.rope import llama3_divisors
from aspire.model.spec import MODEL_TYPES, ModelSpec

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQS = "rope_freqs.weight"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. shape: as numpy and torch have it, slowest dimension first. offset: in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """Header of one file."""

    path: Path
    meta: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def arch(self) -> str:
        """Architecture, which prefixes the keys of its numbers."""
        return str(self.meta.get("general.architecture"))

    def number(self, key: str, default: Any = None) -> Any:
        """Value of `<arch>.<key>`."""
        return self.meta.get(f"{self.arch}.{key}", default)

    def dequantized(self, name: str) -> Floats:
        """One tensor as fp32."""
        at = self.tensors[name]
        raw = np.memmap(self.path, np.uint8, "c", at.offset, (at.size,))
        if at.kind == GGMLQuantizationType.F32:
            return np.asarray(raw.view(np.float32)).reshape(at.shape)
        if at.kind == GGMLQuantizationType.F16:
            return np.asarray(raw.view(np.float16)).reshape(at.shape).astype(np.float32)
        return np.asarray(dequantize(raw.reshape(*at.shape[:-1], -1), at.kind), np.float32).reshape(at.shape)


class _Cursor:
    """Walks the header; struct.error past the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        """One little-endian value, or a tuple where `form` holds several."""
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def text(self) -> str:
        """A string with its length in front."""
        length = self.take("Q")
        self.at += length
        if self.at > len(self.data):
            raise struct.error("string past the end")
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A metadata value: scalar, string or array."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.take(SCALARS[kind])
        inner, count = self.take("I"), self.take("Q")
        if inner in (STRING, ARRAY):
            return [self.value(inner) for _ in range(count)]
        values = self.take(f"{count}{SCALARS[inner]}")
        return list(values) if count != 1 else [values]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header; ValueError naming the file if it is absent, no GGUF, or shorter than its tensors need."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the path of a .gguf file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file (no magic at its start); download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(path, _Cursor(data), len(data))
            except (struct.error, KeyError, OverflowError) as error:
                raise ValueError(f"{path} is truncated or damaged in its header ({error}); download it again") from None


def _header(path: Path, cursor: _Cursor, file_size: int) -> GGUFFile:
    """Metadata, then tensor places; the data begin at the next aligned byte."""
    cursor.at = 4
    version, tensor_count, meta_count = cursor.take("IQQ")
    if version not in (2, 3):
        raise ValueError(f"{path} has GGUF version {version}; supported: 2 and 3, little endian; convert it again")
    meta = {}
    for _ in range(meta_count):
        key = cursor.text()
        meta[key] = cursor.value(cursor.take("I"))
    places = {}
    for _ in range(tensor_count):
        name = cursor.text()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        places[name] = (shape, cursor.take("I"), cursor.take("Q"))
    align = meta.get("general.alignment", 32)
    start = -(-cursor.at // align) * align
    tensors = {name: _place(path, name, *place, start, file_size) for name, place in places.items()}
    return GGUFFile(path, meta, tensors)


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, at: int, start: int, file_size: int) -> GGUFTensor:
    """One tensor's bytes, which must lie within the file."""
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"{path}: {name} has unknown type {kind}; upgrade gguf (pip install -U gguf)") from None
    block, block_bytes = GGML_QUANT_SIZES[known]
    size = math.prod(shape) // block * block_bytes
    if start + at + size > file_size:
        raise ValueError(
            f"{path} is truncated: {name} ends at byte {start + at + size}, the file has {file_size}; download it again"
        )
    return GGUFTensor(shape, known, start + at, size)


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; an unknown name stays, to be reported as unexpected."""
    *block, stem, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if len(block) == 2 else ""
    return f"{layer}{NAMES[stem]}.{kind}" if stem in NAMES else name


def half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Undo the row order of the llama architecture: pairs (2i, 2i+1) of a head back to (i, i + D/2)."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[-1])  # [H, D/2, 2, E]
    return pairs.transpose(1, 2).reshape(weight.shape)


def gguf_spec(file: GGUFFile, rope_scaling: dict[str, Any] | None = None) -> ModelSpec:
    """Spec from the metadata, its scaling rule replaced by rope_scaling unless that is None.

    ValueError for another architecture or an absent number.
    """
    if file.arch not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        raise ValueError(f"{file.path}: architecture {file.arch!r} is not supported; supported: {supported}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight; it is no complete model")
    rows, width = file.tensors["token_embd.weight"].shape
    heads = file.number("attention.head_count")
    config = {
        "model_type": file.arch,
        "_name_or_path": file.meta.get("general.name") or file.path.stem,
        "vocab_size": rows,
        "hidden_size": width,
        "num_hidden_layers": file.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number("attention.head_count_kv", heads),
        "head_dim": file.number("attention.key_length") or file.number("rope.dimension_count") or width // heads,
        "intermediate_size": file.number("feed_forward_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("rope.freq_base"),
        "max_position_embeddings": file.number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_scaling": _rope_scaling(file) if rope_scaling is None else rope_scaling,
        "eos_token_id": file.meta.get("tokenizer.ggml.eos_token_id"),
    }
    return ModelSpec.from_hf(config, {"eos_token_id": file.meta.get("tokenizer.ggml.eot_token_id")})


def _rope_scaling(file: GGUFFile) -> dict[str, Any] | None:
    """Scaling rule of the metadata, or the llama3 rule that the tensor of frequency divisors encodes."""
    if FREQS in file.tensors:
        divisors = torch.from_numpy(file.dequantized(FREQS))
        rule = {"factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rule["original_max_position_embeddings"] = 8192
        theta = file.number("rope.freq_base", 10000.0)
        if not torch.allclose(divisors, llama3_divisors(theta, rule, 2 * len(divisors)), rtol=1e-4):
            raise ValueError(f"{file.path}: {FREQS} is not the rule of Llama 3.1; load the Hugging Face folder instead")
        return {"rope_type": "llama3", **rule}
    kind = file.number("rope.scaling.type", "none")
    if kind == "none":
        return None
    rule = {
        "factor": file.number("rope.scaling.factor"),
        "original_max_position_embeddings": file.number("rope.scaling.original_context_length"),
        "attention_factor": file.number("rope.scaling.yarn_attn_factor"),
        "beta_fast": file.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.number("rope.scaling.yarn_beta_slow"),
    }
    return {"rope_type": kind, **{key: value for key, value in rule.items() if value is not None}}
