"""What does the reader see at a glance? The speed-up bars of every method, and who drafts or verifies in each pass.

`python -m experiments.figures results/records [LOCKSTEP_CELL ASYNCHRONOUS_CELL]` rewrites fig1.{pdf,png} in
results/figures and, given two cells with recorded passes, timeline.{pdf,png}; the same records give the same bytes.
Bars and tables read one frame (experiments/tables.py), so they cannot disagree.
"""

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from tueplots import figsizes, fontsizes

from experiments.records import pick
from experiments.tables import MARKS, RESULTS, Run, caption, frame, load, method_order, published_column

# Paul Tol's "muted" scheme: told apart under every common colour blindness. The one place where a method gets a colour.
COLOURS = {
    "autoregressive": "#BBBBBB",
    "magicdec_stream": "#DDCC77",
    "magicdec_snapkv": "#999933",
    "vegas": "#88CCEE",
    "vegas_async": "#332288",
    "sparsespec": "#44AA99",
    "aspire_fixed": "#CC6677",
    "aspire_fsm": "#AA4499",
    "aspire": "#882255",
}
OTHER = "#000000"
EVIDENCE: dict[str, dict[str, Any]] = {
    "real": {"linewidth": 0.0},
    "shapes": {"linewidth": 0.0, "hatch": "//////", "edgecolor": "white"},
    "modelled": {"linewidth": 0.8, "linestyle": (0, (2, 1)), "fill": False},
}
EVIDENCE_NAMES = {
    "real": "real weights, measured",
    "shapes": f"random weights, emulated acceptance {MARKS['emulated']}",
    "modelled": f"modelled {MARKS['modelled']}",
}
PAPER = published_column("ASPIRE arXiv 2609.17943")
ON_CPU = (
    "On a CPU arithmetic is not free: a verify of d + 1 tokens costs much more than a pass of one, and a draft saves "
    "only its share of attention. Acceptance, tokens per round and exactness carry over to a GPU, speed does not. A "
    "speed-up below 1 is expected and printed as measured."
)
GROUP = ["benchmark", "batch", "seed", "run"]
SMALL, TINY = 5.5, 4.6  # points
LINE = 0.103  # inches a line of SMALL text takes
MARKER: dict[str, Any] = {"marker": "D", "linestyle": "", "ms": 2.6, "mfc": "white", "mec": "black", "mew": 0.5}
KINDS = {"D": ("draft", "#88CCEE"), "V": ("verify", "#882255"), ".": ("idle", "#EEEEEE")}
STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that every machine draws the same letters
    "pdf.fonttype": 42,
    "svg.hashsalt": "aspire",
    "hatch.linewidth": 0.5,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.labelsize": 6.5,
    "axes.titlesize": 6.5,
    "legend.fontsize": SMALL,
}


def fig1(folders: Iterable[Path | str], out: Path = RESULTS / "figures") -> list[Path]:
    """Decode speed-up over autoregressive decoding, one panel a (model, evidence), one group of bars a workload."""
    runs = load(folders)
    table = frame(runs)
    methods = method_order(run.record for run in runs)
    panels = [panel for _, panel in table.groupby(["model", "evidence"], sort=True)]
    widest = max(len(panel.drop_duplicates(GROUP)) for panel in panels)
    with mpl.rc_context(_style()):
        handles = _handles(table, methods)
        figure, axes = _page(len(panels), "half" if widest <= 2 else "full", _words(runs), handles)
        for ax, panel in zip(axes, panels, strict=True):
            _bars(ax, panel, methods)
        return save(figure, out / "fig1")


def _style() -> dict[str, Any]:
    return {**fontsizes.icml2024(), **STYLE}


def _words(runs: list[Run]) -> str:
    devices = {str(pick(run.record.config, "engine.device")) for run in runs}
    words = (
        f"Decode speed-up over autoregressive decoding (prefill excluded); above each bar decode tok/s. {caption(runs)}"
    )
    return f"{words} {ON_CPU}" if "cpu" in devices else words


def _page(panels: int, column: str, words: str, handles: list[Any]) -> tuple[Figure, Sequence[Axes]]:
    """A figure of paper width with the legend above and the wrapped caption below; room is counted in inches."""
    size, columns = (figsizes.icml2024_half, 3) if column == "half" else (figsizes.icml2024_full, 6)
    width = size()["figure.figsize"][0]
    text = textwrap.fill(words, int(width * 72 / (SMALL * 0.53)))
    below, above = LINE * (text.count("\n") + 1) + 0.08, LINE * -(-len(handles) // columns) + 0.1
    height = below + above + 1.75 * panels
    figure = Figure(figsize=(width, height))
    _keep_free(figure, below, above)
    figure.text(0.01, (below - 0.03) / height, text, fontsize=SMALL, va="top", linespacing=1.25)
    figure.legend(
        handles=handles, loc="upper center", ncols=columns, frameon=False, handlelength=1.2, columnspacing=1.2,
        handletextpad=0.5, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip
    return figure, figure.subplots(panels, 1, squeeze=False)[:, 0]


def _keep_free(figure: Figure, below: float, above: float) -> None:
    """Lay the axes out with so many inches left for the caption and the legend."""
    height = figure.get_figheight()
    rect = (0, below / height, 1, 1 - (above + below) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, h_pad=0.03, w_pad=0.03))


def _bars(ax: Axes, panel: pd.DataFrame, methods: list[str]) -> None:
    groups = list(panel.groupby(GROUP, sort=True, dropna=False))
    present = [name for name in methods if name in set(panel["method"])]
    step = 1 / (len(present) + 1.2)
    columns = [name for name in ("decode speed-up", "decode speed-up max", PAPER) if name in panel]
    top = np.nanmax([1.0, *panel[columns].to_numpy(dtype=float, na_value=np.nan).ravel()])
    for place, (_, group) in enumerate(groups):
        for _, one in group.iterrows():
            x = place + (present.index(one["method"]) - (len(present) - 1) / 2) * step
            _bar(ax, x, step, one, top)
    ax.axhline(1.0, color="black", linewidth=0.5, zorder=3)
    ax.set_xticks(range(len(groups)), [f"{key[0]}\nB = {key[1]}" for key, _ in groups])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.55, len(groups) - 0.45)
    ax.set_ylim(0, top * 1.32)
    ax.set_ylabel("decode speed-up")
    ax.set_title(f"{panel['model'].iloc[0]}, {EVIDENCE_NAMES[panel['evidence'].iloc[0]]}", loc="left", pad=2)


def _bar(ax: Axes, x: float, step: float, one: pd.Series, top: float) -> None:
    """One method's bar, whisker, published marker and tok/s; a cell without a speed-up says why instead."""
    colour, value = COLOURS.get(one["method"], OTHER), one["decode speed-up"]
    paper = one.get(PAPER, np.nan)
    if pd.isna(value):
        words = one["status"] if one["status"] != "ok" else "no baseline"
        ax.text(x, 0.02 * top, words, rotation=90, ha="center", va="bottom", fontsize=TINY, color="#BB0000")
        return
    ax.bar(x, value, 0.92 * step, **{"facecolor": colour, "edgecolor": colour, **EVIDENCE[one["evidence"]]})
    low, high = one["decode speed-up min"], one["decode speed-up max"]
    reach = value
    if pd.notna(low):
        ax.vlines(x, low, high, color="black", linewidth=0.6, zorder=4)
        reach = max(value, high)
    if pd.notna(paper):
        ax.plot(x, paper, **MARKER, zorder=5)
        # The number goes above the marker when the two would meet.
        reach = paper + 0.03 * top if reach - 0.03 * top < paper < reach + 0.27 * top else reach
    if pd.notna(one["decode tok/s"]):
        text = f"{one['decode tok/s']:,.0f}" if one["decode tok/s"] >= 100 else f"{one['decode tok/s']:.1f}"
        label = ax.text(x, reach + 0.025 * top, text, rotation=90, ha="center", va="bottom", fontsize=TINY, zorder=4)
        label.set_path_effects([withStroke(linewidth=1.5, foreground="white")])  # legible across the line at 1.0


def _handles(table: pd.DataFrame, methods: list[str]) -> list[Any]:
    """Legend entries: the methods, the kinds of evidence other than real, and the published marker if one is drawn."""
    labels = dict(zip(table["method"], table["label"], strict=True))
    kinds = [kind for kind in EVIDENCE if kind != "real" and kind in set(table["evidence"])]
    grey = {"facecolor": "#777777", "edgecolor": "#777777"}
    handles: list[Any] = [
        *(Patch(facecolor=COLOURS.get(name, OTHER), label=labels[name]) for name in methods if name in labels),
        *(Patch(label=EVIDENCE_NAMES[kind], **{**grey, **EVIDENCE[kind]}) for kind in kinds),
    ]
    if PAPER in table and table[PAPER].notna().any():
        handles.append(Line2D([], [], label="published (ASPIRE paper, H100 NVL)", **MARKER))
    return handles


def read_passes(path: Path | str) -> list[dict[str, Any]]:
    """The recorded passes: kinds (one letter a slot: D draft, V verify, . idle), ms, tokens committed."""
    passes = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for number, one in enumerate(passes, start=1):
        if not set(one["kinds"]) <= set(KINDS):
            raise ValueError(
                f"{path}:{number} has kinds {one['kinds']!r}; write one of {' '.join(KINDS)} for each slot"
            )
    return passes


def timeline(passes: dict[str, list[dict[str, Any]]], out: Path, limit: int = 60) -> list[Path]:
    """Slots by passes, coloured by the kind of row: a panel each method, title -> passes, the lockstep one first.

    Shows the first `limit` passes; out is a path without a suffix.
    """
    with mpl.rc_context(_style()):
        width = figsizes.icml2024_full()["figure.figsize"][0]
        slots = max(len(one["kinds"]) for run in passes.values() for one in run[:limit])
        height = 0.45 + len(passes) * (0.35 + min(0.11 * slots, 1.8))
        figure = Figure(figsize=(width, height))
        _keep_free(figure, 0.0, 0.2)
        axes = figure.subplots(len(passes), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (title, run) in zip(axes, passes.items(), strict=True):
            _grid(ax, title, run[:limit])
        axes[-1].set_xlabel("pass")
        figure.legend(
            handles=[Patch(facecolor=colour, label=name) for name, colour in KINDS.values()],
            loc="upper right", ncols=len(KINDS), frameon=False, handlelength=1.2, borderaxespad=0.2,
        )  # fmt: skip
        return save(figure, out)


def _grid(ax: Axes, title: str, run: list[dict[str, Any]]) -> None:
    slots, letters = max(len(one["kinds"]) for one in run), list(KINDS)
    grid = np.array([[letters.index(kind) for kind in one["kinds"].ljust(slots, ".")] for one in run]).T
    colours = ListedColormap([colour for _, colour in KINDS.values()])
    edges = np.arange(len(run) + 1), np.arange(slots + 1)
    gap = 0.4 if slots <= 16 else 0.1  # many slots make flat cells, which wide gaps would wash out
    ax.pcolormesh(*edges, grid, cmap=colours, vmin=-0.5, vmax=len(KINDS) - 0.5, edgecolors="white", linewidth=gap)
    ax.invert_yaxis()
    ax.set_yticks([0.5, slots - 0.5], ["1", str(slots)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_ylabel("slot")
    ax.set_title(f"{title}: {_totals(run)}", loc="left", pad=2)


def _totals(run: list[dict[str, Any]]) -> str:
    times, tokens = [one["ms"] for one in run], [one["tokens"] for one in run]
    ms = sum(times) if None not in times else None
    text = f"{len(run)} passes, {sum(tokens)} tokens"
    return f"{text}, {ms:.0f} ms, {1e3 * sum(tokens) / ms:,.0f} tok/s" if ms else text


def settle(figure: Figure) -> None:
    """Lay out once and round: the last bits of a constrained layout depend on where in memory its variables lie."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax in figure.axes:
        ax.set_position([round(x, 5) for x in ax.get_position().bounds])


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.pdf and stem.png without the time stamps that would make two equal figures differ."""
    settle(figure)
    stem.parent.mkdir(parents=True, exist_ok=True)
    metadata = {".pdf": {"CreationDate": None, "ModDate": None}, ".png": {"Software": None}}
    paths = [stem.with_name(stem.name + suffix) for suffix in metadata]
    for path in paths:
        figure.savefig(path, dpi=300, metadata=metadata[path.suffix])
    return paths
