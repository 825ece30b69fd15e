"""Heterogeneity: how many of 20 drafts stand, request by request and round by round, beside the published spread."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.records import Record, pick
from experiments.studies.draw import HUES
from experiments.studies.lengths import SUMMARY, Lengths, lengths_of, summary
from experiments.studies.sweep import Sweep, field
from experiments.studies.traced import Panel, draw, page
from experiments.tables import Run, caption

PUBLISHED = (2.56, 11.51, 20.0)  # shortest, mean and longest mean of a request: the diamonds of the figure
DIAMOND: dict[str, Any] = {"marker": "D", "ms": 2.6, "mfc": "white", "color": "black", "linewidth": 0.5}
SHOWN = 5  # requests whose rounds are drawn


def drawn_length(run: Run) -> int:
    """The draft length a record was run with."""
    return int(pick(run.record.config, "method.speculation.longest"))


def requests_of(run: Run) -> list[Lengths]:
    return lengths_of(run.lines, drawn_length(run))


class Heterogeneity(Sweep):
    """Cells of one fixed draft length, request by request. window: rounds that are averaged to see a change."""

    axis: str = "draft length"
    window: int

    def row(self, run: Run, part: list[Record]) -> dict[str, Any]:
        found = summary(requests_of(run), self.window) if run.lines else {}
        return {**super().row(run, part), **found}

    def table(self, rows: pd.DataFrame) -> str:
        shown = [
            {**described(run), **numbers(row), "error": field(run.record.error, None)}
            for run, row in zip(rows["cell"], rows.to_dict("records"))
        ]
        words = [
            "Accepted drafts of rounds that drafted all; means weigh every request alike. Between requests: share of "
            f"the variance of all rounds. Change across windows: mean difference of successive means of {self.window} "
            f"rounds of a request. Correlation: of a round with the next, about the request's mean.",
            caption(list(rows["cell"])),
        ]
        return page(self.title, [shown], words)

    def figure(self, rows: pd.DataFrame, stem: Path) -> list[Path]:
        runs = {str(row.profile): row.cell for row in rows.itertuples() if row.cell.lines}
        return figure(runs, self.window, stem)


def numbers(row: dict[str, Any]) -> dict[str, str]:
    """The columns of `summary`, whole numbers whole, a dash where there is none."""
    return {key: field(row.get(key), 0 if key in ("requests", "rounds") else 2) for key in SUMMARY}


def described(run: Run) -> dict[str, str]:
    """What was run."""
    record, prompt = run.record, run.record.workload.prompt_tokens
    return {
        "profile": record.config["study"]["profile"], "model": record.cell.model, "benchmark": record.cell.benchmark,
        "evidence": record.cell.evidence, "batch": str(record.cell.batch), "prompt tokens": field(prompt.mean, 0),
        "drafts a round": str(drawn_length(run)),
    }  # fmt: skip


def picked(requests: Sequence[Lengths], count: int = SHOWN) -> list[Lengths]:
    """Requests from the shortest to the longest mean, evenly by rank."""
    ranked = sorted(requests, key=lambda each: (each.mean, each.id))
    places = np.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().astype(int)
    return [ranked[place] for place in places]


def means_panel(name: str, run: Run) -> Panel:
    """A histogram of the requests' means, one bin a draft, with the published shortest, mean and longest above it."""
    longest, means = drawn_length(run), [each.mean for each in requests_of(run)]

    def panel(ax: Axes) -> None:
        counts, _, _ = ax.hist(means, bins=np.arange(longest + 2) - 0.5, color=HUES[0], linewidth=0)
        top = 1.2 * max(counts)
        ax.plot(
            PUBLISHED, [0.92 * top] * 3, marker="D", linestyle="-", color="black", linewidth=0.5, ms=2.6, mfc="white"
        )
        ax.set(xlim=(-0.5, longest + 0.5), ylim=(0, top), ylabel="requests", xlabel="mean accepted drafts of a request")
        ax.set_title(f"{name}: {len(means)} requests", loc="left", pad=2)

    return panel


def rounds_panel(run: Run, window: int) -> Panel:
    """Window means over the rounds of some requests."""
    longest, shown = drawn_length(run), picked(requests_of(run))

    def panel(ax: Axes) -> None:
        for place, each in enumerate(shown):
            values = each.windows(window)
            at = [window * (i + 0.5) for i in range(len(values))]
            ax.plot(at, values, marker=".", ms=3, linewidth=0.8, color=HUES[place])
        ax.set(ylim=(-0.5, longest + 0.5), xlabel="round", ylabel=f"accepted, mean of {window}")

    return panel


def figure(runs: dict[str, Run], window: int, stem: Path) -> list[Path]:
    """Two panels a profile."""
    panels = [panel for name, run in runs.items() for panel in (means_panel(name, run), rounds_panel(run, window))]
    words = (
        "Above: how many drafts stand on average, request by request. Below: the same over the rounds of some requests "
        f"of the same run, means of {window} rounds, requests from the shortest to the longest mean. Only rounds that "
        f"drafted all. {caption(list(runs.values()))}"
    )
    handles = [
        Patch(facecolor=HUES[0], label="requests"),
        Line2D([], [], label="published range and mean", **DIAMOND),
    ]
    return draw(panels, words, handles, stem)
