"""Where do a run's model and tokenizer come from, and what memory is free for them?"""

import gc
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from aspire.model import Decoder, ModelSpec, load, random_weights, read_spec, resolve
from aspire.model.files import suggested_sampling
from aspire.model.load import EMBEDDED
from aspire.model.rope import inv_freq
from aspire.model.spec import with_rope_scaling
from aspire.model.tokenizer import load_tokenizer
from experiments.hub import commit_of, is_hub_id, model_folder
from experiments.records import ModelUsed

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
        model = random_weights(spec_of(config), dtype, device, 0)
    else:
        model = load(local_path(conf["path"], conf["revision"]), dtype, device, rope_rule(config))
    _loaded[key] = model
    return model


def model_key(config: Config) -> str:
    return json.dumps([config["model"], rope_rule(config), config["engine"]["device"]], sort_keys=True)


def is_loaded(config: Config) -> bool:
    return model_key(config) in _loaded


def unload() -> None:
    """Forget the model that was kept."""
    _loaded.clear()
    free_cached()


def spec_of(config: Config) -> ModelSpec:
    """The architecture of a config's model, without its weights; real ones end at their tokenizer's end id too."""
    conf, rule = config["model"], rope_rule(config)
    if conf["weights"] == "random":
        return ModelSpec.from_hf(with_rope_scaling(conf["shape"], rule))
    spec = read_spec(local_path(conf["path"], conf["revision"]), rule)
    if conf["tokenizer"] is None:
        return spec
    end = tokenizer_of(config).eos_token_id
    return replace(spec, end_ids=tuple(sorted({*spec.end_ids, *([] if end is None else [end])})))


def rope_rule(config: Config) -> dict[str, Any] | None:
    """The scaling rule that a config puts in the place of the checkpoint's; None = the checkpoint's.

    `model.rope_scaling`, else `model.long_rope_scaling` for a benchmark whose prompts may be longer than the context
    which that rule stretches. Raises ValueError for a rule that is no mapping.
    """
    conf, source = config["model"], config["benchmark"]["source"]
    stated, far = conf["rope_scaling"], conf["long_rope_scaling"]
    for rule in (stated, far):
        if not isinstance(rule, dict | None):
            raise ValueError(f"a rope scaling rule is a mapping, as {{rope_type: yarn, factor: 4.0}}; got {rule!r}")
    if stated is not None or far is None:
        return stated
    bounds = [source[key] for key in ("max_tokens", "limit", "context") if source.get(key)]
    longest = min(bounds, default=0)
    return far if longest > far["original_max_position_embeddings"] else None


def model_used(config: Config, spec: ModelSpec) -> ModelUsed:
    """What the record keeps of the model: where it came from, and what is in force of its rope and end ids."""
    conf = config["model"]
    rule = {"rope_type": "default", **(spec.rope_scaling or {})}
    rope = {"theta": spec.rope_theta, **rule, "attention_scale": inv_freq(spec)[1]}
    used = ModelUsed(source="random", context=spec.max_len, rope=rope, end_ids=list(spec.end_ids))
    if conf["weights"] == "random":
        return used
    path = resolve(local_path(conf["path"], conf["revision"]))
    suggested = suggested_sampling(path) if path.is_dir() else {}
    return used.model_copy(
        update={"source": conf["path"], "revision": commit_of(path), "suggested_sampling": suggested or None}
    )


def describe(config: Config, used: ModelUsed) -> str:
    """Two lines for the start of a run: the model as it is in force, and the sampling."""
    rope = ", ".join(f"{key} {value}" for key, value in (used.rope or {}).items())
    ends = " ".join(map(str, used.end_ids or [])) or "none"
    sampling = ", ".join(f"{key} {value}" for key, value in config["sampling"].items())
    suggested = ", ".join(f"{key} {value}" for key, value in (used.suggested_sampling or {}).items())
    return "\n".join(
        [
            f"model {config['model']['name']}: {used.source}, revision {used.revision or 'none'}, context "
            f"{used.context}; rope {rope}; end ids {ends}",
            f"sampling: {sampling}, verification {config['verification']['mode']}"
            + (f"; not applied: the checkpoint suggests {suggested}" if suggested else ""),
        ]
    )


def free_cached() -> None:
    """Give the memory of what nobody holds any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def local_path(path: str, revision: str | None, weights: bool = True) -> str | Path:
    """A local file or folder as it is; a Hub id becomes its folder in the cache.

    weights: False where config and tokenizer are enough. Raises ValueError naming the fix for what is not to be had.
    """
    if path in EMBEDDED or Path(path).expanduser().exists():
        return path
    if not is_hub_id(path):
        raise ValueError(f"{path} does not exist; give a checkpoint's folder, a .gguf file or owner/name of the Hub")
    return model_folder(path, revision, weights)


def tokenizer_of(config: Config) -> PreTrainedTokenizerFast:
    """The tokenizer of a config's model, or the one that `model.tokenizer` names, at main."""
    conf = config["model"]
    return _tokenizer(conf["tokenizer"], None) if conf["tokenizer"] else _tokenizer(conf["path"], conf["revision"])


@lru_cache(maxsize=2)
def _tokenizer(path: str, revision: str | None) -> PreTrainedTokenizerFast:
    return load_tokenizer(local_path(path, revision, weights=False))


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**63
