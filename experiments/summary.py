"""How did the whole run go? One table, then the last line: how many cells are ok, how many failed, and where."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.records import Record, find_records, read_record
from experiments.sweep import INDEX, OK, refresh, state


def print_table(records: list[Record]) -> None:
    """One line a cell. Tokens a second, rounds and acceptance as defined in experiments/metrics.py."""
    table = Table(title="cells")
    for column in ("model", "benchmark", "method", "batch", "status", "decode tok/s", "tokens/round", "acceptance"):
        table.add_column(column, justify="left" if column in ("model", "benchmark", "method", "status") else "right")
    for r in records:
        m = r.metrics
        numbers = (m.decode_tok_s, m.tokens_per_round, m.acceptance_rate)
        shown = ["-" if x is None else f"{x:.{places}f}" for x, places in zip(numbers, (1, 2, 3), strict=True)]
        table.add_row(r.cell.model, r.cell.benchmark, r.cell.method, str(r.cell.batch), r.status, *shown)
    Console(width=120).print(table)


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
