"""What will a comparison be? Its settings, batches, prompts and memory, settled before anything is loaded."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from aspire.memory import SHARE, MemoryPlan, Work, max_fit, plan_memory, pool_pages, shared_pages
from aspire.model import ModelSpec
from aspire.policies import Method
from aspire.settings import EngineSettings
from aspire.verify import Emulation, Verification
from experiments.benchmarks import Item, template_hash
from experiments.config import MAX_FIT, check_batch, nearest
from experiments.loading import Config, free_bytes, free_cached, is_loaded, spec_of, tokenizer_of, unload
from experiments.scoring import Scorer

CHOICES = {
    "protocol.replay": ("cyclic", "drain"),
    "protocol.prompt_kv": ("prefill", "random"),
    "model.weights": ("real", "random"),
    "comparison.batch_mode": ("equal", "max_fit"),
    "tracking.mode": ("online", "offline", "disabled"),
}
CHUNK, GPU_CHUNK = 512, 8192  # prompt tokens of a prefill pass: a GPU needs many to be busy


@dataclass
class Layout:
    """What a comparison is, before anything is loaded: batches of its methods, prompts, settings, memory."""

    config: Config  # with the largest batch
    spec: ModelSpec
    items: list[Item]
    batches: list[int]  # of each method
    mode: str  # equal, or max_fit: a batch of its own for each method
    settings: EngineSettings
    plan: MemoryPlan
    provenance: dict[str, Any]  # of the prompts: template hash; of files: path, revision, hashes, rows, window
    scorer: Scorer | None = None  # judges the answers


def resolve(config: Config) -> Config:
    """Put what `auto` and null stand for into the config, so that the record shows it.

    Raises ValueError for a word that is none of its options, or a GPU that is not there.
    """
    for path, options in CHOICES.items():
        section, key = path.split(".")
        if config[section][key] not in options:
            raise ValueError(f"{path} is {config[section][key]!r}{nearest(str(config[section][key]), list(options))}")
    gate, emulated = config["protocol"]["gate"], config["acceptance"]["profile"] != "measured"
    if gate < 0 or (gate and (config["sampling"]["temperature"] > 0 or emulated)):
        raise ValueError("protocol.gate is for greedy texts, measured: sampling=greedy verification=greedy")
    if config["model"]["weights"] == "real" and config["benchmark"]["source"]["_target_"].endswith("Shapes"):
        raise ValueError("benchmark=shapes asks random ids, it is for model.weights=random; real weights read text")
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


def make_scorer(config: Config) -> Scorer | None:
    """What judges the answers, None where nothing does: random weights give none. Raises ValueError for a bad one."""
    node = config["benchmark"]["scoring"]
    scorer = None if node is None else instantiate(node)
    if scorer is not None and not isinstance(scorer, Scorer):
        raise ValueError(f"benchmark.scoring is a {type(scorer).__name__}; name a class of experiments/scoring")
    return scorer if config["model"]["weights"] == "real" else None


def lay_out(config: Config, methods: list[Method]) -> Layout:
    """Settle the batches, build the prompts and plan the memory. config is resolved.

    Raises ValueError for what exceeds a limit, memory included.
    """
    torch.set_num_threads(config["engine"]["threads"])
    spec, verification, scorer = spec_of(config), make_verification(config), make_scorer(config)
    check_batch(config["batch"])
    fits = config["batch"] == MAX_FIT
    mode = config["comparison"]["batch_mode"] if fits else "equal"
    if fits:
        batches = fit_batches(config, spec, methods, verification, mode)
    else:
        batches = [config["batch"]] * len(methods)
    config = with_batch(config, max(batches))
    items, provenance = build_items(config, spec)
    lengths = tuple(len(item.prompt_ids) for item in items)
    answer = config["benchmark"]["max_new_tokens"]
    settings = engine_settings(config, spec, max(lengths) + answer)
    check_pages(settings, lengths, answer, max(m.speculation.longest for m in methods))
    sized = list(zip(methods, batches, strict=True))
    pages = settings.pages or shared_pages(settings.page_size, lengths, sized, answer)
    settings = replace(settings, pages=pages)
    plan = plan_of(config, spec, settings, sized, verification, lengths)
    plan.refuse_beyond(available_bytes(config, plan), "lower batch, benchmark.source.requests or the prompt length")
    return Layout(config, spec, items, batches, mode, settings, plan, provenance, scorer)


def with_batch(config: Config, batch: int) -> Config:
    """The config with a batch, and the prompts of a benchmark that takes as many as there are slots."""
    benchmark = config["benchmark"]
    source = {key: batch if value == MAX_FIT else value for key, value in benchmark["source"].items()}
    protocol = dict(config["protocol"])
    if protocol["tokens_per_slot"] is not None:
        protocol["window_tokens"] = protocol["tokens_per_slot"] * batch
    return {**config, "batch": batch, "benchmark": {**benchmark, "source": source}, "protocol": protocol}


def build_items(config: Config, spec: ModelSpec) -> tuple[list[Item], dict[str, Any]]:
    """The prompts, and what a record keeps of where they came from."""
    source, answer = make_source(config), config["benchmark"]["max_new_tokens"]
    if not getattr(source, "reads_text", True):
        return source.build(None, spec.max_len, answer), {}
    tokenizer = tokenizer_of(config)
    if not hasattr(source, "ask"):
        items = source.build(tokenizer, spec.max_len, answer)
        return items, {"template_hash": template_hash(tokenizer, "", None)}
    items, provenance = source.ask(tokenizer, spec.max_len, answer)
    hashed = template_hash(tokenizer, provenance["template"], source.thinking, source.chat)
    return items, {**provenance, "template_hash": hashed}


def make_source(config: Config) -> Any:
    """The benchmark of a config. Raises ValueError for source=local where there are no files to replace."""
    node, path = config["benchmark"]["source"], config.get("path")
    if "kind" in node and not node["_target_"].endswith("FileBenchmark"):
        raise ValueError(f"benchmark={config['benchmark']['name']} reads no files: leave out source=local and path")
    if path and node.get("kind") != "local":
        raise ValueError(f"path={path} is for source=local; say both, or leave both out")
    try:
        return instantiate(node)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError):  # what a benchmark itself refuses
            raise error.__cause__ from None
        raise


def fit_batches(
    config: Config, spec: ModelSpec, methods: list[Method], verification: Verification, mode: str
) -> list[int]:
    """As many slots as the memory holds, for all methods alike or for each its own, while all engines live.

    Those of its own are what each method could have alone, less the same share of all so that they fit together.
    Every slot counts with a prompt of its own, the longest there is, whatever a small benchmark makes them share.
    """
    items, _ = build_items(with_batch(config, 1), spec)
    longest = max(len(item.prompt_ids) for item in items)
    settings = engine_settings(with_batch(config, 1), spec, longest + config["benchmark"]["max_new_tokens"])

    def plan(sized: list[tuple[Method, int]]) -> MemoryPlan:
        lengths = (longest,) * max(len(items), *(batch for _, batch in sized))
        return plan_of(config, spec, settings, sized, verification, lengths)

    def together(batch: int) -> MemoryPlan:
        return plan([(method, batch) for method in methods])

    def apart(method: Method, batch: int) -> MemoryPlan:
        return plan([(method, batch)])

    smallest = together(1)
    available = available_bytes(config, smallest)
    equal = max_fit(together, available)
    if not equal:
        smallest.refuse_beyond(int(SHARE * available), "shorten the prompts or compare fewer methods")
    if mode == "equal":
        return [equal] * len(methods)
    alone = [max_fit(partial(apart, method), available) for method in methods]
    shares = ([max(equal, batch * (1000 - less) // 1000) for batch in alone] for less in range(1001))
    return next(b for b in shares if plan(list(zip(methods, b, strict=True))).total <= SHARE * available)


def plan_of(
    config: Config, spec: ModelSpec, settings: EngineSettings, sized: list[tuple[Method, int]],
    verification: Verification, lengths: tuple[int, ...],
) -> MemoryPlan:  # fmt: skip
    """The memory of a comparison of methods with their batches on prompts of these lengths."""
    sampling, real = config["sampling"], config["model"]["weights"] == "real"
    candidates = 1 if sampling["temperature"] == 0 else min(sampling["top_k"] or spec.vocab_size, spec.vocab_size)
    work = Work(
        lengths, config["benchmark"]["max_new_tokens"], candidates, config["protocol"]["prompt_kv"] == "prefill",
        packed=real and settings.device == "cpu" and settings.dtype == torch.float32,
    )  # fmt: skip
    return plan_memory(spec, settings, sized, verification, work)


def available_bytes(config: Config, plan: MemoryPlan) -> int:
    """Free memory, that of the model included if it is the one already loaded; another one goes first."""
    if is_loaded(config):
        free_cached()
        return free_bytes(config["engine"]["device"]) + plan.parts["weights"]
    unload()
    return free_bytes(config["engine"]["device"])


def engine_settings(config: Config, spec: ModelSpec, longest: int) -> EngineSettings:
    """Raises ValueError where a prompt and its answer exceed the context."""
    engine = config["engine"]
    limit = engine["max_len"] or longest
    if longest > limit or limit > spec.max_len:
        raise ValueError(
            f"the longest request takes {longest} tokens, engine.max_len is {limit}, the model's context "
            f"{spec.max_len}; lower benchmark.max_new_tokens or the prompt length"
        )
    return EngineSettings(
        slots=config["batch"], max_len=limit, page_size=engine["page_size"], pages=engine["pages"],
        prefill_chunk=engine["prefill_chunk"], device=engine["device"], dtype=getattr(torch, config["model"]["dtype"]),
        graphs=engine["graphs"], invariant=engine["invariant"],
    )  # fmt: skip


def check_pages(settings: EngineSettings, lengths: tuple[int, ...], answer: int, longest_draft: int) -> None:
    """Raises ValueError where engine.pages cannot hold the prompts and one slot."""
    least = pool_pages(settings.page_size, lengths, 1, answer, longest_draft)
    if settings.pages is not None and settings.pages < least:
        raise ValueError(
            f"the prompts and one slot need {least} pages of {settings.page_size} tokens, engine.pages is "
            f"{settings.pages}; raise it, or lower benchmark.source.requests or the prompt length"
        )
