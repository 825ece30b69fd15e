"""What do all methods of a comparison share? One model, one pool, prompts that are prefilled once."""

import gc
import json
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from hydra.utils import instantiate
from transformers import PreTrainedTokenizerFast

from aspire.cache import KVPool
from aspire.model import Decoder, ModelSpec, load, random_weights
from aspire.model.load import EMBEDDED
from aspire.model.tokenizer import load_tokenizer
from aspire.policies import Method
from aspire.prefill import Prompt, prefill, random_prompt
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Emulation, Verification
from experiments.benchmarks import Item, request_seed
from experiments.config import nearest
from experiments.environment import synchronise

Config = dict[str, Any]
CHOICES = {
    "protocol.replay": ("cyclic", "drain"),
    "protocol.prompt_kv": ("prefill", "random"),
    "model.weights": ("real", "random"),
}
CHUNK, GPU_CHUNK = 512, 8192  # prompt tokens of a prefill pass: a GPU needs many to be busy


@dataclass
class Session:
    """A loaded model with the benchmark's prompts in its pool."""

    config: Config
    model: Decoder
    items: list[Item]
    settings: EngineSettings
    verification: Verification
    sampling: Sampling
    pool: KVPool
    prompts: list[Prompt]
    prefill_s: float
    provenance: dict[str, Any] | None  # where a downloaded benchmark came from: path, resolved revision, rows

    def request(self, number: int) -> tuple[Request, Prompt]:
        """The number-th request of an endless supply: items in turn, replays with a seed of their own."""
        turn, index = divmod(number, len(self.items))
        item = self.items[index]
        seed = item.seed if turn == 0 else request_seed(item.seed, item.id, turn)
        request = Request(
            id=item.id if turn == 0 else f"{item.id}~{turn}",
            prompt_ids=list(item.prompt_ids),
            sampling=replace(self.sampling, seed=seed),
            max_new_tokens=self.config["benchmark"]["max_new_tokens"],
            # Random weights emit an end id now and then, by chance.
            end_ids=() if self.config["model"]["weights"] == "random" else self.model.spec.end_ids,
        )
        return request, self.prompts[index]


def resolve(config: Config) -> Config:
    """Put what `auto` and null stand for into the config, so that the record shows it.

    Raises ValueError for a word that is none of its options, or a GPU that is not there.
    """
    for path, options in CHOICES.items():
        section, key = path.split(".")
        if config[section][key] not in options:
            raise ValueError(f"{path} is {config[section][key]!r}{nearest(str(config[section][key]), list(options))}")
    engine = dict(config["engine"])
    if engine["device"] == "auto":
        engine["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if engine["device"].startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("engine.device is cuda, but torch finds no GPU; set engine.device=cpu")
    on_gpu = engine["device"].startswith("cuda")
    engine["threads"] = engine["threads"] or torch.get_num_threads()
    engine["prefill_chunk"] = engine["prefill_chunk"] or (GPU_CHUNK if on_gpu else CHUNK)
    engine["graphs"] = on_gpu if engine["graphs"] is None else engine["graphs"]
    if config["protocol"]["prompt_kv"] == "random" and config["model"]["weights"] != "random":
        raise ValueError("protocol.prompt_kv=random is for model.weights=random; real weights need their prompts' KV")
    return {**config, "engine": engine}


def make_method(config: Config) -> Method:
    """The method of a config; `label` is for readers only."""
    node = {key: value for key, value in config["method"].items() if key != "label"}
    method = instantiate(node)
    assert isinstance(method, Method)
    return method


def make_verification(config: Config) -> Verification:
    """How drafts are judged. Raises ValueError for emulated acceptance on real weights."""
    acceptance, how = config["acceptance"], config["verification"]
    emulation = None
    if acceptance["profile"] != "measured":
        if config["model"]["weights"] != "random":
            raise ValueError("emulated acceptance is for model.weights=random; real weights are measured")
        emulation = Emulation(**acceptance)
    return Verification(how["mode"], how["draft_sampling"], emulation)


_loaded: dict[str, Decoder] = {}  # the last model, for the next comparison


def load_model(config: Config) -> Decoder:
    """The model of a config. The last one loaded is kept, and goes before another is loaded."""
    conf, device = config["model"], config["engine"]["device"]
    key = json.dumps([conf, device], sort_keys=True)
    if key in _loaded:
        return _loaded[key]
    _loaded.clear()
    free_cached()
    dtype = getattr(torch, conf["dtype"])
    if conf["weights"] == "random":
        model = random_weights(shape_spec(conf), dtype, device, 0)
    else:
        model = load(local_path(conf["path"], conf["revision"]), dtype, device, rope_scaling=conf["rope_scaling"])
    _loaded[key] = model
    return model


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


def open_session(config: Config, longest_draft: int) -> Session:
    """Load, build the prompts, check every limit, then prefill. config is resolved; raises ValueError."""
    engine, model_conf = config["engine"], config["model"]
    torch.set_num_threads(engine["threads"])
    sampling = Sampling(**config["sampling"], seed=config["seed"])
    verification = make_verification(config)
    model = load_model(config)
    answer = config["benchmark"]["max_new_tokens"]
    source = instantiate(config["benchmark"]["source"])
    tokenizer = None
    if getattr(source, "reads_text", True):
        tokenizer = tokenizer_of(model_conf["tokenizer"] or model_conf["path"], model_conf["revision"])
    items = source.build(tokenizer, model.spec.max_len, answer)
    settings = engine_settings(config, model, max(len(item.prompt_ids) for item in items) + answer)
    pool = make_pool(model, settings, items, answer, longest_draft)
    start = time.perf_counter()
    if config["protocol"]["prompt_kv"] == "random":
        prompts = [random_prompt(model, pool, len(item.prompt_ids), item.seed) for item in items]
    else:
        prompts = [prefill(model, pool, list(item.prompt_ids), settings.prefill_chunk) for item in items]
    synchronise(settings.device)
    seconds = time.perf_counter() - start
    provenance = source.provenance() if hasattr(source, "provenance") else None
    return Session(config, model, items, settings, verification, sampling, pool, prompts, seconds, provenance)


def engine_settings(config: Config, model: Decoder, longest: int) -> EngineSettings:
    """Raises ValueError where a prompt and its answer exceed the context."""
    engine = config["engine"]
    limit = engine["max_len"] or longest
    if longest > limit or limit > model.spec.max_len:
        raise ValueError(
            f"the longest request takes {longest} tokens, engine.max_len is {limit}, the model's context "
            f"{model.spec.max_len}; lower benchmark.max_new_tokens or the prompt length"
        )
    return EngineSettings(
        slots=config["batch"], max_len=limit, page_size=engine["page_size"], pages=engine["pages"],
        prefill_chunk=engine["prefill_chunk"], device=engine["device"], dtype=getattr(torch, config["model"]["dtype"]),
        graphs=engine["graphs"],
    )  # fmt: skip


def make_pool(model: Decoder, settings: EngineSettings, items: list[Item], answer: int, longest_draft: int) -> KVPool:
    """Room for every prompt, and in each slot for an answer with its drafts. Raises ValueError if memory is short."""
    spec, size = model.spec, settings.page_size
    prompts = sum(-(-len(item.prompt_ids) // size) for item in items)
    own = 2 + (answer + longest_draft) // size  # a slot shares full prompt pages and copies the last one
    pages = settings.pages or prompts + settings.slots * own
    if pages < prompts + own:
        raise ValueError(
            f"the prompts and one slot need {prompts + own} pages of {size} tokens, engine.pages is {pages}; raise it, "
            f"or lower benchmark.source.requests or the prompt length"
        )
    needed = pages * size * spec.kv_bytes_per_token(settings.dtype)
    available = free_bytes(settings.device)
    if needed > available:
        raise ValueError(
            f"a KV pool of {pages} pages needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available; "
            f"lower batch, benchmark.source.requests or the prompt length"
        )
    return KVPool(spec.layers, spec.kv_heads, spec.head_dim, pages, size, settings.dtype, settings.device)


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**63
