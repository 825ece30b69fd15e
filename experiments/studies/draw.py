"""How does a swept setting look? Lines over x, or a map of parts by x; a panel for each profile."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments import figures
from experiments.figures import EVIDENCE_NAMES, SMALL
from experiments.studies.claims import as_text
from experiments.tables import ACCEPTANCE, BASELINE, caption

# Paul Tol's "bright" scheme: told apart under every common colour blindness.
HUES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#332288", "#999933")
SPREAD = {
    "decode speed-up": ("decode speed-up min", "decode speed-up max"),
    "decode tok/s": ("decode tok/s min", "decode tok/s max"),
    ACCEPTANCE: ("acceptance 95 % low", "acceptance 95 % high"),
}


def lines(rows: pd.DataFrame, axis: str, show: tuple[str, ...], title: str, stem: Path) -> list[Path]:
    """A panel for each profile, part and shown column; a line for each series, whiskers where repeats or requests
    spread. Cells of plain decoding are the unit, and drawn where the column is not a ratio to them."""
    panels = [
        (column, profile, part, drawn(own, column))
        for (profile, part), own in rows.groupby(["profile", "part"], sort=False)
        for column in show
        if len(drawn(own, column))
    ]
    labels = list(dict.fromkeys(label for *_, own in panels for label in own["series"]))
    hues = dict(zip(labels, HUES * (1 + len(labels) // len(HUES)), strict=False))
    handles = [Line2D([], [], color=hues[name], marker="o", ms=2.4, lw=0.9, label=name) for name in labels]
    if not panels:
        return []
    with mpl.rc_context(figures._style()):
        words = f"{title}. {caption(list(rows['cell']))}"
        figure, axes = figures._page(len(panels), "full", words, handles)
        for ax, (column, profile, part, own) in zip(axes, panels, strict=True):
            curves(ax, own, column, hues)
            ax.set_xlabel(axis)
            ax.set_ylabel(column)
            place = f"{profile}, {part}" if part != "all" else profile
            ax.set_title(f"{place}: {EVIDENCE_NAMES[own['evidence'].iloc[0]]}", loc="left", pad=2)
        return figures.save(figure, stem)


def drawn(own: pd.DataFrame, column: str) -> pd.DataFrame:
    """Rows with something to draw; plain decoding is the line at 1 of a speed-up, no point of its own."""
    return own[own[column].notna() & ~((own["method"] == BASELINE) & (column == "decode speed-up"))]


def curves(ax: Axes, own: pd.DataFrame, column: str, hues: dict[str, str]) -> None:
    """The series of one panel, as bars where none has an x; words on the x axis keep their order."""
    if own["x"].isna().all():
        bars(ax, own, column, hues)
        return
    ticks = list(dict.fromkeys(as_text(x) for x in own["x"].dropna()))
    numeric = all(isinstance(x, int | float) for x in own["x"].dropna())
    places = {text: float(text) if numeric else float(at) for at, text in enumerate(ticks)}
    for series, group in own.groupby("series", sort=False):
        if group["x"].isna().all():
            ax.axhline(group[column].iloc[0], color=hues[str(series)], lw=0.9, ls=(0, (4, 2)))
            continue
        group = group[group["x"].notna()]
        at = [places[as_text(x)] for x in group["x"]]
        ax.plot(at, group[column], color=hues[str(series)], marker="o", ms=2.4, lw=0.9)
        if column in SPREAD:
            low, high = SPREAD[column]
            ax.vlines(at, group[low], group[high], color=hues[str(series)], lw=0.6)
    ax.set_xticks(list(places.values()), list(places))
    if column == "decode speed-up":
        ax.axhline(1.0, color="black", linewidth=0.5)
    ax.set_ylim(bottom=0)


def bars(ax: Axes, own: pd.DataFrame, column: str, hues: dict[str, str]) -> None:
    """A bar a series, whiskers where there are any."""
    labels, at = list(own["series"]), range(len(own))
    ax.bar(at, own[column], 0.6, color=[hues[label] for label in labels], linewidth=0)
    if column in SPREAD:
        low, high = SPREAD[column]
        ax.vlines(at, own[low], own[high], color="black", lw=0.6)
    if column == "decode speed-up":
        ax.axhline(1.0, color="black", linewidth=0.5)
    ax.set_xticks(at, labels)
    ax.tick_params(axis="x", length=0)
    ax.set_ylim(bottom=0)


def heat(rows: pd.DataFrame, axis: str, column: str, title: str, stem: Path) -> list[Path]:
    """A panel for each profile and series: parts down, x across, the number in its field, below 1 in red."""
    own = rows[(rows["method"] != BASELINE) & rows[column].notna()]
    panels = list(own.groupby(["profile", "series"], sort=False))
    if not panels:
        return []
    with mpl.rc_context(figures._style()):
        words = f"{title}: {column}; red: below 1, where plain decoding wins. {caption(list(rows['cell']))}"
        figure, axes = figures._page(len(panels), "full", words, [])
        for ax, ((profile, series), panel) in zip(axes, panels, strict=True):
            fields(ax, panel, column)
            ax.set_xlabel(axis)
            ax.set_title(f"{profile}, {series}: {EVIDENCE_NAMES[panel['evidence'].iloc[0]]}", loc="left", pad=2)
        return figures.save(figure, stem)


def fields(ax: Axes, panel: pd.DataFrame, column: str) -> None:
    parts, xs = (list(dict.fromkeys(panel[key])) for key in ("part", "x"))
    wide = panel.pivot_table(index="part", columns="x", values=column, aggfunc="first", sort=False)
    values: Any = wide.reindex(index=parts, columns=xs).to_numpy(dtype=float)
    # One scale for all maps: white where nothing is won or lost.
    highest = 2 if pd.isna(values).all() else max(2, _top(values))
    ax.pcolormesh(values, cmap="PuOr_r", vmin=2 - highest, vmax=highest, alpha=0.5, linewidth=0)
    for (row, place), value in ((at, values[at]) for at in _indices(values)):
        if pd.notna(value):
            colour = "#BB0000" if value < 1 else "black"
            ax.text(place + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=SMALL, color=colour)
    ax.invert_yaxis()
    ax.set_yticks([at + 0.5 for at in range(len(parts))], parts)
    ax.set_xticks([at + 0.5 for at in range(len(xs))], [as_text(x) for x in xs])
    ax.tick_params(length=0)


def _top(values: Any) -> float:
    return float(values[~pd.isna(values)].max())


def _indices(values: Any) -> list[tuple[int, int]]:
    return [(row, place) for row in range(values.shape[0]) for place in range(values.shape[1])]
