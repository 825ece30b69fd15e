"""How did the whole run go? One table, then the last line: how many cells are ok, how many failed, and where.

python -m experiments.summary runs/mine              # every cell
python -m experiments.summary runs/mine over=seed    # cells that differ in their seed alone, as one line
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.config import script, split
from experiments.metrics import ratio
from experiments.records import Record, find_records, read_record
from experiments.sweep import INDEX, OK, refresh, state

RUN_KEYS = ("run_id", "resume", "overwrite", "dry_run", "tracking", "study")  # not what a cell measures
NUMBERS = ("decode tok/s", "tokens/round", "acceptance")


def print_table(records: list[Record]) -> None:
    """One line a cell. Tokens a second, rounds and acceptance as defined in experiments/metrics.py."""
    table = Table(title="cells")
    for column in ("model", "benchmark", "method", "batch", "seed", "status", *NUMBERS):
        table.add_column(column, justify="left" if column in ("model", "benchmark", "method", "status") else "right")
    for r in records:
        m = r.metrics
        numbers = (m.decode_tok_s, m.tokens_per_round, m.acceptance_rate)
        shown = ["-" if x is None else f"{x:.{places}f}" for x, places in zip(numbers, (1, 2, 3), strict=True)]
        table.add_row(
            *map(str, (r.cell.model, r.cell.benchmark, r.cell.method, r.cell.batch, r.cell.seed, r.status)), *shown
        )
    Console(width=120).print(table)


def over_seeds(records: list[Record]) -> list[list[str]]:
    """A row for the finished cells that differ in their seed alone: the seeds, then sums divided by sums.

    So a long run counts for more than a short one; behind the speed stand the slowest and the fastest seed.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            same = {k: v for k, v in record.config.items() if k not in ("seed", "output_dir", *RUN_KEYS)}
            groups.setdefault(json.dumps(same, sort_keys=True, default=str), []).append(record)
    return [_pooled(sorted(group, key=lambda record: record.cell.seed)) for group in groups.values()]


def _pooled(group: list[Record]) -> list[str]:
    def share(over: list[float | None], under: list[float | None]) -> float | None:
        if None in over or None in under:
            return None
        return ratio(sum(x for x in over if x is not None), sum(x for x in under if x is not None))

    cell, count = group[0].cell, [record.tokens for record in group]
    committed: list[float | None] = [one.committed for one in count]
    speed = share(committed, [record.timing.decode_s for record in group])
    each = [record.metrics.decode_tok_s for record in group if record.metrics.decode_tok_s is not None]
    shown = "-" if speed is None else f"{speed:.1f} ({min(each):.1f} to {max(each):.1f})"
    rates = share(committed, [x.rounds for x in count]), share([x.accepted for x in count], [x.drafted for x in count])
    seeds = ", ".join(str(record.cell.seed) for record in group)
    named = [cell.model, cell.benchmark, cell.method, str(cell.batch), seeds, shown]
    return named + ["-" if rate is None else f"{rate:.{places}f}" for rate, places in zip(rates, (2, 3), strict=True)]


def print_over_seeds(records: list[Record]) -> None:
    table = Table("model", "benchmark", "method", "batch", "seeds", *NUMBERS, title="over seeds")
    for row in over_seeds(records):
        table.add_row(*row)
    Console(width=140).print(table)


def conclude(root: Path) -> int:
    """Print the table and the last line of everything under `root`; returns how many cells failed."""
    folders = find_records(root)
    records = [read_record(folder) for folder in folders]
    print_table(records)
    failed = [(folder, r) for folder, r in zip(folders, records, strict=True) if r.status == "failed"]
    for folder, record in failed:
        print(f"failed: {folder}: {record.error}")
    lost = [job for job in jobs_without_records(root) if job["status"] != OK]
    for job in lost:
        print(f"{job['status']}: {root / str(job['job'])}: {job['error']}")
    print(f"ok {len(records) - len(failed)} / failed {len(failed) + len(lost)}: {root}")
    return len(failed) + len(lost)


def jobs_without_records(root: Path) -> list[dict[str, Any]]:
    """The jobs of a sweep in which no cell is marked as failed, its index brought up to date; of a single run none."""
    if not (root / INDEX).exists():
        return []
    try:
        jobs = refresh(root, ended=True)
    except OSError as error:
        print(f"cannot write the index: {error}")
        jobs = [state(root, job, ended=True) for job in json.loads((root / INDEX).read_text())["jobs"]]
    return [job for job in jobs if all(cell["status"] != "failed" for cell in job["cells"])]


def main(arguments: list[str]) -> int:
    """Returns how many failed. Raises ValueError for anything but a folder with records."""
    own, rest = split(arguments, {"over": ""})
    if len(rest) != 1 or own["over"] not in ("", "seed") or not find_records(rest[0]):
        raise ValueError("give one FOLDER with records, and over=seed or nothing")
    if own["over"]:
        print_over_seeds([read_record(folder) for folder in find_records(rest[0])])
        return 0
    return conclude(Path(rest[0]))


if __name__ == "__main__":
    script(main)
