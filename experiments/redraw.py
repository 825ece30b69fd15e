"""Rebuild every table and figure from records: the committed ones, or those of a run.

python -m experiments.redraw [FOLDER]
"""

from pathlib import Path

from experiments import gpu_tables
from experiments.config import script
from experiments.figures import fig1, read_passes, timeline
from experiments.gpu_figures import write_gpu_figures
from experiments.gpu_tables import GPU, write_gpu_tables
from experiments.quality import QUALITY, write_quality
from experiments.records import PASSES, find_records, read_record
from experiments.tables import write_tables

RESULTS = Path(__file__).parents[1] / "results"
STUDIES = "studies"  # the folder of the studies' records among the committed ones
PICTURED = ("vegas", "aspire_fsm")  # a lockstep method above, an asynchronous one below


def redraw(root: Path, out: Path = RESULTS) -> list[Path]:
    """Tables and figures of all records under `root`, those of `root`/h200 and `root`/quality in their own.

    Raises ValueError if there is nothing to show.
    """
    folders = find_fig1(root)
    written = [*redraw_fig1(folders, out), *redraw_gpu(root / GPU, out), *redraw_quality(root / QUALITY, out)]
    if not written:
        raise ValueError(f"no records under {root}; run make reproduce-fig1 first, or name another folder")
    return written


def find_fig1(root: Path) -> list[Path]:
    """Cells of figure 1: all but those of GPU and quality runs, of studies, and those that show shapes alone."""
    apart = {root / GPU, root / QUALITY, root / STUDIES}
    own = [folder for folder in find_records(root) if not apart & {*folder.parents}]
    return [folder for folder in own if read_record(folder).cell.evidence == "real"]


def redraw_fig1(folders: list[Path], out: Path) -> list[Path]:
    """Figure 1, its table and the timeline."""
    if not folders:
        return []
    written = [*write_tables(folders, out / "tables"), *fig1(folders, out / "figures")]
    passes = {}
    for folder in reversed(folders):  # the first workload's cells win
        record = read_record(folder)
        if record.cell.method in PICTURED and (folder / PASSES).exists():
            passes[record.cell.method] = (record.label, read_passes(folder / PASSES))
    if len(passes) == len(PICTURED):
        written += timeline(dict(passes[name] for name in PICTURED), out / "figures" / "timeline")
    return written


def redraw_gpu(root: Path, out: Path) -> list[Path]:
    """Tables and figures of GPU runs; none if there are no runs."""
    suites = gpu_tables.read(root)
    return [*write_gpu_tables(root, out / "tables", suites), *write_gpu_figures(suites, out / "figures")]


def redraw_quality(root: Path, out: Path) -> list[Path]:
    """The quality table; none if there are no runs."""
    folders = find_records(root)
    return write_quality(folders, out / "tables") if folders else []


def main(arguments: list[str]) -> None:
    """Redraw the records of a folder, by default those that are published. Raises ValueError if there are none."""
    for path in redraw(Path(arguments[0]) if arguments else RESULTS / "records"):
        print(f"wrote {path}")


if __name__ == "__main__":
    script(main)
