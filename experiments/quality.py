"""Do the methods give the text of plain decoding, and are their answers as good? A row a record, from records alone.

python -m experiments.quality FOLDER [OUT]    prints the table; with OUT writes quality.md and quality.csv there

Records of random weights or emulated acceptance are refused: their texts are not a model's. So are those of a replay,
whose window cuts answers: protocol=quality runs every request once, to its end.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import metrics, scores
from experiments.config import script
from experiments.gate import SLACK, parting
from experiments.records import Record, RequestLine, find_records, pick
from experiments.tables import BASELINE, DASH, Run, caption, load, method_order

QUALITY = "quality"  # the folder of its records among the committed ones, and the name of its table
EQUAL, NEAR_TIE, DIFFERENT, UNJUDGED = TEXTS = "equal", "near tie", "different", "not judged"
SAME = ("device", "model", "dtype", "requests", "run", "sampling", "evidence")  # of metrics.compared
DIFFERENCE = "difference to autoregressive"
# Column of the printed table -> digits; None prints as it is. The CSV has low and high of every interval apart.
SHOWN: dict[str, int | None] = {
    **dict.fromkeys(["model", "benchmark", "verification", "method"]),
    **dict.fromkeys(["texts", *TEXTS, "items", "samples an item"], 0),
    "score": 3, "standard error": 3, "score 95 %": 3, "pass@k": None, DIFFERENCE: 3, f"{DIFFERENCE} 95 %": 3,
    **dict.fromkeys(["wrong", "unparsable", "unfinished", "at token limit", "unscored items"], 0), "note": None,
}  # fmt: skip
WORDS = (
    "Texts: answers beside those of autoregressive decoding to the same prompts with the same seeds. Equal: all token "
    "ids. Near tie: the first difference lies where full attention leaves the two tokens within "
    f"{SLACK:g} times the measured noise of its logits. Different: it does not. Not judged: they differ, and the gate, "
    "which covers the first protocol.gate greedy texts of each method, did not look. Texts of verification `rejection` "
    "are draws of their own, so that they differ and scores agree in distribution only.",
    "Score: avg@k, from 0 to 1, the mean over items of the mean over their samples; its standard error is over items, "
    "its 95 % interval Wilson's where every item is all right or all wrong, Student's t elsewhere. pass@k: unbiased, "
    "where scores are right or wrong. Difference: over the items that both have, paired, 95 % bootstrap over items; an "
    "interval of no width says that no item's score differed.",
    "Wrong: an answer of score 0. Unparsable: a text that ended without an answer. Unfinished: cut at the token limit "
    "before an answer. Both count 0. At token limit: cut there, with an answer or without.",
    f"{DASH}: does not apply, or the note says why.",
)


def compare_texts(run: Run, base: Run) -> Counter[str]:
    """How many texts of a run are equal to the baseline's, part from them at a near tie, differ, or are not judged.

    Requests that the baseline did not answer are left out.
    """
    theirs = {line.id: line for line in base.lines}
    gate = pick(run.record.protocol, "gate_counts") or {}
    return Counter(text_class(line, theirs[line.id], gate) for line in run.lines if line.id in theirs)


def text_class(line: RequestLine, base: RequestLine, gate: Mapping[str, Any]) -> str:
    """EQUAL; of a difference that the gate looked at NEAR_TIE or DIFFERENT, of any other UNJUDGED."""
    if line.output_ids == base.output_ids:
        return EQUAL
    seen = line.parting
    if not gate or seen is None or seen.at != parting(line.output_ids, base.output_ids):
        return UNJUDGED
    return NEAR_TIE if gate["passed"] and seen.gap <= SLACK * gate["noise"] else DIFFERENT


def refusal(record: Record) -> str | None:
    """Why a record's answers cannot be held against others, None where they can."""
    if record.status != "ok":
        return f"{record.status}" + (f": {' '.join(record.error.split())}" if record.error else "")
    if pick(record.config, "protocol.replay") != "drain":
        return "the timed window cut its answers; run with protocol=quality"
    return None


def baseline_of(run: Run, runs: Iterable[Run]) -> tuple[Run | None, str | None]:
    """The autoregressive run of the same comparison, or why there is none."""
    cell = run.record.cell
    near = [
        other
        for other in runs
        if other.record.cell.method == BASELINE
        and (other.record.cell.model, other.record.cell.benchmark) == (cell.model, cell.benchmark)
    ]
    reasons = [mismatch(run.record, other.record) for other in near]
    if None in reasons:
        return near[reasons.index(None)], None
    return None, reasons[0] if reasons else "no autoregressive record"


def mismatch(record: Record, base: Record) -> str | None:
    """Why two records do not answer the same questions in the same way, None where they do."""
    if (why := refusal(base)) is not None:
        return f"{BASELINE} {why}"
    mine, theirs = metrics.compared(record), metrics.compared(base)
    differing = [name for name in SAME if mine[name] != theirs[name]]
    if record.config.get("benchmark") != base.config.get("benchmark"):
        differing.append("benchmark")
    return f"{differing[0]} differs from the {BASELINE} record's" if differing else None


def row(run: Run, runs: Iterable[Run]) -> dict[str, Any]:
    """Every number of one record, None where it has none."""
    record, found = run.record, run.record.quality
    note = refusal(record)
    base, reason = (None, None) if note else baseline_of(run, runs)
    shared = {
        "model": record.cell.model, "benchmark": record.cell.benchmark, "seed": record.cell.seed,
        "batch": record.cell.batch, "run": record.config.get("run_id"), "verification": record.sampling.verification,
        "method": record.cell.method, "label": record.label, "note": note or reason,
    }  # fmt: skip
    if note:
        return shared
    if base is not None and base is not run:
        shared |= _beside(run, base)
    if found is None:
        return shared | {"note": "; ".join(filter(None, (reason, "no scores: benchmark.scoring is null")))}
    return shared | {
        "items": found.items, "samples an item": found.samples_per_item, "score": found.score,
        "standard error": found.stderr, "score 95 % low": found.low, "score 95 % high": found.high,
        "pass@k": ", ".join(f"@{k} {value:.3f}" for k, value in found.pass_at.items() if value is not None) or None,
        "right": found.right, "partly right": found.partly, "wrong": found.wrong, "unparsable": found.unparsable,
        "unfinished": found.unfinished, "at token limit": found.at_limit, "unscored items": found.unscored,
        "scorer": found.scorer,
    }  # fmt: skip


def _beside(run: Run, base: Run) -> dict[str, Any]:
    """What depends on the baseline."""
    texts = compare_texts(run, base)
    mine, theirs = scores.by_item(run.lines), scores.by_item(base.lines)
    low, high = scores.difference_interval(mine, theirs) or (None, None)
    return {
        "texts": texts.total(), **{name: texts[name] for name in TEXTS},
        DIFFERENCE: scores.difference(mine, theirs), f"{DIFFERENCE} 95 % low": low, f"{DIFFERENCE} 95 % high": high,
    }  # fmt: skip


def read(folders: Iterable[Path]) -> list[Run]:
    """The cells. Raises ValueError where there are none, or some whose texts are not those of real weights."""
    folders = list(folders)
    runs = load(folders)
    if not runs:
        raise ValueError("no records there; run a comparison with protocol=quality first")
    other = [
        (folder, run.record.cell)
        for folder, run in zip(folders, runs, strict=True)
        if run.record.cell.evidence != "real"
    ]
    if other:
        folder, cell = other[0]
        raise ValueError(
            f"{folder} shows {cell.evidence} (acceptance {cell.acceptance}), as do {len(other) - 1} others: a quality "
            "table holds answers of real weights alone; name a folder without them"
        )
    return runs


def frame(runs: list[Run]) -> pd.DataFrame:
    """One row a record, by comparison and then by method, with every number unrounded."""
    rank = {name: place for place, name in enumerate(method_order(run.record for run in runs))}
    intervals = [f"{name} 95 % {end}" for name in ("score", DIFFERENCE) for end in ("low", "high")]
    names = [
        "model", "benchmark", "seed", "batch", "run", "verification", "method", "label", "texts", *TEXTS,
        "items", "samples an item", "score", "standard error", *intervals[:2], "pass@k", DIFFERENCE,
        *intervals[2:], "right", "partly right", "wrong", "unparsable", "unfinished", "at token limit",
        "unscored items", "scorer", "note",
    ]  # fmt: skip
    table = pd.DataFrame([row(run, runs) for run in runs]).reindex(columns=names)
    table = table.assign(rank=table["method"].map(rank))
    order = ["model", "benchmark", "batch", "seed", "run", "rank"]
    return table.sort_values(order, kind="stable").drop(columns="rank").reset_index(drop=True)


def by_task(runs: list[Run]) -> pd.DataFrame:
    """One row a record and task, where a benchmark has tasks."""
    rows = [
        {
            "model": run.record.cell.model, "benchmark": run.record.cell.benchmark, "method": run.record.label,
            "task": task, "items": part.items, "score": part.score, "score 95 % low": part.low,
            "score 95 % high": part.high,
        }
        for run in runs
        if run.record.quality is not None
        for task, part in run.record.quality.tasks.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def display(table: pd.DataFrame, digits: Mapping[str, int | None]) -> pd.DataFrame:
    """The chosen columns as text: fixed digits, low and high of an interval in one column, a dash where nothing is."""
    shown = {}
    for name, places in digits.items():
        if name.endswith("95 %"):
            ends = zip(table[f"{name} low"], table[f"{name} high"], strict=True)
            shown[name] = [
                f"{_text(low, places)} to {_text(high, places)}" if pd.notna(low) else DASH for low, high in ends
            ]
        else:
            shown[name] = [_text(value, places) for value in table[name]]
    return pd.DataFrame(shown)


def _text(value: Any, places: int | None) -> str:
    if pd.isna(value):
        return DASH
    return str(value)[:160].replace("|", "\\|") if places is None else f"{value:.{places}f}"


def markdown(runs: list[Run]) -> str:
    """The page: the table, the tasks, what the columns mean."""
    table = frame(runs)
    parts = [_table(table.assign(method=table["label"]), SHOWN)]
    tasks = by_task(runs)
    if not tasks.empty:
        columns: dict[str, int | None] = dict.fromkeys(["model", "benchmark", "method", "task"])
        parts.append(_table(tasks, {**columns, "items": 0, "score": 3, "score 95 %": 3}))
    return "\n\n".join([*parts, caption(runs), *WORDS]) + "\n"


def _table(table: pd.DataFrame, digits: Mapping[str, int | None]) -> str:
    return str(display(table, digits).to_markdown(index=False, disable_numparse=True))


def write_quality(folders: Iterable[Path], out: Path) -> list[Path]:
    """Write quality.md and quality.csv from the cells' folders and return their paths."""
    runs = read(folders)
    out.mkdir(parents=True, exist_ok=True)
    page, data = out / f"{QUALITY}.md", out / f"{QUALITY}.csv"
    page.write_text(markdown(runs), encoding="utf-8")
    frame(runs).to_csv(data, index=False, float_format="%.6g", lineterminator="\n")
    return [page, data]


def main(arguments: list[str]) -> None:
    """Print the table of a folder's records; with a second folder, write it there too."""
    if len(arguments) not in (1, 2):
        raise ValueError("usage: python -m experiments.quality FOLDER [OUT]")
    folders = find_records(arguments[0])
    print(markdown(read(folders)), end="")
    for path in write_quality(folders, Path(arguments[1])) if len(arguments) == 2 else []:
        print(f"wrote {path}")


if __name__ == "__main__":
    script(main)
