"""What may a configuration hold, and what is said when it holds something else? The schema and its errors."""

import difflib
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF = Path(__file__).parents[1] / "conf"
UNIQUE = secrets.token_hex(3)  # two runs that start in the same second get two folders
MAX_FIT = "max_fit"  # as a batch: as many slots as the memory holds
METHODS = (
    "autoregressive", "magicdec_stream", "magicdec_snapkv", "vegas", "sparsespec",
    "aspire_fixed", "aspire_fsm", "aspire", "vegas_async",
)  # fmt: skip


@dataclass
class ModelConf:
    name: str = MISSING
    label: str = MISSING
    path: str = MISSING
    revision: str | None = None
    tokenizer: str | None = None
    weights: str = "real"
    dtype: str = "float32"
    rope_scaling: Any = None  # null or a mapping: Hydra cannot put a mapping over a null of a declared one
    long_rope_scaling: Any = None
    shape: dict[str, Any] | None = None


@dataclass
class BenchmarkConf:
    name: str = MISSING
    label: str = MISSING
    max_new_tokens: int = MISSING
    source: dict[str, Any] = MISSING
    scoring: dict[str, Any] | None = None


@dataclass
class MethodConf:
    _target_: str = "aspire.policies.Method"
    name: str = MISSING
    label: str | None = None
    selection: dict[str, Any] = MISSING
    speculation: dict[str, Any] = MISSING
    refresh: dict[str, Any] = MISSING


@dataclass
class BudgetConf:
    ratio: float = MISSING
    floor: int = MISSING
    recent: int = MISSING


@dataclass
class EngineConf:
    device: str = "auto"
    page_size: int = 16
    prefill_chunk: int | None = None
    max_len: int | None = None
    pages: int | None = None
    threads: int | None = None
    graphs: bool | None = None
    invariant: bool = False


@dataclass
class SamplingConf:
    temperature: float = MISSING
    top_k: int = MISSING
    top_p: float = MISSING


@dataclass
class VerificationConf:
    mode: str = MISSING
    draft_sampling: str = "sampled"


@dataclass
class AcceptanceConf:
    profile: str = "measured"
    alpha: float = 0.9
    rho: float = 0.8
    sigma: float = 0.3


@dataclass
class ProtocolConf:
    window_tokens: int = MISSING
    tokens_per_slot: int | None = None
    replay: str = "cyclic"
    prompt_kv: str = "prefill"
    warmup_passes: int = MISSING
    repeats: int = MISSING
    gate: int = 0


@dataclass
class TrackingConf:
    mode: str = "disabled"
    project: str = "aspire"
    entity: str | None = None
    group: str | None = None
    timeout_s: int = 60


@dataclass
class ComparisonConf:
    methods: list[str] | None = None
    batch_mode: str = "equal"


@dataclass
class ScaleConf:
    model: float = 1.0
    mlp: float = 1.0
    attn: float = 1.0


@dataclass
class CalibrationConf:
    dir: str = "calibration"
    passes: int = 60
    scale: ScaleConf = field(default_factory=ScaleConf)


@dataclass
class RunConf:
    model: ModelConf = field(default_factory=ModelConf)
    benchmark: BenchmarkConf = field(default_factory=BenchmarkConf)
    method: MethodConf = field(default_factory=MethodConf)
    budget: BudgetConf = field(default_factory=BudgetConf)
    engine: EngineConf = field(default_factory=EngineConf)
    sampling: SamplingConf = field(default_factory=SamplingConf)
    verification: VerificationConf = field(default_factory=VerificationConf)
    acceptance: AcceptanceConf = field(default_factory=AcceptanceConf)
    protocol: ProtocolConf = field(default_factory=ProtocolConf)
    tracking: TrackingConf = field(default_factory=TrackingConf)
    comparison: ComparisonConf = field(default_factory=ComparisonConf)
    calibration: CalibrationConf = field(default_factory=CalibrationConf)
    study: Any = None  # of conf/experiment: what experiments/study.py runs
    path: str | None = None  # of source=local
    batch: Any = 8  # a number, or max_fit
    seed: int = 123
    output_dir: str = MISSING
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False  # list the jobs and leave


def register() -> None:
    """Make the schema and the `unique` resolver known to Hydra; calling it again changes nothing."""
    ConfigStore.instance().store("run_schema", RunConf)
    OmegaConf.register_new_resolver("unique", lambda: UNIQUE, replace=True)


def plain(config: DictConfig) -> dict[str, Any]:
    """Resolved and plain, as a record keeps it."""
    content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def for_method(overrides: list[str], method: str) -> DictConfig:
    """The same run with another method; Hydra must be initialised. Raises ValueError for an unknown name."""
    names = choices("method")
    if method not in names:
        raise ValueError(f"unknown method {method!r} in comparison.methods{nearest(method, names)}")
    kept = [x for x in overrides if not x.startswith(("method=", "output_dir="))]
    return compose("config", [*kept, f"method={method}", "output_dir=."])


def choices(group: str) -> list[str]:
    """The options of a config group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups() -> list[str]:
    return sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*") if path.is_dir())


def nearest(word: str, known: list[str]) -> str:
    """' - did you mean x?', or the whole list when nothing is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" - did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def check_overrides(arguments: list[str]) -> None:
    """Refuse an unknown key or option before Hydra starts a job. Raises ValueError naming the nearest match."""
    words = [x for x in arguments if not x.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise ValueError(f"cannot read the overrides: {error}") from None
    first = first_choices(words)
    selecting = [text for text, override in zip(first, parsed, strict=True) if override.key_or_group in groups()]
    for override in parsed:
        swept = override.is_sweep_override()
        for option in override.sweep_string_iterator() if swept else [override.value()]:
            _check_option(override.key_or_group, option)
            if override.key_or_group == "batch":
                check_batch(int(option) if str(option).isdigit() else option)
    try:
        known = [*groups(), *_keys(plain_keys(compose("config", selecting)))]
        for override in parsed:
            key = override.key_or_group
            if not override.is_add() and not key.startswith("hydra") and key not in known:
                raise ValueError(f"unknown key {key!r}{nearest(key, known)}")
        check_batch(compose("config", first).batch)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_short(error)) from None


def check_batch(batch: Any) -> None:
    """Raises ValueError for a batch that is neither a whole number nor max_fit."""
    if batch != MAX_FIT and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise ValueError(f"batch is {batch!r}; give a number of slots, or {MAX_FIT}")


def _check_option(group: str, option: Any) -> None:
    if group in groups() and isinstance(option, str) and option not in choices(group):
        raise ValueError(f"unknown {group} {option!r}{nearest(option, choices(group))}")


def first_choices(words: list[str]) -> list[str]:
    """The overrides of a sweep's first job."""
    return [_first_choice(override) for override in OverridesParser.create().parse_overrides(words)]


def _first_choice(override: Any) -> str:
    """An override with a sweep cut down to its first value."""
    if not override.is_sweep_override():
        return str(override.input_line)
    values = list(override.sweep_string_iterator())
    prefix = override.input_line.split("=", 1)[0]
    return f"{prefix}={values[0]}"


def plain_keys(config: DictConfig) -> dict[str, Any]:
    """Unresolved content, for its keys."""
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _short(error: Exception) -> str:
    """Hydra's message without its stack of causes."""
    lines = [x.strip() for x in str(error).splitlines() if x.strip()]
    cause = error.__cause__
    if cause is not None and str(cause).splitlines()[0] not in lines:
        lines.append(str(cause).splitlines()[0])
    return re.sub(r"\s+", " ", " ".join(lines[:2]))


def split(arguments: list[str], defaults: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """A script's own `key=value` words over their defaults, and the rest: overrides for Hydra."""
    own, rest = dict(defaults), []
    for word in arguments:
        key, _, value = word.partition("=")
        if key in own:
            own[key] = value
        else:
            rest.append(word)
    return own, rest


def script(main: Callable[[list[str]], int | None]) -> None:
    """Run a script on its words. Exit code 1 where main counts failures, 2 with one line for a ValueError."""
    try:
        raise SystemExit(1 if main(sys.argv[1:]) else 0)
    except ValueError as error:
        refuse(error)


def refuse(error: Exception) -> None:
    """One clear line, then out."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
