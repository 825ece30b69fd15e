"""How is a setting swept? Variants of methods, one after another in a comparison, beside plain decoding."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict

from experiments.config import for_method, plain
from experiments.loading import Config
from experiments.records import Record, find_records
from experiments.run import run
from experiments.studies import draw
from experiments.studies.claims import as_text
from experiments.studies.study import PERCENTILES, Study
from experiments.tables import ACCEPTANCE, DASH, Run, caption

COLUMNS: dict[str, int | None] = {
    "part": None, "series": None, "x": None, "decode tok/s": 1, "decode speed-up": 2, "decode speed-up min–max": 2,
    ACCEPTANCE: 3, "acceptance 95 %": 3, "tokens per round (committed/rounds)": 2, "round ms": 2,
    **dict.fromkeys(PERCENTILES, 2), "score": 3, "score 95 %": 3, "note": None,
}  # fmt: skip
RANGES = {
    "decode speed-up min–max": ("decode speed-up min", "decode speed-up max"),
    "acceptance 95 %": ("acceptance 95 % low", "acceptance 95 % high"),
    "score 95 %": ("score low", "score high"),
}


class Series(BaseModel):
    """A method, or variants of it. set: overrides, in which {x} stands for each of xs in turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    method: str
    set: tuple[str, ...] = ()
    xs: tuple[int | float | str, ...] = ()

    def variants(self, xs: tuple[int | float | str, ...] | None) -> list[tuple[Any, list[str]]]:
        """(x, overrides) of each cell; xs: those of the profile, where it has its own."""
        if not self.xs:
            return [(None, list(self.set))]
        return [(x, [word.format(x=as_text(x)) for word in self.set]) for x in xs or self.xs]


class Profile(BaseModel):
    """Where cells run. set: overrides of all; parts: name -> overrides of a comparison; xs: in place of the series'."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    set: tuple[str, ...] = ()
    parts: dict[str, tuple[str, ...]] = {"all": ()}
    xs: tuple[int | float | str, ...] | None = None


class Sweep(Study):
    """Series of variants in every part; axis: what x is; show: the table's columns that are drawn."""

    axis: str
    series: tuple[Series, ...]
    where: dict[str, Profile]
    show: tuple[str, ...] = (ACCEPTANCE, "decode speed-up")
    words: str = ""

    @property
    def profiles(self) -> list[str]:
        return list(self.where)

    def measure(self, profile: str, words: list[str], out: Path) -> list[Record]:
        records = []
        for part in self.where[profile].parts:
            records += run(self.configs(profile, part, words, out), out / part)
        return records

    def variants(self, profile: str) -> list[tuple[Series, Any, str, list[str]]]:
        """(series, x, name of the method, overrides) of each cell of a part; a method as it is keeps its name."""
        found = []
        for series in self.series:
            for x, overrides in series.variants(self.where[profile].xs):
                words = [series.method, slug(series.label), *([] if x is None else [slug(as_text(x))])]
                found.append((series, x, "_".join(words) if overrides else series.method, overrides))
        return found

    def configs(self, profile: str, part: str, words: list[str], out: Path) -> list[Config]:
        """A config a cell of one part; Hydra must be initialised."""
        own = self.where[profile]
        # One file of costs serves all cells that differ in speculation alone.
        shared = [f"calibration.dir={out / 'calibration'}", f"profile={profile}", f"experiment={self.name}"]
        shared += [*own.set, *own.parts[part], *words]
        configs: list[Config] = []
        for place, (series, x, name, overrides) in enumerate(self.variants(profile)):
            config = plain(for_method([*shared, *overrides], series.method))
            if overrides:
                config["method"] |= {
                    "name": name,
                    "label": " ".join([series.label, *([] if x is None else [as_text(x)])]),
                }
            config["study"] = {
                "name": self.name, "profile": profile, "part": part, "series": series.label, "x": x, "place": place,
            }  # fmt: skip
            configs.append(config | {"run_id": out.name})
        return configs

    def table(self, rows: pd.DataFrame) -> str:
        blocks = [f"# {self.title}"]
        for profile, own in rows.groupby("profile", sort=False):
            shown = display(own, COLUMNS).rename(columns={"x": self.axis})
            told = [name for name in shown if (shown[name] != DASH).any()]
            blocks += [
                f"## {profile}", shown[told].to_markdown(index=False, disable_numparse=True),
                f"{caption(list(own['cell']))} {DASH}: does not apply, or the note says why.",
                *self.commands([run.record for run in own["cell"]]),
            ]  # fmt: skip
        return "\n\n".join([*blocks, *([self.words] if self.words else [])]) + "\n"

    def commands(self, records: list[Record]) -> list[str]:
        """What runs each row's cell alone, in the order of the rows; nothing for rows that the config no longer has."""
        lines = [command for record in records if (command := self.command(record.config["study"]))]
        return ["Row by row, each cell alone:", "\n".join(["```bash", *lines, "```"])] if lines else []

    def command(self, own: dict[str, Any]) -> str | None:
        """own: the `study` of a record's config."""
        series = next((one for one in self.series if one.label == own["series"]), None)
        where = self.where.get(own["profile"])
        if series is None or where is None or own["part"] not in where.parts:
            return None
        if bool(series.xs) != (own["x"] is not None):
            return None
        ((_, overrides),) = series.variants(None if own["x"] is None else (own["x"],))
        words = [f"profile={own['profile']}", f"experiment={self.name}", *where.set, *where.parts[own["part"]]]
        return shlex.join(["python", "-m", "experiments.run", *words, f"method={series.method}", *overrides])

    def figure(self, rows: pd.DataFrame, stem: Path) -> list[Path]:
        return draw.lines(rows, self.axis, self.show, self.title, stem)


class Across(Sweep):
    """A part a batch, drawn as one line over the batch; a part that is no number has as many slots as fit."""

    def frame(self, folders: Iterable[Path]) -> pd.DataFrame:
        rows = super().frame(folders)
        return rows if rows.empty else rows.sort_values(["profile", "x", "place"], kind="stable", ignore_index=True)

    def row(self, run: Run, part: list[Record]) -> dict[str, Any]:
        row, batch = super().row(run, part), run.record.cell.batch
        if row["part"].isdigit():
            return row | {"x": float(row["part"]), "part": "all"}
        x = float(batch) if batch else None  # 0 is a batch that was never settled
        return row | {"x": x, "part": "all", "note": row["note"] or "as many slots as fit"}


class Main(Sweep):
    """Every method on every workload. Until it has records of its own under `profile`, those of figure 1 serve.

    figure1: their folder, beside that of the studies.
    """

    figure1: str
    profile: str

    def folders(self, root: Path) -> list[Path]:
        own = super().folders(root)
        return own if (root / self.name / self.profile).is_dir() else [*own, *find_records(root.parent / self.figure1)]

    def placed(self, run: Run) -> Run:
        config = run.record.config
        if config.get("study"):
            return run
        labels = {series.method: series.label for series in self.series}
        place = [*labels].index(run.record.cell.method)
        part, series = f"{run.record.cell.benchmark}, of figure 1", labels[run.record.cell.method]
        own = {"profile": self.profile, "part": part, "series": series, "x": None, "place": place}
        return replace(run, record=run.record.model_copy(update={"config": {**config, "study": own}}))


class Map(Sweep):
    """Parts by x, the value of the first shown column in each field; below 1 it is marked."""

    def figure(self, rows: pd.DataFrame, stem: Path) -> list[Path]:
        return draw.heat(rows, self.axis, self.show[0], self.title, stem)


def slug(text: str) -> str:
    """Fit for a folder's name."""
    return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")


def display(rows: pd.DataFrame, columns: dict[str, int | None]) -> pd.DataFrame:
    """The rows as text, with fixed digits and a dash where there is nothing."""
    shown: dict[str, list[str]] = {}
    for name, places in columns.items():
        if name in RANGES:
            pairs = zip(*(rows[key] for key in RANGES[name]), strict=True)
            shown[name] = [DASH if pd.isna(low) else f"{low:.{places}f}–{high:.{places}f}" for low, high in pairs]
        else:
            shown[name] = [field(value, places) for value in rows[name]]
    shown["series"] = [
        text + (f" {mark}" if mark else "") for text, mark in zip(shown["series"], rows["mark"], strict=True)
    ]
    return pd.DataFrame(shown)


def field(value: Any, places: int | None) -> str:
    if pd.isna(value):
        return DASH
    if places is not None:
        return f"{value:.{places}f}"
    return as_text(value).replace("|", "\\|")[:120]
