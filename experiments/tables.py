"""How fast was every method on every workload, and why? One row a record, beside the published numbers.

`python -m experiments.redraw` rewrites results/tables/fig1.{md,csv,tex}: the same records give the same
bytes. Records are never averaged together and failed cells are rows too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import metrics
from experiments.records import Record, RequestLine, pick, read_record, read_requests

RESULTS = Path(__file__).resolve().parents[1] / "results"
BASELINE = "autoregressive"
WORKLOAD = ["model", "benchmark", "batch", "seed", "evidence", "run"]
ACCEPTANCE = "acceptance (accepted/drafted)"
MARKS = {"emulated": "†", "modelled": "‡"}
NOTES = {
    "†": "emulated acceptance on random weights: shows kernels, scheduler and memory, not a method's acceptance",
    "‡": "modelled: predicted by the fitted cost model, not run",
}
DASH = "–"
# Column of the printed table -> digits; None prints as it is. The CSV holds every column of frame() instead.
SHOWN: dict[str, int | None] = {
    **dict.fromkeys(["model", "benchmark", "batch", "method", "evidence", "acceptance source", "status"]),
    "decode tok/s": 1,
    "decode tok/s min–max": None,
    "decode speed-up": 2,
    "end-to-end speed-up": 2,
    "tokens per round (committed/rounds)": 2,
    ACCEPTANCE: 3,
    "draft pass ms": 2,
    "verify pass ms": 2,
    "mixed pass ms": 2,
    "prefill s": 2,
    "peak GiB": 2,
}


@dataclass(frozen=True)
class Run:
    """A record with its requests; a failed cell has none."""

    record: Record
    lines: list[RequestLine]


def load(folders: Iterable[Path | str]) -> list[Run]:
    """Read the cells. Raises ValueError where a finished record lacks its requests."""
    records = [(folder, read_record(folder)) for folder in folders]
    return [Run(record, read_requests(folder) if record.status == "ok" else []) for folder, record in records]


def method_order(records: Iterable[Record]) -> list[str]:
    """Methods in the order of the comparisons that ran them, then any other as met."""
    records = list(records)
    listed = [name for record in records for name in pick(record.config, "comparison.methods") or []]
    return list(dict.fromkeys([*listed, *(record.cell.method for record in records)]))


def mark(record: Record) -> str:
    """The sign that a number was not measured on real weights; empty where it was."""
    if record.cell.evidence == "modelled":
        return MARKS["modelled"]
    return MARKS["emulated"] if record.cell.acceptance != "measured" else ""


def workload(record: Record) -> dict[str, Any]:
    """What tells one group of methods from another."""
    cell = record.cell
    values = (cell.model, cell.benchmark, cell.batch, cell.seed, cell.evidence, record.config.get("run_id"))
    return dict(zip(WORKLOAD, values, strict=True))


def baseline_of(record: Record, records: Iterable[Record]) -> Record | None:
    """The baseline this record may be divided by; failing that one that says why not; failing that None."""
    mine = (record.cell.model, record.cell.benchmark)
    near = [r for r in records if r.cell.method == BASELINE and (r.cell.model, r.cell.benchmark) == mine]
    return next((r for r in near if metrics.speedup(record, r)[0] is not None), near[0] if near else None)


def row(run: Run, baseline: Record | None) -> dict[str, Any]:
    """Every number of one record, None where it has none."""
    record, m, timing = run.record, run.record.metrics, run.record.timing
    speedup, reason = metrics.speedup(record, baseline)
    drained = pick(record.config, "protocol.replay") == "drain"  # else one prefill would serve any number of replays
    e2e = metrics.speedup(record, baseline, "e2e_tok_s")[0] if drained else None
    low, high = metrics.tok_s_spread(record) or (None, None)
    speedup_low, speedup_high = metrics.speedup_spread(record, baseline) or (None, None)
    ci_low, ci_high = metrics.bootstrap_ci(run.lines) or (None, None)
    return {
        **workload(record),
        "method": record.cell.method,
        "label": record.label,
        "mark": mark(record),
        "acceptance source": record.cell.acceptance,
        "status": record.status,
        "note": " ".join(reason.split()) if reason else None,  # errors run over lines, a cell of a table cannot
        "decode tok/s": m.decode_tok_s,
        "decode tok/s min": low,
        "decode tok/s max": high,
        "decode speed-up": speedup,
        "decode speed-up min": speedup_low,
        "decode speed-up max": speedup_high,
        "end-to-end speed-up": e2e,
        "tokens per round (committed/rounds)": m.tokens_per_round,
        ACCEPTANCE: m.acceptance_rate,
        "acceptance 95 % low": ci_low,
        "acceptance 95 % high": ci_high,
        "acceptance (mean over requests)": metrics.mean_request_acceptance(run.lines),
        "draft pass ms": timing.draft_pass_ms,
        "verify pass ms": timing.verify_pass_ms,
        "mixed pass ms": timing.mixed_pass_ms,
        "prefill s": timing.prefill_s,
        "peak GiB": m.peak_gib,
    }


def published(folder: Path = RESULTS / "paper") -> pd.DataFrame:
    """Published speed-ups, one column a paper, indexed by our names of model, benchmark and method."""
    tables = [pd.read_csv(path).rename(columns={"workload": "benchmark"}) for path in sorted(folder.glob("*.csv"))]
    tables = [table for table in tables if "speedup" in table]
    index = ["model", "benchmark", "method"]
    if not tables:
        return pd.DataFrame(index=pd.MultiIndex.from_tuples([], names=index))
    wide = pd.concat(tables).pivot_table(index=index, columns="paper", values="speedup", aggfunc="first")
    return wide.rename(columns=published_column)


def published_column(paper: str) -> str:
    return f"published speed-up ({paper})"


def frame(runs: list[Run], paper: Path = RESULTS / "paper") -> pd.DataFrame:
    """One row a record, by workload and then by method order, with every number unrounded."""
    if not runs:
        raise ValueError("no records to show; run an experiment first, or pass the folder that holds them")
    records = [run.record for run in runs]
    table = pd.DataFrame([row(run, baseline_of(run.record, records)) for run in runs])
    rank = {name: place for place, name in enumerate(method_order(records))}
    table = table.assign(rank=table["method"].map(rank)).sort_values([*WORKLOAD, "rank"], kind="stable")
    return table.drop(columns="rank").join(published(paper), on=["model", "benchmark", "method"]).reset_index(drop=True)


def display(table: pd.DataFrame) -> pd.DataFrame:
    """The frame as text: chosen columns, fixed digits, a dash where there is nothing, notes last."""
    papers = [name for name in table.columns if name.startswith("published")]
    # A paper that has none of these models says nothing here; the first one is the paper under study and stays.
    papers = [name for place, name in enumerate(papers) if place == 0 or table[name].notna().any()]
    spread = [
        f"{low:.1f}–{high:.1f}" if pd.notna(low) else DASH
        for low, high in zip(table["decode tok/s min"], table["decode tok/s max"], strict=True)
    ]
    table = table.assign(**{"decode tok/s min–max": spread, "method": table["label"] + table["mark"].map(_spaced)})
    digits = SHOWN | dict.fromkeys(papers, 2) | {"note": None}
    return pd.DataFrame({name: [_text(value, places) for value in table[name]] for name, places in digits.items()})


def _spaced(sign: str) -> str:
    return f" {sign}" if sign else ""


def _text(value: Any, places: int | None) -> str:
    if pd.isna(value):
        return DASH
    return f"{value:.{places}f}" if places is not None else str(value)[:120]


def caption(runs: list[Run]) -> str:
    """What a reader must know beside the numbers: where, what, how sampled, which evidence."""
    records = [run.record for run in runs]
    say: list[tuple[str, list[Any]]] = [
        ("device", [r.environment.device for r in records]),
        ("model", [r.cell.model for r in records]),
        ("dtype", [metrics.compared(r)["dtype"] for r in records]),
        ("batch", [r.cell.batch for r in records]),
        ("sampling", [_sampling(r) for r in records if r.status == "ok"]),
        ("evidence", [r.cell.evidence for r in records]),
        ("acceptance", [r.cell.acceptance for r in records]),
    ]
    text = "; ".join(f"{name}: {_distinct(values)}" for name, values in say) + "."
    signs = sorted({mark(record) for record in records} - {""})
    return " ".join([text, *(f"{sign} {NOTES[sign]}." for sign in signs)])


def _distinct(values: list[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "not recorded"


def _sampling(record: Record) -> str:
    s = record.sampling
    return f"T {s.temperature:g} / top-k {s.top_k} / top-p {s.top_p:g} / seed {s.seed}" if s.top_p is not None else ""


def write_tables(folders: Iterable[Path | str], out: Path = RESULTS / "tables") -> list[Path]:
    """Write fig1.md, fig1.csv and fig1.tex from the cells' folders and return their paths."""
    runs = load(folders)
    table = frame(runs)
    shown = display(table)
    text = {
        "md": f"{_piped(shown).to_markdown(index=False, disable_numparse=True)}\n\n{caption(runs)}\n\n{beside()}\n",
        "csv": table.to_csv(index=False, float_format="%.6g", lineterminator="\n"),
        "tex": shown.to_latex(index=False, escape=True, caption=_escaped(caption(runs)), label="tab:fig1"),
    }
    out.mkdir(parents=True, exist_ok=True)
    for suffix, content in text.items():
        (out / f"fig1.{suffix}").write_text(content, encoding="utf-8")
    return [out / f"fig1.{suffix}" for suffix in text]


def beside(folder: Path = RESULTS / "paper") -> str:
    """The ASPIRE paper's own speed-ups, model by model: shapes may be compared, numbers of other machines not."""
    paper = pd.read_csv(folder / "fig1_speedups.csv")
    order = list(dict.fromkeys(paper["paper_workload"]))
    wide = paper.pivot_table(index=["paper_model", "paper_method"], columns="paper_workload", values="speedup")
    shown = wide[order].reset_index().map(lambda x: x if isinstance(x, str) else "–" if pd.isna(x) else f"{x:.2f}")
    return (
        f"Published decode speed-ups ({paper['paper'][0]}):\n\n{shown.to_markdown(index=False, disable_numparse=True)}"
    )


def _piped(table: pd.DataFrame) -> pd.DataFrame:
    """A bar in an error message would open a new column."""
    return table.map(lambda text: text.replace("|", "\\|"))


def _escaped(text: str) -> str:
    """pandas escapes the cells for LaTeX but not the caption."""
    return "".join("\\" + letter if letter in "_%&#$" else letter for letter in text)
