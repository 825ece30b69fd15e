"""What is there to show, and what does it come from? Every figure and table of results, with its records.

A figure and a table of one name are one exhibit. `SOURCES` says what a name is about and which command measured it; a
name that is not there is shown all the same, with the records that lie in a folder of that name.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from experiments import metrics, tables
from experiments.config import CONF
from experiments.gpu_tables import GPU
from experiments.modelled import MODELLED
from experiments.quality import QUALITY
from experiments.records import PASSES, Record, find_records, pick, read_record
from experiments.redraw import PICTURED, STUDIES, find_fig1
from experiments.tables import MARKS

STUDY = "study_"  # starts the name of a study's figure and table
EMULATED = "shapes (emulated)"
SHAPES = "shapes"
KINDS = {
    "real": "real weights and text, acceptance measured",
    SHAPES: "random weights of a model's sizes: shows kernels, scheduler and memory",
    EMULATED: "random weights, and acceptance drawn from a stated profile",
    "modelled": "predicted by a cost model, not run",
}


@dataclass(frozen=True)
class Source:
    """title, and shows: a sentence for who cannot see the figure. command: what measured the records.

    cells: the records' folders, given the folder of all records. evidence: stated where there are no records.
    """

    title: str
    shows: str
    command: str | None
    cells: Callable[[Path], list[Path]]
    evidence: str | None = None


@dataclass(frozen=True)
class Shown:
    """A record as the page lists it. name: its folder below the records. speedup: within its own comparison."""

    name: str
    record: Record
    speedup: float | None

    @property
    def evidence(self) -> str:
        """One of KINDS."""
        cell = self.record.cell
        return EMULATED if cell.evidence == "shapes" and cell.acceptance != "measured" else cell.evidence


@dataclass(frozen=True)
class Exhibit:
    """What one name stands for; table: markdown. evidence: keys of KINDS, none if nothing says it."""

    name: str
    source: Source
    figure: Path | None
    table: str | None
    records: list[Shown]
    evidence: list[str]


def below(*parts: str) -> Callable[[Path], list[Path]]:
    """The records below a folder of the records."""
    return partial(_below, parts)


def _below(parts: tuple[str, ...], root: Path) -> list[Path]:
    return find_records(root.joinpath(*parts))


def pictured(root: Path) -> list[Path]:
    """The two cells of the timeline, as experiments/redraw.py chooses them."""
    cells: dict[str, Path] = {}
    for folder in reversed(find_fig1(root)):
        method = read_record(folder).cell.method
        if method in PICTURED and (folder / PASSES).exists():
            cells[method] = folder
    return sorted(cells.values())


def bench(suite: str) -> str:
    return f'make bench-gpu ARGS="suite={suite}"'


SOURCES = {
    "fig1": Source(
        "Figure 1: decode speed-up",
        "Decode speed-up of every method over autoregressive decoding, a bar a method, a group of bars a benchmark.",
        "make reproduce-fig1",
        find_fig1,
    ),
    "timeline": Source(
        "Who drafts and who verifies",
        "Slots by passes, coloured by kind of row: a lockstep method above, an asynchronous one below.",
        "make reproduce-fig1",
        pictured,
    ),
    MODELLED: Source(
        "Modelled: another card",
        "Decode tokens a second predicted for measured cells by costs fitted without them, against measured ones.",
        "make simulate",
        below(MODELLED),
        "modelled",
    ),
    QUALITY: Source(
        "Quality parity",
        "Texts and scores of every method beside those of autoregressive decoding.",
        "python -m experiments.run protocol=quality",
        below(QUALITY),
    ),
    "gpu_smollm2": Source(
        "Real weights on a GPU",
        "Decode speed-up and acceptance of every method with SmolLM2-135M, by batch.",
        bench("smollm2"),
        below(GPU, "smollm2"),
    ),
    "gpu_shapes": Source(
        "The paper's shapes on a GPU",
        "Decode speed-up at the paper's model sizes, contexts and batches, beside the speed-up that the bytes of the "
        "same passes allow.",
        bench("shapes"),
        lambda root: [*_below((GPU, "shapes"), root), *_below((GPU, "hetero"), root)],
    ),
    "gpu_hetero": Source(
        "Requests that differ in acceptance",
        "Adaptive draft lengths against every fixed one, where acceptance differs between requests.",
        bench("hetero"),
        below(GPU, "hetero"),
    ),
    "gpu_autoregressive": Source(
        "Plain decoding beside vLLM",
        "Tokens a second of autoregressive decoding, beside vLLM on the same GPU in the same hour.",
        bench("autoregressive"),
        below(GPU, "autoregressive"),
    ),
    "gpu_kernels": Source(
        "Kernels against memory bandwidth",
        "Time of each kernel on random data at the paper's sizes, against the copy bandwidth of the GPU.",
        "make bench-kernels",
        lambda root: [],
        SHAPES,
    ),
}


def source_of(name: str) -> Source:
    """What stands behind a name; a study has its title in its config, an unknown name is spelt out."""
    if name in SOURCES:
        return SOURCES[name]
    if name.startswith(STUDY):
        study = name.removeprefix(STUDY)
        title = study_title(study)
        return Source(
            f"Study: {title}", f"{title}: what each variant gave.", f"make study NAME={study}", below(STUDIES, study)
        )
    words = name.replace("_", " ")
    return Source(words.capitalize(), f"What was found about {words}.", None, below(name))


def study_title(study: str) -> str:
    """The title in conf/experiment; failing that the name as words."""
    path = CONF / "experiment" / f"{study}.yaml"
    config = yaml.safe_load(path.read_text("utf-8")) if path.exists() else {}
    return str(pick(config, "study.title") or study.replace("_", " ").capitalize())


def exhibits(results: Path, records: dict[Path, Shown]) -> list[Exhibit]:
    """All figures and tables below results, in the order of `place`; records: as `show` gives them, of results.

    Raises ValueError if there are neither.
    """
    figures = {path.stem: path for path in sorted((results / "figures").glob("*.png"))}
    texts = {path.stem: path.read_text("utf-8") for path in sorted((results / "tables").glob("*.md"))}
    names = sorted({*figures, *texts}, key=place)
    if not names:
        raise ValueError(f"no tables or figures in {results}; run make figures first, or name another results folder")
    found = []
    for name in names:
        source = source_of(name)
        own = listed(records[folder] for folder in source.cells(results / "records"))
        evidence = {one.evidence for one in own} or {source.evidence} - {None} or stated(texts.get(name, ""))
        kinds = [kind for kind in KINDS if kind in evidence]
        found.append(Exhibit(name, source, figures.get(name), texts.get(name), own, kinds))
    return found


def place(name: str) -> tuple[int, str]:
    """Figure 1 first, then studies, then quality, then GPU runs, then names that nobody foresaw."""
    known = list(SOURCES)
    if name in ("fig1", "timeline"):
        return known.index(name), name
    if name.startswith(STUDY):
        return 2, name
    return (3 + known.index(name), "") if name in SOURCES else (3 + len(known), name)


def show(root: Path) -> dict[Path, Shown]:
    """Every record below root by its folder, each beside the baseline of its comparison, the folder it lies in."""
    read = {folder: read_record(folder) for folder in find_records(root)}
    comparisons: dict[Path, list[Record]] = {}
    for folder, record in read.items():
        comparisons.setdefault(folder.parent, []).append(record)
    shown = {}
    for folder, record in read.items():
        baseline = tables.baseline_of(record, comparisons[folder.parent])
        shown[folder] = Shown(folder.relative_to(root).as_posix(), record, metrics.speedup(record, baseline)[0])
    return shown


def listed(shown: Iterable[Shown]) -> list[Shown]:
    """Comparison by comparison, and in each the methods in the order in which it names them."""
    shown = list(shown)
    rank = {name: place for place, name in enumerate(tables.method_order(one.record for one in shown))}
    return sorted(shown, key=lambda one: (one.name.rpartition("/")[0], rank[one.record.cell.method], one.name))


def stated(text: str) -> set[str]:
    """The evidence that a table without records says of itself, in its caption or by its marks."""
    said = ", ".join(re.findall(r"evidence: ([\w, ]+)", text))
    kinds = {kind for kind in ("real", SHAPES, "modelled") if re.search(rf"\b{kind}\b", said)}
    kinds |= {EMULATED} if MARKS["emulated"] in text else set()
    return kinds | ({"modelled"} if MARKS["modelled"] in text or "modelled" in text else set())
