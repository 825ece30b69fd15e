"""What did the GPU runs give? Tables of plain decoding, shapes, uneven acceptance, real text and kernels.

`python -m experiments.redraw` rewrites results/tables/gpu_*.{md,csv} from whatever lies below results/records/h200, the
same bytes from the same files: SUITE/COMPARISON/CELL as experiments/bench_gpu.py writes them; kernels.json of
experiments/bench_kernels.py; vllm.jsonl, a line a cell of vLLM {model, batch, context, prefill_s, step_ms, tok_s}, on
the same GPU in the same hour. A record is divided by records of its own comparison alone.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from experiments import metrics, tables
from experiments.config import METHODS
from experiments.records import PASSES, Record, find_records, pick
from experiments.tables import ACCEPTANCE, BASELINE, DASH, Run

GPU = "h200"  # the folder of GPU runs among the records
KERNELS, VLLM = "kernels.json", "vllm.jsonl"
MODELS = ("smollm2_135m", "qwen3_1p7b", "qwen3_8b", "ds_r1_llama_8b")
FIXED = "aspire.policies.Fixed"
TOK_S, SPEEDUP, INTERVAL = "decode tok/s min–max", "decode speed-up min–max", "acceptance 95 %"
ROUND = "tokens per round (committed/rounds)"
PREFILL = "prefill s a prompt"
# One column of the printed table, two of the CSV.
SPREAD = {
    TOK_S: ("decode tok/s min", "decode tok/s max"),
    SPEEDUP: ("decode speed-up min", "decode speed-up max"),
    INTERVAL: ("acceptance 95 % low", "acceptance 95 % high"),
}
Columns = dict[str, int | None]  # name -> digits; None prints as it is
PREDICTED: Columns = {"predicted speed-up": 2, "decode speed-up": 2, SPEEDUP: 2, "measured / predicted": 2}
SIZES: Columns = {"model": None, "context": 0, "batch": 0}
DRAWN = (
    "Shapes evidence: random weights of the paper's architectures, acceptance emulated: drawn for each request from "
    "the stated profile."
)
BYTES = (
    "Predicted: the speed-up that the fewest bytes of the same passes (weights once, keys and values read and written) "
    "allow at copy bandwidth."
)
EMPTY = f"{DASH}: does not apply, or the note says why."


@dataclass(frozen=True)
class Sheet:
    """The table of one suite."""

    name: str
    columns: Columns
    words: str
    real: bool = False  # holds measured acceptance, so nothing emulated may enter


SHEETS = {
    "autoregressive": Sheet(
        "gpu_autoregressive",
        {
            **SIZES, "decode tok/s": 1, TOK_S: 1, "vLLM tok/s": 1, "tok/s / vLLM's": 3, "step ms": 3,
            "vLLM step ms": 3, "HBM efficiency": 3, "host gap": 4, PREFILL: 3, f"vLLM {PREFILL}": 3,
            "prefill / vLLM's": 2, "peak GiB": 2, "planned GiB": 2,
        },
        "Plain decoding on random weights beside vLLM on the same GPU in the same hour: median of the repeats, slowest "
        "and fastest. HBM efficiency: fewest bytes of the passes / copy bandwidth / their time. Host gap: share of the "
        "timed window that lies between passes.",
    ),
    "shapes": Sheet(
        "gpu_shapes",
        {
            "model": None, "context": 0, "batch mode": None, "batch": 0, "baseline batch": 0, "method": None,
            "acceptance source": None, ROUND: 2, "decode tok/s": 1, **PREDICTED, "host gap": 4, "peak GiB": 2,
        },
        f"{DRAWN} {BYTES} Batch mode max_fit: each method runs what fits it, less one share for all, so that all fit.",
    ),
    "hetero": Sheet(
        "gpu_hetero",
        {
            **SIZES, "method": None, "draft length": 0, "acceptance source": None, ROUND: 2, "decode tok/s": 1,
            TOK_S: 1, **PREDICTED, "best fixed length": None, "tok/s / best fixed length's": 3, "host gap": 4,
        },
        f"{DRAWN} {BYTES} Requests differ in acceptance; of the fixed draft lengths the fastest is marked.",
    ),
    "smollm2": Sheet(
        "gpu_smollm2",
        {
            "model": None, "benchmark": None, "batch": 0, "method": None, "decode tok/s": 1, TOK_S: 1,
            "decode speed-up": 2, SPEEDUP: 2, ACCEPTANCE: 3, INTERVAL: 3, "acceptance by position": None, ROUND: 2,
            "draft pass ms": 2, "verify pass ms": 2, "mixed pass ms": 2, "host gap": 3,
        },
        "Real evidence: real weights and text, acceptance measured, its interval a bootstrap over requests. By "
        "position: accepted at draft 1, 2, ... / rounds that drafted so far.",
        real=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """A suite's records and their table, a row a record, in the order shown."""

    runs: list[Run]
    table: pd.DataFrame


@dataclass(frozen=True)
class Cell:
    """A record with its requests, its passes (None: not recorded), and where it lies."""

    run: Run
    passes: list[dict[str, Any]] | None
    comparison: Path

    @property
    def record(self) -> Record:
        return self.run.record


def read(root: Path) -> dict[str, Suite]:
    """The suites below a folder of GPU runs. Raises ValueError for a suite that no table shows."""
    found: dict[str, list[Path]] = {}
    for folder in find_records(root):
        found.setdefault(folder.relative_to(root).parts[0], []).append(folder)
    if unknown := sorted(found.keys() - SHEETS.keys()):
        raise ValueError(f"no table shows {root / unknown[0]}; name the folder as its suite: {', '.join(SHEETS)}")
    return {name: read_suite(found[name], SHEETS[name]) for name in SHEETS if name in found}


def read_suite(folders: list[Path], sheet: Sheet) -> Suite:
    """Rows in the order of models, contexts and batches, plain decoding first in each comparison."""
    cells = [
        Cell(run, read_passes(folder), folder.parent) for folder, run in zip(folders, tables.load(folders), strict=True)
    ]
    emulated = [c.record.cell_id for c in cells if c.record.cell.evidence != "real" or tables.mark(c.record)]
    if sheet.real and emulated:
        raise ValueError(f"{emulated[0]} is not real evidence and cannot enter {sheet.name}; move it to another suite")
    comparisons = [list(own) for _, own in groupby(cells, key=lambda c: c.comparison)]
    ordered = [sorted(own, key=lambda c: place(c.record)) for own in comparisons]
    ordered.sort(key=lambda own: (*size(own[0].record), str(own[0].comparison)))
    rows = [row for own in ordered for row in rows_of(own)]
    return Suite([cell.run for own in ordered for cell in own], pd.DataFrame(rows))


def read_passes(folder: Path) -> list[dict[str, Any]] | None:
    path = folder / PASSES
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else None


def place(record: Record) -> tuple[bool, bool, int, str]:
    """Plain decoding first, then fixed lengths by length, then the methods as they are listed everywhere."""
    name = record.cell.method
    listed = name in METHODS
    return name != BASELINE, listed, METHODS.index(name) if listed else fixed_length(record) or 0, name


def size(record: Record) -> tuple[int, str, str, int, bool, int]:
    """What orders comparisons."""
    model, benchmark, batch = record.cell.model, record.cell.benchmark, record.cell.batch
    rank = MODELS.index(model) if model in MODELS else len(MODELS)
    return rank, model, benchmark, context_of(record) or 0, batch_mode(record) != "equal", batch


def context_of(record: Record) -> int | None:
    """Tokens of the longest prompt; of a cell that failed, those asked for."""
    return record.workload.prompt_tokens.max or pick(record.config, "benchmark.source.context")


def batch_mode(record: Record) -> str | None:
    return pick(record.protocol, "batch_mode") or pick(record.config, "comparison.batch_mode")


def fixed_length(record: Record) -> int | None:
    """Draft length of a method whose slots all draft the same."""
    speculation = pick(record.config, "method.speculation") or {}
    return speculation.get("longest") if speculation.get("_target_") == FIXED else None


def rows_of(cells: list[Cell]) -> list[dict[str, Any]]:
    """The rows of one comparison."""
    base = next((c for c in cells if c.record.cell.method == BASELINE), None)
    fixed = [c.record for c in cells if fixed_length(c.record) is not None and c.record.metrics.decode_tok_s]
    best = max(fixed, key=lambda r: r.metrics.decode_tok_s or 0.0, default=None)
    return [row_of(cell, base, best) for cell in cells]


def row_of(cell: Cell, base: Cell | None, best: Record | None) -> dict[str, Any]:
    """Every number of a cell, None where it has none; best: the fastest fixed draft length of its comparison."""
    record, timing = cell.record, cell.record.timing
    row = tables.row(cell.run, base.record if base else None)
    predicted, why = predicted_speedup(cell, base)
    reasons = [row["note"], *([why] if record.status == "ok" and not row["note"] else [])]
    positions = record.metrics.acceptance_by_position
    step = metrics.ratio(timing.decode_s, timing.passes)
    return row | {
        "context": context_of(record),
        "batch mode": batch_mode(record),
        "baseline batch": base.record.cell.batch if base else None,
        "predicted speed-up": predicted,
        "measured / predicted": metrics.ratio(row["decode speed-up"], predicted),
        "acceptance by position": " ".join(DASH if x is None else f"{x:.2f}" for x in positions) if positions else None,
        "draft length": fixed_length(record),
        "best fixed length": "best" if record is best else None,
        "tok/s / best fixed length's": metrics.speedup(record, best)[0],
        "step ms": None if step is None else 1e3 * step,
        "HBM efficiency": record.metrics.hbm_efficiency,
        "host gap": timing.host_gap,
        "planned GiB": pick(record.protocol, "planned_gib"),
        "prompts": record.workload.requests,
        "random prompts": pick(record.protocol, "prompt_kv") == "random",
        "note": "; ".join(reason for reason in reasons if reason) or None,
    }  # fmt: skip


def predicted_speedup(cell: Cell, base: Cell | None) -> tuple[float | None, str | None]:
    """(speed-up that the bytes of the passes allow, None), or (None, why not)."""
    if base is None:
        return None, "no baseline record"
    for one in (cell, base):
        if one.passes is None:
            return None, f"no prediction: {one.record.cell.method} has no {PASSES}"
    value = metrics.predicted_speedup(cell.record, cell.passes or [], base.record, base.passes or [])
    return (value, None) if value is not None else (None, "no prediction: bytes or copy bandwidth not recorded")


def beside_vllm(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The rows of plain decoding, with vLLM's of the same cell where they were measured: medians, if several times.

    Prefill is compared by the prompt, so that one prompt of a context stands for a batch of them.
    """
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for text in path.read_text("utf-8").splitlines() if path.exists() else []:
        if text.strip():
            line = json.loads(text)
            line[PREFILL] = metrics.ratio(line.get("prefill_s"), line["batch"])
            for batch in (line["batch"], None):
                lines.setdefault((line["model"], batch, line["context"]), []).append(line)

    def added(row: dict[str, Any]) -> dict[str, Any]:
        model, context = vllm_name(row["model"]), row["context"]
        theirs = lines.get((model, row["batch"], context), [])
        tok_s, step = middle(theirs, "tok_s"), middle(theirs, "step_ms")
        prefill = middle(lines.get((model, None, context), []), PREFILL)
        reasons = [row["note"], None if theirs else "vLLM not measured at this batch"]
        if row["random prompts"]:
            reasons.append("no prefill: prompt KV is random")
        own = None if row["random prompts"] else metrics.ratio(row["prefill s"], row["prompts"])
        return row | {
            "vLLM tok/s": tok_s, "tok/s / vLLM's": metrics.ratio(row["decode tok/s"], tok_s), "vLLM step ms": step,
            PREFILL: own, f"vLLM {PREFILL}": prefill, "prefill / vLLM's": metrics.ratio(own, prefill),
            "note": "; ".join(reason for reason in reasons if reason) or None,
        }  # fmt: skip

    # Records come through dicts, not the frame, which would turn None into NaN.
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return pd.DataFrame([added(row) for row in rows if row["method"] == BASELINE])


def middle(lines: list[dict[str, Any]], key: str) -> float | None:
    """Median of what the lines say, None if they say nothing."""
    known = [line[key] for line in lines if line.get(key) is not None]
    return median(known) if known else None


def vllm_name(model: str) -> str:
    """qwen3_1p7b is qwen3-1.7b there."""
    return re.sub(r"(?<=\d)p(?=\d)", ".", model).replace("_", "-")


KERNEL_COLUMNS: Columns = {
    "kernel": None, "us": 1, "TB/s": 2, "share of copy": 2, "bounded": None, "reached": 3, "bound": 2, "verdict": None,
}  # fmt: skip
VERDICT = {None: None, True: "ok", False: "below"}


def kernel_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a kernel: attention with its bounds, FlashAttention beside it, then what is timed alone."""
    rows = [attention_row(line) for line in found["attention"]]
    for line in found.get("flash", []):
        rate = {"TB/s": line.get("tb_s"), "share of copy": line.get("share"), "note": line.get("error")}
        rows.append({"kernel": f"FlashAttention 3, contiguous: {line['cell']}"} | rate)
    return rows + [{"kernel": name, "us": us} for name, us in found.get("kernels_us", {}).items()]


def attention_row(line: dict[str, Any]) -> dict[str, Any]:
    """Each kind of cell has a bound of its own kind."""
    row = {"kernel": line["cell"], "us": line["us"], "TB/s": line.get("tb_s"), "share of copy": line.get("share")}
    if "scores_add" in line:
        note = f"with its scores; {line['us']:.1f} us without"
        row |= {"us": line["reduced_us"], "bounded": "time added, at most", "reached": line["scores_add"], "note": note}
    elif "over_dense" in line:
        row |= {"bounded": "time / its bytes at the dense rate, at most", "reached": line["over_dense"]}
    elif line["bound"] is not None:
        row |= {"bounded": "share of copy, at least", "reached": line["share"]}
    return row | {"bound": line["bound"], "verdict": VERDICT[line["ok"]]}


def kernel_words(found: dict[str, Any]) -> str:
    where = found["environment"]
    said = "; ".join(f"{name}: {where[name]}" for name in ("device", "torch", "triton", "driver") if where.get(name))
    said += f"; commit: {commit_of(where.get('commit'), where.get('dirty'))}"
    return (
        f"{said}; copy: {found['copy_tb_s']:.2f} TB/s read and written. Attention: bytes of the keys and values that "
        "its rows must read / time; us: one call, median of seven replays of a captured graph. "
        f"{DASH}: no bound is set, the number does not apply, or the note says why."
    )


def write_gpu_tables(root: Path, out: Path, suites: dict[str, Suite] | None = None) -> list[Path]:
    """Write the tables of what lies below root and return their paths; none if there is nothing."""
    suites = read(root) if suites is None else suites
    written = []
    for name, suite in suites.items():
        sheet, table = SHEETS[name], suite.table
        if name == "autoregressive":
            table = beside_vllm(table, root / VLLM)
        written += write(table, sheet.columns, f"{caption(suite.runs)} {sheet.words} {EMPTY}", out / sheet.name)
    if (root / KERNELS).exists():
        found = json.loads((root / KERNELS).read_text("utf-8"))
        table = pd.DataFrame(kernel_rows(found))
        written += write(table, KERNEL_COLUMNS, kernel_words(found), out / "gpu_kernels")
    return written


def caption(runs: list[Run]) -> str:
    """Where, what and how often: of failed cells nothing is known but what was asked."""
    records = [run.record for run in runs]
    copies = [f"{r.environment.copy_tb_s:.2f}" for r in records if r.environment.copy_tb_s is not None]
    repeats = [len(r.timing.repeats.decode_s) for r in records if r.timing.repeats]
    say: Iterable[tuple[str, list[Any]]] = [
        ("torch", [r.environment.torch for r in records]),
        ("triton", [r.environment.triton for r in records]),
        ("driver", [r.environment.driver for r in records]),
        ("commit", [commit_of(r.environment.commit, r.environment.dirty) for r in records if r.status == "ok"]),
        ("copy TB/s", sorted(copies)),
        ("repeats", sorted(repeats)),
    ]
    return f"{tables.caption(runs)} {'; '.join(f'{name}: {tables._distinct(values)}' for name, values in say)}."


def commit_of(commit: str | None, dirty: bool | None) -> str:
    """A tree with uncommitted changes is not its commit."""
    return f"{commit[:12]}{' with changes' if dirty else ''}" if commit else "not recorded"


def write(table: pd.DataFrame, columns: Columns, words: str, stem: Path) -> list[Path]:
    """Write stem.md with chosen digits and stem.csv unrounded, the same columns in both."""
    columns = columns | {"note": None}
    names = [part for name in columns for part in SPREAD.get(name, (name,))]
    table = table.reindex(columns=[*names, "label", "mark"])
    shown = pd.DataFrame({name: printed(table, name, digits) for name, digits in columns.items()})
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = {
        ".md": f"{tables._piped(shown).to_markdown(index=False, disable_numparse=True)}\n\n{words}\n",
        ".csv": table[names].to_csv(index=False, float_format="%.6g", lineterminator="\n"),
    }
    paths = [stem.with_name(stem.name + suffix) for suffix in text]
    for path in paths:
        path.write_text(text[path.suffix], encoding="utf-8")
    return paths


def printed(table: pd.DataFrame, name: str, digits: int | None) -> list[str]:
    """A column as text: methods by their label and mark, spreads in one."""
    if name == "method":
        return list(table["label"] + table["mark"].map(tables._spaced))
    if name in SPREAD:
        low, high = ([tables._text(x, digits) for x in table[part]] for part in SPREAD[name])
        return [a if a == DASH else f"{a}–{b}" for a, b in zip(low, high, strict=True)]
    return [tables._text(value, digits) for value in table[name]]
