"""Rebuild every table and figure from records: the committed ones, or those of a run.

python -m experiments.redraw [FOLDER]
"""

import sys
from pathlib import Path

from experiments.config import refuse
from experiments.figures import fig1, read_passes, timeline
from experiments.records import PASSES, find_records, read_record
from experiments.tables import write_tables

RESULTS = Path(__file__).parents[1] / "results"
PICTURED = ("vegas", "aspire_fsm")  # a lockstep method above, an asynchronous one below


def redraw(root: Path) -> list[Path]:
    """Figure 1, its table and the timeline, from all records under `root`. Raises ValueError if there are none."""
    folders = find_records(root)
    if not folders:
        raise ValueError(f"no records under {root}; run make reproduce-fig1 first, or name another folder")
    written = [*write_tables(folders), *fig1(folders)]
    passes = {}
    for folder in reversed(folders):  # the first workload's cells win
        record = read_record(folder)
        if record.cell.method in PICTURED and (folder / PASSES).exists():
            passes[record.cell.method] = (record.label, read_passes(folder / PASSES))
    if len(passes) == len(PICTURED):
        written += timeline(dict(passes[name] for name in PICTURED), RESULTS / "figures" / "timeline")
    return written


if __name__ == "__main__":
    try:
        for path in redraw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "records"):
            print(f"wrote {path}")
    except ValueError as error:
        refuse(error)
