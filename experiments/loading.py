"""Where do a run's model and tokenizer come from, and what memory is free for them?"""

import gc
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerFast

from aspire.model import Decoder, ModelSpec, load, random_weights, resolve
from aspire.model.files import read_json, tokenizer_eos
from aspire.model.gguf_file import gguf_spec, read_gguf
from aspire.model.load import EMBEDDED
from aspire.model.tokenizer import load_tokenizer

Config = dict[str, Any]
_loaded: dict[str, Decoder] = {}  # the last model, for the next comparison


def load_model(config: Config) -> Decoder:
    """The model of a config. The last one loaded is kept, and goes before another is loaded."""
    conf, device, key = config["model"], config["engine"]["device"], model_key(config)
    if key in _loaded:
        return _loaded[key]
    unload()
    dtype = getattr(torch, conf["dtype"])
    if conf["weights"] == "random":
        model = random_weights(shape_spec(conf), dtype, device, 0)
    else:
        model = load(local_path(conf["path"], conf["revision"]), dtype, device, rope_scaling=conf["rope_scaling"])
    _loaded[key] = model
    return model


def model_key(config: Config) -> str:
    return json.dumps([config["model"], config["engine"]["device"]], sort_keys=True)


def is_loaded(config: Config) -> bool:
    return model_key(config) in _loaded


def unload() -> None:
    """Forget the model that was kept."""
    _loaded.clear()
    free_cached()


def spec_of(config: Config) -> ModelSpec:
    """The architecture of a config's model, without its weights."""
    conf = config["model"]
    if conf["weights"] == "random":
        return shape_spec(conf)
    path = resolve(local_path(conf["path"], conf["revision"]))
    if path.suffix == ".gguf":
        return gguf_spec(read_gguf(path))
    content = {"_name_or_path": path.name, **read_json(path / "config.json")}
    if conf["rope_scaling"] is not None:
        kept = {k: v for k, v in (content.get("rope_parameters") or {}).items() if k == "rope_theta"}
        content |= {"rope_scaling": conf["rope_scaling"], "rope_parameters": kept}
    return ModelSpec.from_hf(content, read_json(path / "generation_config.json", optional=True), tokenizer_eos(path))


def shape_spec(conf: Config) -> ModelSpec:
    """The architecture that a model's config states itself, for random weights."""
    shape = {**conf["shape"], "rope_scaling": conf["rope_scaling"] or conf["shape"].get("rope_scaling")}
    return ModelSpec.from_hf(shape)


def free_cached() -> None:
    """Give the memory of what nobody holds any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def local_path(path: str, revision: str | None) -> str | Path:
    """A local file or folder as it is; a hub id becomes its folder in the cache, ValueError if it is not there."""
    if path in EMBEDDED or Path(path).expanduser().exists():
        return path
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:  # the hub's client has a dozen kinds of failure; all mean that the files are not here
        raise ValueError(f"model {path} is neither a local path nor to be had from the hub: {error}") from error


@lru_cache(maxsize=2)
def tokenizer_of(path: str, revision: str | None) -> PreTrainedTokenizerFast:
    return load_tokenizer(local_path(path, revision))


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**63
