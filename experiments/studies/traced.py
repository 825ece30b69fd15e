"""What do the studies of traces share? Cells whose records are looked at again, and what is found, beside them.

A sweep's cells are run as always; then `derive` writes lines of its own beside the record of each cell that finished,
and `read` gives them back to the table, the figure and the verdicts.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes

from experiments import figures
from experiments.records import Record, Section, find_records, read_record
from experiments.studies.sweep import Sweep
from experiments.tables import Run

Panel = Callable[[Axes], None]
DASHED = (0, (2, 1))


class Traced(Sweep):
    """A sweep with lines beside its records."""

    axis: str = "draft length"

    @abstractmethod
    def derive(self, folder: Path) -> None:
        """Write the lines of a finished cell. Raises ValueError where it has nothing to look at."""

    @abstractmethod
    def read(self, folder: Path) -> Sequence[Any]:
        """The lines of a finished cell. Raises ValueError naming what is at fault."""

    @abstractmethod
    def columns(self, lines: Sequence[Any]) -> dict[str, float | None]:
        """The numbers of a cell that claims and table ask for."""

    def measure(self, profile: str, words: list[str], out: Path) -> list[Record]:
        records = super().measure(profile, words, out)
        for folder in find_records(out):
            if read_record(folder).status == "ok":
                self.derive(folder)
        return records

    def frame(self, folders: Iterable[Path]) -> pd.DataFrame:
        """The rows of every study, with the columns of this one and its lines; a failed cell has none of them."""
        folders = list(folders)
        table = super().frame(folders)
        if table.empty:
            return table
        found = {key_of(record): self.read(f) for f in folders if (record := read_record(f)).status == "ok"}
        lines = [found.get(key_of(run.record)) for run in table["cell"]]
        more = pd.DataFrame([{} if x is None else self.columns(x) for x in lines], index=table.index)
        return table.join(more).assign(lines=lines)


def key_of(record: Record) -> str:
    """Tells the cells of a study apart."""
    return str([record.config["study"], record.cell_id])


def finished(rows: pd.DataFrame) -> list[tuple[str, Run, Sequence[Any]]]:
    """(profile, run, lines) of every cell that has any."""
    own = rows[rows["lines"].notna()]
    return list(zip(own["profile"], own["cell"], own["lines"], strict=True))


AGAIN = "run the study again with resume=true"  # what mends lines beside a record


def write_lines(path: Path, lines: Iterable[Section]) -> None:
    path.write_text("".join(line.model_dump_json() + "\n" for line in lines), encoding="utf-8")


def draw(panels: Sequence[Panel], words: str, handles: list[Any], stem: Path, column: str = "half") -> list[Path]:
    """Panels below each other, legend above, words below; the same bytes for the same data. Nothing without panels."""
    if not panels:
        return []
    with mpl.rc_context(figures._style()):
        figure, axes = figures._page(len(panels), column, words, handles)
        for ax, panel in zip(axes, panels, strict=True):
            panel(ax)
        return figures.save(figure, stem)


def page(title: str, tables: Iterable[list[dict[str, str]]], words: Iterable[str]) -> str:
    """Markdown: the title, tables of rows, paragraphs."""
    shown = [pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True) for rows in tables if rows]
    return "\n\n".join([f"# {title}", *shown, *words]) + "\n"
