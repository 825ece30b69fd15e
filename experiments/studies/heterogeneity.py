"""Heterogeneity: how many of 20 drafts stand, request by request and round by round, beside the published spread."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.records import pick
from experiments.studies.panels import LINES, Panel, draw
from experiments.studies.lengths import Lengths, lengths_of, summary
from experiments.tables import DASH, Run, caption

PUBLISHED = (2.56, 11.51, 20.0)  # shortest, mean and longest mean of a request: the diamonds of the figure
SHOWN = 5  # requests whose rounds are drawn


def drawn_length(run: Run) -> int:
    """The draft length a record was run with."""
    return int(pick(run.record.config, "method.speculation.longest"))


def requests_of(run: Run) -> list[Lengths]:
    return lengths_of(run.lines, drawn_length(run))


def row(name: str, run: Run, window: int) -> dict[str, str]:
    """A row of the table: the numbers of `summary`, two digits."""
    found = summary(requests_of(run), window)
    whole = ("requests", "rounds")
    numbers = {
        key: DASH if value is None else str(value) if key in whole else f"{value:.2f}" for key, value in found.items()
    }
    cell = record_words(run)
    return {"profile": name, **cell, **numbers}


def record_words(run: Run) -> dict[str, str]:
    """What was run, for a row."""
    record = run.record
    prompt = record.workload.prompt_tokens
    return {
        "model": record.cell.model, "benchmark": record.cell.benchmark, "evidence": record.cell.evidence,
        "batch": str(record.cell.batch), "prompt tokens": f"{prompt.min}–{prompt.max}",
        "draft": str(drawn_length(run)),
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
        counts, _, _ = ax.hist(means, bins=np.arange(longest + 2) - 0.5, color=LINES[0], linewidth=0)
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
            ax.plot(at, values, marker=".", ms=3, linewidth=0.8, color=LINES[place])
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
        Patch(facecolor=LINES[0], label="requests"),
        Line2D([], [], marker="D", color="black", linewidth=0.5, ms=2.6, mfc="white", label="published range and mean"),
    ]
    return draw(panels, words, handles, stem)
