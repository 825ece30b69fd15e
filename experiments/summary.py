"""How did the whole run go? One table, then the last line: how many cells are ok, how many failed, and where."""

from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from experiments.records import Record, find_records, read_record


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
    print(f"ok {len(records) - len(failed)} / failed {len(failed)}: {root}")
    return len(failed)


class Summary(Callback):
    """Hydra callback: concludes a run or a sweep, whatever launcher ran its jobs, from the records on disk."""

    failed: ClassVar[int] = 0

    def on_run_end(self, config: DictConfig, **_: Any) -> None:
        Summary.failed += conclude(Path(config.hydra.run.dir))

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        Summary.failed += conclude(Path(config.hydra.sweep.dir))
