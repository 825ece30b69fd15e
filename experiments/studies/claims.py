"""What did the paper claim, and what becomes of it here? A number from a study's table, held against a published one.

results/paper/claims.csv states each claim in words, what was published, from where, and the interval of our values that
agree with it. A study's config says how its own value is read from its table.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict

CLAIMS = Path(__file__).parents[2] / "results" / "paper" / "claims.csv"
AGREES, DIFFERS, UNTESTABLE, NOT_RUN = "agrees", "differs", "not testable here", "not run"


class Measure(BaseModel, ABC):
    """How a claim's value is read from the rows of one profile. part: of the study, None where it has only one.

    speed: the claim is about speeds on a GPU, so that a CPU's say nothing for or against it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    speed: bool = False

    @abstractmethod
    def value(self, rows: pd.DataFrame) -> float | None:
        """None where the rows do not say."""


class At(Measure):
    """A column of the row of one series, at one x if it has several."""

    series: str
    column: str
    x: float | str | None = None
    part: str | None = None

    def value(self, rows: pd.DataFrame) -> float | None:
        if self.column not in rows:  # every cell failed that would have it
            return None
        found = rows[rows["series"] == self.series]
        for key in ("x", "part"):
            wanted = getattr(self, key)
            if wanted is not None:
                found = found[found[key].map(as_text) == as_text(wanted)]
        values = found[self.column].dropna()
        return float(values.iloc[0]) if len(values) == 1 else None


class Mean(Measure):
    """A column of a series, over all its rows."""

    series: str
    column: str

    def value(self, rows: pd.DataFrame) -> float | None:
        values = rows.loc[rows["series"] == self.series, self.column].dropna()
        return float(values.mean()) if len(values) else None


class Ratio(Measure):
    """One value by another."""

    top: Measure
    bottom: Measure

    def value(self, rows: pd.DataFrame) -> float | None:
        top, bottom = self.top.value(rows), self.bottom.value(rows)
        return None if top is None or not bottom else top / bottom


class Difference(Measure):
    """One value less another, as a share of `per` where that is given."""

    top: Measure
    bottom: Measure
    per: Measure | None = None

    def value(self, rows: pd.DataFrame) -> float | None:
        top, bottom = self.top.value(rows), self.bottom.value(rows)
        per = 1.0 if self.per is None else self.per.value(rows)
        return None if top is None or bottom is None or not per else (top - bottom) / per


class Spread(Measure):
    """Largest by smallest value of a column over all x of a series, less one; two x at least."""

    series: str
    column: str
    part: str | None = None

    def value(self, rows: pd.DataFrame) -> float | None:
        found = rows[rows["series"] == self.series]
        if self.part is not None:
            found = found[found["part"] == self.part]
        values = found[self.column].dropna()
        return float(values.max() / values.min() - 1) if len(values) > 1 and values.min() > 0 else None


class Untestable(Measure):
    """The claim needs what is not here."""

    reason: str

    def value(self, rows: pd.DataFrame) -> float | None:
        return None


@dataclass(frozen=True)
class Verdict:
    """A line of results/README.md. value, low, high: ours, and the interval in which it agrees."""

    study: str
    text: str
    published: str
    source: str
    value: float | None
    low: float | None
    high: float | None
    word: str
    evidence: str
    reason: str
    profile: str


def as_text(x: Any) -> str:
    """8 and 8.0 are one x."""
    return f"{x:g}" if isinstance(x, int | float) else str(x)


def published(study: str, path: Path = CLAIMS) -> dict[str, dict[str, Any]]:
    """The claims of a study by their id, in the order of the file."""
    table = pd.read_csv(path)
    rows = table[table["study"] == study].astype(object)
    return {row["claim"]: row for row in rows.where(rows.notna(), None).to_dict("records")}


def judge(study: str, claim: dict[str, Any], measure: Measure, rows: pd.DataFrame, profile: str) -> Verdict:
    """Hold one claim against the rows of one profile; without rows it has not been run."""
    value = None if rows.empty else measure.value(rows)
    low, high, reason = claim["low"], claim["high"], ""
    if isinstance(measure, Untestable):
        word, reason = UNTESTABLE, measure.reason
    elif rows.empty:
        word, reason = NOT_RUN, "no records"
    elif value is None:
        word, reason = UNTESTABLE, "the cells that it needs were not run or failed"
    elif measure.speed and not rows["on GPU"].all():
        word, reason = UNTESTABLE, "a CPU's passes are bound by arithmetic, the claim is about a GPU's"
    else:
        inside = (low is None or value >= low) and (high is None or value <= high)
        word = AGREES if inside else DIFFERS
    evidence = "" if rows.empty else ", ".join(dict.fromkeys(rows["shown evidence"]))
    return Verdict(
        study, claim["text"], claim["published"], claim["source"], value, low, high, word, evidence, reason, profile
    )
