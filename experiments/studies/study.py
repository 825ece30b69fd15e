"""What is a study? One question of the paper: cells that are run, a table, a figure, and a verdict on each claim.

Its cells are records like any other. What a cell is to its study stands in its config under `study`: {name, profile,
part, series, x}. A part is a comparison of its own; series and x say which variant of a method the cell is. Published
records lie below results/records/studies/<study>/<profile>.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, SerializeAsAny

from experiments import tables
from experiments.config import CONF, nearest
from experiments.records import Record, find_records, pick
from experiments.studies.claims import Measure, Verdict, judge, published
from experiments.tables import Run

SCORES = {"score": "score", "score low": "low", "score high": "high"}
PERCENTILES = {f"TPOT ms p{p}": f"p{p}" for p in (50, 95, 99)}


class Study(BaseModel, ABC):
    """Base of all studies; made by Hydra from the `study` node of conf/experiment/<name>.yaml.

    claims: how our value of each claim in results/paper/claims.csv is measured, by the claim's id.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    title: str
    claims: dict[str, SerializeAsAny[Measure]] = {}

    @property
    @abstractmethod
    def profiles(self) -> list[str]:
        """Where it can be run: embedded (a CPU), h200 (real weights on a GPU), shapes (random weights on a GPU)."""

    @abstractmethod
    def measure(self, profile: str, words: list[str], out: Path) -> list[Record]:
        """Run all cells of a profile into folders below `out`; words: further overrides. Hydra must be initialised."""

    @abstractmethod
    def table(self, rows: pd.DataFrame) -> str:
        """What the rows of `frame` say, in Markdown."""

    @abstractmethod
    def figure(self, rows: pd.DataFrame, stem: Path) -> list[Path]:
        """Draw the rows; stem: path without a suffix."""

    def frame(self, folders: Iterable[Path]) -> pd.DataFrame:
        """A row a cell, by profile, part, series and x, every number unrounded."""
        runs = [self.placed(run) for run in tables.load(folders)]
        records = [run.record for run in runs]
        rows = [self.row(run, [r for r in records if same_part(r, run.record)]) for run in runs]
        table = pd.DataFrame(rows)
        if table.empty:
            return table
        keys = ["profile", "part"]  # within a part in the order in which the cells were asked for
        return table.sort_values([*keys, "place"], kind="stable", ignore_index=True, key=in_order)

    def folders(self, root: Path) -> list[Path]:
        """Its cells below a folder that holds the records of all studies."""
        return find_records(root / self.name)

    def placed(self, run: Run) -> Run:
        """The run with its place in the study, where its record does not say it."""
        return run

    def row(self, run: Run, part: list[Record]) -> dict[str, Any]:
        """One cell beside the plain decoding of its part."""
        record = run.record
        own = record.config["study"]
        tpot = record.metrics.tpot_ms
        return {
            **{key: own[key] for key in ("profile", "part", "series", "x", "place")},
            **tables.row(run, tables.baseline_of(record, part)),
            **{name: None if tpot is None else getattr(tpot, key) for name, key in PERCENTILES.items()},
            "round ms": round_ms(record),
            **{name: getattr(record.quality, key, None) for name, key in SCORES.items()},
            "shown evidence": evidence_of(record),
            "on GPU": str(pick(record.config, "engine.device")).startswith("cuda"),
            "cell": run,
        }

    def verdicts(self, rows: pd.DataFrame) -> list[Verdict]:
        """Every claim under every profile whose cells answer it; once, with the reason, where none does."""
        known = published(self.name)
        unknown = {*self.claims} - {*known}
        if unknown:
            raise ValueError(f"results/paper/claims.csv has no claim {min(unknown)!r} of study {self.name}")
        profiles = list(dict.fromkeys(rows["profile"])) if len(rows) else [self.profiles[0]]
        found = []
        for claim, measure in self.claims.items():
            parts = [rows[rows["profile"] == profile] if len(rows) else rows for profile in profiles]
            each = [judge(self.name, known[claim], measure, *pair) for pair in zip(parts, profiles, strict=True)]
            found += [verdict for verdict in each if verdict.value is not None] or each[:1]
        return found


def in_order(column: pd.Series) -> pd.Series:
    """A key for sorting in which 4k comes before 17k."""
    return column if column.name == "place" else column.str.replace(r"\d+", lambda n: n[0].zfill(9), regex=True)


def round_ms(record: Record) -> float | None:
    """Milliseconds that a slot's round takes, drafts and verification, whatever was accepted."""
    seconds, rounds = record.timing.decode_s, record.tokens.rounds
    return None if seconds is None or not rounds else 1e3 * seconds * record.cell.batch / rounds


def same_part(one: Record, other: Record) -> bool:
    keys = ("study.profile", "study.part")
    return all(pick(one.config, key) == pick(other.config, key) for key in keys)


def evidence_of(record: Record) -> str:
    """Kind of evidence and where it was had."""
    device = record.environment.device or str(pick(record.config, "engine.device"))
    words = [record.cell.evidence, device]
    return ", ".join([*words, record.cell.acceptance] if record.cell.acceptance != "measured" else words)


def names() -> list[str]:
    """The studies: experiments whose config has a `study` node."""
    files = sorted((CONF / "experiment").glob("*.yaml"))
    return [path.stem for path in files if "study" in OmegaConf.load(path)]


def study_of(name: str) -> Study:
    """The study of that name. Raises ValueError for an unknown one."""
    if name not in names():
        raise ValueError(f"unknown study {name!r}{nearest(name, names())}")
    node = OmegaConf.load(CONF / "experiment" / f"{name}.yaml").study
    study = instantiate({"name": name, **node}, _convert_="all")
    assert isinstance(study, Study)
    return study
