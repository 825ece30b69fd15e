"""What does a measured method leave? Its record, rebuilt from its requests, and the passes of its first window."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from aspire import calibrate
from aspire.engine import Engine, PassRecord
from aspire.policies import Method
from aspire.request import Request
from experiments.benchmarks import data_hash
from experiments.environment import copy_tb_s, environment
from experiments.gate import Gate
from experiments.journal import Finished
from experiments.loading import Config, model_used
from experiments.metrics import fewest_bytes, summarise, tpot_ms
from experiments.records import (
    PASSES,
    Cell,
    Graded,
    Parting,
    PromptTokens,
    Record,
    Repeats,
    RequestLine,
    SamplingUsed,
    Timing,
    Workload,
    cell_id,
    failed_record,
    write_record,
)  # fmt: skip
from experiments.scores import quality
from experiments.session import Session


@dataclass
class Window:
    """One timed window of one method."""

    requests: list[Request]
    passes: list[PassRecord]
    seconds: float = 0.0
    decode_s: dict[str, float] = field(default_factory=dict)  # of each request, while it held a slot
    peak_gib: float | None = None
    graph_misses: int = 0  # passes that waited for their capture
    aside: float = 0.0  # seconds spent on the journal


@dataclass
class Entry:
    """A method on its way through a comparison."""

    config: Config
    cell: Cell
    method: Method | None = None
    engine: Engine | None = None  # one for warm-up and all windows: its captured passes are its own
    calibration: calibrate.Calibration | None = None
    windows: list[Window] = field(default_factory=list)
    session: Session | None = None
    gate: Gate | None = None
    partings: dict[str, Parting] = field(default_factory=dict)  # by request id, of texts that the gate looked at
    graded: dict[str, Graded] = field(default_factory=dict)  # by request id
    error: str | None = None
    kept: Record | None = None  # finished by an earlier process: it is laid out with the others and not run again
    journal: Path | None = None  # of its finished requests, in a run that drains
    finished: list[Finished] = field(default_factory=list)  # what an earlier process left in the journal
    resumed: str | None = None  # what Timing says of it


def conclude(entry: Entry, out: Path) -> Record:
    """Write the record of an entry, with its requests and the passes of its first window."""
    name = cell_id(entry.cell)
    if entry.error is not None:
        record = failed_record(entry.cell, entry.config, entry.error, name)
        write_record(out / name, record)
        return record
    window = entry.windows[0]
    assert entry.session is not None
    cut = {item.id: item.original_tokens for item in entry.session.items if item.truncated}
    lines = [request_line(r, cut.get(item_id(r.id))) for r in window.requests]
    lines = [
        x.model_copy(update={"graded": entry.graded.get(x.id), "parting": entry.partings.get(x.id)}) for x in lines
    ]
    record = measured_record(entry, name, lines)
    (out / name).mkdir(parents=True, exist_ok=True)
    passes = (
        {
            "kinds": p.kinds, "ms": round(1e3 * p.seconds, 3), "tokens": p.committed, "fed": p.tokens,
            "kv_tokens": round(p.kv_tokens, 2),
        }
        for p in window.passes
    )  # fmt: skip
    (out / name / PASSES).write_text("".join(json.dumps(p) + "\n" for p in passes))
    write_record(out / name, record, lines)
    if entry.journal is not None:
        entry.journal.unlink()  # all its requests are in the record
    return record


def item_id(request_id: str) -> str:
    """The item that a request asks; a replay has its turn behind the item's id."""
    name, _, turn = request_id.rpartition("~")
    return name if turn.isdigit() else request_id


def request_line(request: Request, original_tokens: int | None = None) -> RequestLine:
    """original_tokens: of a prompt before it was cut."""
    prompt = hashlib.sha1(json.dumps(request.prompt_ids).encode()).hexdigest()
    return RequestLine(
        id=request.id, prompt_ids_sha1=prompt, prompt_tokens=len(request.prompt_ids), output_ids=request.output_ids,
        finish_reason=request.finish_reason, seed=request.sampling.seed, rounds=request.rounds,
        original_tokens=original_tokens,
    )  # fmt: skip


def measured_record(entry: Entry, name: str, lines: list[RequestLine]) -> Record:
    """The record of a cell that ran; every number comes from its lines and its windows."""
    session = entry.session
    assert session is not None
    config, device = entry.config, session.settings.device
    filled = config["protocol"]["prompt_kv"] == "random"  # nothing was prefilled
    timing = timing_of(entry.windows, None if filled else session.prefill_s, bool(session.settings.graphs))
    if entry.resumed:
        unknown = {"passes": None, "host_gap": None} if entry.finished else {}
        timing = timing.model_copy(update={"resumed": entry.resumed, **unknown})
    times = [entry.windows[0].decode_s.get(line.id, 0.0) for line in lines]
    peaks = [w.peak_gib for w in entry.windows if w.peak_gib is not None]
    efficiency = (
        hbm_efficiency(entry, session) if device.startswith("cuda") and any(w.passes for w in entry.windows) else None
    )
    tokens, metrics = summarise(lines, timing, tpot_ms(lines, times), max(peaks, default=None), efficiency)
    calibration = None if entry.calibration is None else asdict(entry.calibration)
    layout = session.layout
    protocol = config["protocol"] | ({"source": layout.provenance} if "path" in layout.provenance else {})
    protocol |= {
        "batch_mode": layout.mode, "graphs": bool(session.settings.graphs), "planned_gib": layout.plan.gib,
        "graph_misses": sum(w.graph_misses for w in entry.windows),
        "pass_bytes": weight_bytes_read(session),
        "kv_bytes": layout.spec.kv_bytes_per_token(layout.settings.dtype),
        "gate_counts": None if entry.gate is None else entry.gate.as_record(),
    }  # fmt: skip
    return Record(
        cell_id=name, status="ok",
        cell=entry.cell.model_copy(update={"acceptance": session.verification.acceptance_mark}),
        environment=environment(device), config=config, model=model_used(session.config, session.layout.spec),
        workload=workload_of(session),
        sampling=SamplingUsed(**config["sampling"], seed=config["seed"], verification=config["verification"]["mode"]),
        protocol=protocol, tokens=tokens, timing=timing, metrics=metrics, calibration=calibration,
        quality=quality(lines, repr(layout.scorer)) if entry.graded else None,
    )  # fmt: skip


def timing_of(windows: list[Window], prefill_s: float | None, captured: bool) -> Timing:
    """prefill_s: the shared prefill of all prompts; pass times are means over all windows.

    captured: passes were launched whole, so that what they leave of the window is idle time; else that is not known.
    """

    def mean_ms(kind: str) -> float | None:
        each = [1e3 * p.seconds for w in windows for p in w.passes if p.kind == kind]
        return sum(each) / len(each) if each else None

    seconds = [w.seconds for w in windows]
    return Timing(
        prefill_s=prefill_s, decode_s=median(seconds), passes=len(windows[0].passes), draft_pass_ms=mean_ms("draft"),
        verify_pass_ms=mean_ms("verify"), mixed_pass_ms=mean_ms("mixed"),
        host_gap=1 - sum(p.seconds for w in windows for p in w.passes) / sum(seconds) if captured else None,
        repeats=Repeats(decode_s=seconds),
    )  # fmt: skip


def workload_of(session: Session) -> Workload:
    items = session.items
    tasks = Counter(item.task for item in items if item.task is not None)
    return Workload(
        requests=len(items), data_hash=data_hash(items), truncated=sum(item.truncated for item in items),
        prompt_tokens=spread([len(item.prompt_ids) for item in items]),
        original_tokens=spread([item.original_tokens for item in items]),
        template_hash=session.layout.provenance.get("template_hash"), first_ids=list(items[0].prompt_ids[:8]),
        tasks=dict(sorted(tasks.items())) or None,
    )  # fmt: skip


def spread(lengths: list[int]) -> PromptTokens:
    """Shortest, mean and longest."""
    return PromptTokens(min=min(lengths), mean=sum(lengths) / len(lengths), max=max(lengths))


def weight_bytes_read(session: Session) -> int:
    """Bytes of the weights that every pass reads: all but the rows of a separate embedding, which are looked up."""
    spec, dtype = session.model.spec, session.settings.dtype
    embedding = 0 if spec.tied else spec.vocab_size * spec.hidden_size * dtype.itemsize
    return spec.weight_bytes(dtype) - embedding


def hbm_efficiency(entry: Entry, session: Session) -> float:
    """Fewest bytes the passes had to move / measured copy bandwidth / their time: weights, KV read and written."""
    passes = [p for w in entry.windows for p in w.passes]
    kv = session.model.spec.kv_bytes_per_token(session.settings.dtype)
    moved = sum(fewest_bytes(p.tokens, p.kv_tokens, weight_bytes_read(session), kv) for p in passes)
    return moved / (copy_tb_s(session.settings.device) * 1e12) / sum(p.seconds for p in passes)
