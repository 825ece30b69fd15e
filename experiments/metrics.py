"""What do the numbers mean? Every metric as one pure function of request lines, used by tables, tracking and figures.

Ratios are ratios of sums, pooled over requests, never means of ratios; where nothing was counted the answer is None.
A round's accepted drafts always come first, so "accepted at position j" is "accepted at least j".
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from experiments import scores
from experiments.config import MAX_FIT
from experiments.records import Metrics, Record, RequestLine, Timing, Tokens, TpotMs, pick, read_record, read_requests

Lines = Sequence[RequestLine]
Interval = tuple[float, float]


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole, or None where either is unknown or there is no whole."""
    return part / whole if part is not None and whole else None


def tokens(lines: Lines) -> Tokens:
    """The counters of the timed window."""
    return Tokens(
        committed=sum(line.committed for line in lines),
        drafted=sum(line.drafted for line in lines),
        accepted=sum(line.accepted for line in lines),
        rounds=sum(len(line.rounds) for line in lines),
        prompt=sum(line.prompt_tokens for line in lines),
    )


def histogram(lines: Lines) -> list[int]:
    """histogram[j] = rounds with j accepted drafts: sums to rounds, and sum of j * histogram[j] to accepted."""
    return np.bincount([accepted for line in lines for _, accepted in line.rounds]).tolist() if lines else []


def request_summary(line: RequestLine) -> dict[str, Any]:
    """One request's own numbers, ready for JSON."""
    return {
        "id": line.id,
        **tokens([line]).model_dump(),
        "acceptance_rate": acceptance_rate([line]),
        "tokens_per_round": tokens_per_round([line]),
        "histogram": histogram([line]),
    }


def acceptance_rate(lines: Lines) -> float | None:
    """accepted / drafted."""
    count = tokens(lines)
    return ratio(count.accepted, count.drafted)


def mean_request_acceptance(lines: Lines) -> float | None:
    """Mean over requests of each one's acceptance rate; requests that drafted nothing have none."""
    rates = [rate for line in lines if (rate := acceptance_rate([line])) is not None]
    return fmean(rates) if rates else None


def mean_accepted_drafts(lines: Lines) -> float | None:
    """accepted / rounds: without the correction or bonus token."""
    count = tokens(lines)
    return ratio(count.accepted, count.rounds)


def tokens_per_round(lines: Lines) -> float | None:
    """committed / rounds: with the correction or bonus token, and only what was emitted."""
    count = tokens(lines)
    return ratio(count.committed, count.rounds)


def acceptance_by_position(lines: Lines) -> list[float | None]:
    """Entry j - 1: accepted at position j / rounds that drafted at least j."""
    return _by_position(lines, lambda drafted, accepted, j: drafted >= j)


def conditional_acceptance_by_position(lines: Lines) -> list[float | None]:
    """Entry j - 1: accepted at position j / rounds that drafted at least j and accepted everything before it."""
    return _by_position(lines, lambda drafted, accepted, j: (drafted >= j) & (accepted >= j - 1))


def _by_position(lines: Lines, counts: Callable[..., np.ndarray]) -> list[float | None]:
    rounds = np.array([pair for line in lines for pair in line.rounds], dtype=np.int64).reshape(-1, 2)
    drafted, accepted = rounds.T
    longest = int(drafted.max(initial=0))
    return [ratio(int((accepted >= j).sum()), int(counts(drafted, accepted, j).sum())) for j in range(1, longest + 1)]


def bootstrap_ci(
    lines: Lines, metric: str = "acceptance_rate", level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """Percentile bootstrap over requests of "acceptance_rate" or "tokens_per_round"; None below two requests."""
    pairs = {
        "acceptance_rate": [(line.accepted, line.drafted) for line in lines],
        "tokens_per_round": [(line.committed, len(line.rounds)) for line in lines],
    }
    if metric not in pairs:
        raise ValueError(f"no bootstrap for {metric!r}; choose one of {sorted(pairs)}")
    counted = np.array([pair for pair in pairs[metric] if pair[1]], dtype=np.float64)
    if len(counted) < 2:
        return None
    from scipy import stats  # here: its import takes a second

    result = stats.bootstrap(
        tuple(counted.T),
        lambda part, whole, axis: part.sum(axis) / whole.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=256,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def decode_tok_s(committed: int | None, timing: Timing) -> float | None:
    """Committed tokens / seconds of the timed window; prefill is outside."""
    return ratio(committed, timing.decode_s)


def e2e_tok_s(committed: int | None, timing: Timing) -> float | None:
    """Committed tokens / (prefill + decode) seconds."""
    if timing.prefill_s is None or timing.decode_s is None:
        return None
    return ratio(committed, timing.prefill_s + timing.decode_s)


def tpot_ms(lines: Lines, decode_seconds: Sequence[float]) -> TpotMs | None:
    """Percentiles over requests of milliseconds per committed token, given each request's decode seconds."""
    if len(lines) != len(decode_seconds):
        raise ValueError(f"{len(lines)} requests but {len(decode_seconds)} decode times; pass one time a request")
    each = [1e3 * s / line.committed for line, s in zip(lines, decode_seconds, strict=True) if line.committed]
    if not each:
        return None
    p50, p95, p99 = np.percentile(each, [50, 95, 99]).tolist()
    return TpotMs(p50=p50, p95=p95, p99=p99)


# Two records that both lack one of the known facts are not thereby alike; lacking another one they may be.
KNOWN = ("device", "dtype", "requests", "run")
SAME = (*KNOWN, "model", "batch", "sampling", "engine settings", "output policy", "evidence")


Passes = Sequence[dict[str, Any]]
OWN = ("warmup_passes", "graph_misses", "planned_gib", "gate_counts")  # of the protocol, a method's own


def compared(record: Record) -> dict[str, Any]:
    """What two records must share before their speeds may be divided, by name."""
    config, sampling = record.config, record.sampling
    # Each method warms up the passes it will use, so warm-up may differ; the window and the replay may not.
    protocol = {k: v for k, v in (record.protocol or {}).items() if k not in OWN}
    values = (
        record.environment.device,
        pick(config, "engine.dtype") or pick(config, "model.dtype"),
        record.workload.data_hash,
        config.get("run_id"),
        {"name": record.cell.model, "config": config.get("model")},
        MAX_FIT if protocol.get("batch_mode") == MAX_FIT else record.cell.batch,
        # Not the verification rule: plain decoding has none.
        {k: getattr(sampling, k) for k in ("temperature", "top_k", "top_p", "seed")},
        config.get("engine"),
        {"benchmark": config.get("benchmark"), "protocol": protocol},
        record.cell.evidence,
    )
    return dict(zip(SAME, values, strict=True))


def speedup(record: Record, baseline: Record | None, metric: str = "decode_tok_s") -> tuple[float | None, str | None]:
    """(ratio, None) of two records of one comparison, or (None, why not). Printed as it is: below 1 is a result.

    metric is "decode_tok_s" or "e2e_tok_s".
    """
    if baseline is None:
        return None, "no baseline record"
    for one in (record, baseline):
        if one.status != "ok":
            return None, f"{one.cell.method} {one.status}" + (f": {one.error}" if one.error else "")
        if one.timing.resumed:
            return None, f"{one.cell.method} was resumed: {one.timing.resumed}"
    mine, theirs = compared(record), compared(baseline)
    for name in SAME:
        if name in KNOWN and (mine[name] is None or theirs[name] is None):
            return None, f"{name} not recorded"
        if mine[name] != theirs[name]:
            return None, f"{name} differs from the baseline's{_difference(mine[name], theirs[name])}"
    value = ratio(getattr(record.metrics, metric), getattr(baseline.metrics, metric))
    return (value, None) if value is not None else (None, f"{metric} not recorded")


def fewest_bytes(fed: int, kv_tokens: float, weight_bytes: int, kv_bytes: int) -> float:
    """What a pass must move at least: the weights once, the KV its rows read, the KV it writes."""
    return weight_bytes + kv_bytes * (kv_tokens + fed)


def predicted_tok_s(record: Record, passes: Passes) -> float | None:
    """Tokens a second, were bytes all that counts: committed tokens of the passes / (their fewest bytes / bandwidth).

    passes: the lines of passes.jsonl, so the draft lengths are those that occurred.
    """
    protocol, copy = record.protocol or {}, record.environment.copy_tb_s
    if copy is None or not {"pass_bytes", "kv_bytes"} <= protocol.keys() or any("fed" not in p for p in passes):
        return None
    sizes = protocol["pass_bytes"], protocol["kv_bytes"]
    moved = sum(fewest_bytes(p["fed"], p["kv_tokens"], *sizes) for p in passes)
    return ratio(sum(p["tokens"] for p in passes), moved / (copy * 1e12))


def predicted_speedup(record: Record, passes: Passes, baseline: Record, base_passes: Passes) -> float | None:
    """The speed-up that the bytes of both methods' passes allow."""
    return ratio(predicted_tok_s(record, passes), predicted_tok_s(baseline, base_passes))


def _difference(mine: Any, theirs: Any) -> str:
    """The first key that differs, or the two values."""
    trail = ""
    while isinstance(mine, dict) and isinstance(theirs, dict):
        key = next(key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key))
        trail, mine, theirs = f"{trail}.{key}" if trail else key, mine.get(key), theirs.get(key)
    return f" ({trail + ': ' if trail else ''}{mine} against {theirs})"


def tok_s_spread(record: Record) -> Interval | None:
    """Slowest and fastest repeat, decode tok/s."""
    seconds = record.timing.repeats.decode_s if record.timing.repeats else []
    if not seconds or record.tokens.committed is None:
        return None
    return record.tokens.committed / max(seconds), record.tokens.committed / min(seconds)


def speedup_spread(record: Record, baseline: Record | None) -> Interval | None:
    """Lowest and highest speed-up over repeats, each repeat divided by the baseline's of the same turn."""
    value, _ = speedup(record, baseline)
    if value is None or baseline is None or record.timing.repeats is None or baseline.timing.repeats is None:
        return None
    mine, theirs = record.timing.repeats.decode_s, baseline.timing.repeats.decode_s
    per_token = ratio(record.tokens.committed, baseline.tokens.committed)
    if not mine or len(mine) != len(theirs) or per_token is None:
        return None
    turns = [per_token * base / own for own, base in zip(mine, theirs, strict=True)]
    return min(turns), max(turns)


def summarise(
    lines: Lines,
    timing: Timing,
    tpot: TpotMs | None = None,
    peak_gib: float | None = None,
    hbm_efficiency: float | None = None,
) -> tuple[Tokens, Metrics]:
    """The two derived sections of a record. The last three arguments are measurements and pass through."""
    count = tokens(lines)
    return count, Metrics(
        decode_tok_s=decode_tok_s(count.committed, timing),
        e2e_tok_s=e2e_tok_s(count.committed, timing),
        acceptance_rate=acceptance_rate(lines),
        acceptance_by_position=acceptance_by_position(lines) or None,
        tokens_per_round=tokens_per_round(lines),
        tpot_ms=tpot,
        peak_gib=peak_gib,
        hbm_efficiency=hbm_efficiency,
    )


def recompute(record: Record, lines: Lines) -> dict[str, Any]:
    """Every derived number of the record by its dotted name, rebuilt from the lines and the measured times."""
    measured, timing = record.metrics, record.timing
    if timing.repeats is not None and timing.repeats.decode_s:
        timing = timing.model_copy(update={"decode_s": median(timing.repeats.decode_s)})
    count, metrics = summarise(lines, timing, measured.tpot_ms, measured.peak_gib, measured.hbm_efficiency)
    return {
        **{f"tokens.{name}": value for name, value in count.model_dump().items()},
        "timing.decode_s": timing.decode_s,
        **{f"metrics.{name}": value for name, value in metrics.model_dump().items()},
        **_quality(record, lines),
    }


def _quality(record: Record, lines: Lines) -> dict[str, Any]:
    """The quality section, where there is one or should be one."""
    if record.quality is None and not any(line.graded for line in lines):
        return {}
    scorer = record.quality.scorer if record.quality else ""
    return {"quality": scores.quality(lines, scorer).model_dump()}


def broken_rules(line: RequestLine) -> list[str]:
    """Which counting rules of experiments/records.py a line breaks; empty for a sound one."""
    faults = [f"accepts {a} of {d} drafts" for d, a in line.rounds if not 0 <= a <= d]
    # One token short is the last round cut by a stop on an accepted draft, and only a finished request has that.
    cut = len(line.rounds) + line.accepted - line.committed
    may_be_cut = line.finish_reason is not None and line.rounds and line.rounds[-1][1] > 0
    if cut != 0 and not (cut == 1 and may_be_cut):
        faults.append(f"commits {line.committed} tokens in {len(line.rounds)} rounds with {line.accepted} accepted")
    return [f"request {line.id} {fault}" for fault in faults]


def check(folder: Path | str) -> None:
    """Recompute a cell's summary. Raises ValueError naming each field that differs; equality is exact."""
    record = read_record(folder)
    if record.status != "ok":
        return
    lines = read_requests(folder)
    faults = [fault for line in lines for fault in broken_rules(line)]
    stored = record.model_dump()
    for name, value in recompute(record, lines).items():
        if pick(stored, name) != value:
            faults.append(f"{name} is {pick(stored, name)} in the record but {value} from its requests")
    if faults:
        text = "\n".join(faults)
        raise ValueError(f"{folder}: the record does not follow from its requests; run the cell again:\n{text}")
