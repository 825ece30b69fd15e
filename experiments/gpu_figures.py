"""What do the GPU runs show at a glance? Speed and acceptance on real text; predicted and measured speed of shapes.

`python -m experiments.redraw` rewrites results/figures/gpu_{smollm2,shapes}.{pdf,png} from the frames of
experiments/gpu_tables.py, in the style of experiments/figures.py; the same records give the same bytes.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from experiments import figures
from experiments.config import METHODS
from experiments.figures import COLOURS, EVIDENCE, EVIDENCE_NAMES, GROUP, OTHER, TINY
from experiments.gpu_tables import BYTES, DRAWN, Suite
from experiments.tables import ACCEPTANCE, BASELINE, Run, caption

LIMIT: dict[str, Any] = {"fill": False, "linewidth": 0.8, "edgecolor": "black", "zorder": 3}
LIMIT_NAME = "allowed by the bytes of the same passes"


def write_gpu_figures(suites: dict[str, Suite], out: Path) -> list[Path]:
    """Draw what the suites hold and return the paths; none if they hold neither real text nor shapes."""
    written = []
    if "smollm2" in suites:
        written += smollm2(suites["smollm2"], out)
    if drawn := {name: suites[name] for name in ("shapes", "hetero") if name in suites}:
        written += shapes(drawn, out)
    return written


def smollm2(suite: Suite, out: Path) -> list[Path]:
    """Speed-up of every method by batch, and its acceptance below the same bar."""
    table = suite.table
    methods = [*METHODS, *sorted(set(table["method"]) - set(METHODS))]
    words = (
        "Above: decode speed-up over autoregressive decoding (prefill excluded), whiskers over repeats, numbers decode "
        "tok/s. Below: acceptance (accepted / drafted) with the 95 % bootstrap interval over requests. "
    )
    with mpl.rc_context(figures._style()):
        column = "half" if len(table.drop_duplicates(GROUP)) <= 2 else "full"
        words += caption(suite.runs)
        figure, (speed, taken) = figures._page(2, column, words, figures._handles(table, methods))
        figures._bars(speed, table, methods)
        acceptance(taken, table, methods)
        return figures.save(figure, out / "gpu_smollm2")


def acceptance(ax: Axes, table: pd.DataFrame, methods: list[str]) -> None:
    """One bar a method, where figures._bars puts its speed-up."""
    groups = list(table.groupby(GROUP, sort=True, dropna=False))
    present = [name for name in methods if name in set(table["method"])]
    step = 1 / (len(present) + 1.2)
    for place, (_, group) in enumerate(groups):
        for one in group[group[ACCEPTANCE].notna()].to_dict("records"):
            x = place + (present.index(one["method"]) - (len(present) - 1) / 2) * step
            ax.bar(x, one[ACCEPTANCE], 0.92 * step, facecolor=COLOURS.get(one["method"], OTHER), linewidth=0)
            low, high = one["acceptance 95 % low"], one["acceptance 95 % high"]
            if pd.notna(low):
                ax.vlines(x, low, high, color="black", linewidth=0.6, zorder=4)
            above(ax, x, np.nanmax([one[ACCEPTANCE], high]) + 0.025, f"{one[ACCEPTANCE]:.2f}")
    ax.set_xticks(range(len(groups)), [f"{key[0]}\nB = {key[1]}" for key, _ in groups])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.55, len(groups) - 0.45)
    ax.set_ylim(0, 1.2)
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_ylabel("acceptance")


def above(ax: Axes, x: float, y: float, text: str) -> None:
    """A number that stays legible across lines."""
    label = ax.text(x, y, text, rotation=90, ha="center", va="bottom", fontsize=TINY, zorder=5)
    label.set_path_effects([withStroke(linewidth=1.5, foreground="white")])


def shapes(suites: dict[str, Suite], out: Path) -> list[Path]:
    """Measured bars, hatched, in hollow ones of what their bytes allow: a panel a model, one for uneven requests."""
    runs = [run for suite in suites.values() for run in suite.runs]
    panels: list[tuple[str, pd.DataFrame, Callable[[Any], str]]] = []
    for name, suite in suites.items():
        table = suite.table[suite.table["method"] != BASELINE]
        keys = ["model"] if name == "shapes" else ["model", "context", "batch"]
        for key, panel in table.groupby(keys, sort=False, dropna=False):
            title = key[0] if name == "shapes" else f"{key[0]}, B = {key[2]}, {key[1]:,.0f} tokens, requests differ"
            panels.append((title, panel, size_of if name == "shapes" else method_of))
    if not panels:
        return []
    words = (
        f"Decode speed-up over autoregressive decoding (prefill excluded), whiskers over repeats. Above each bar: "
        f"measured / predicted. {BYTES} {DRAWN} {caption(runs)}"
    )
    with mpl.rc_context(figures._style()):
        figure, axes = figures._page(len(panels), "full", words, handles(runs))
        for ax, (title, panel, label) in zip(axes, panels, strict=True):
            pairs(ax, panel, label)
            ax.set_title(f"{title}, {EVIDENCE_NAMES['shapes']}", loc="left", pad=2)
        return figures.save(figure, out / "gpu_shapes")


def size_of(one: Any) -> str:
    method = "" if one["method"] == "aspire" else f"\n{one['label']}"
    return f"{one['context']:,.0f}\n{one['batch mode']}\nB = {one['batch']}{method}"


def method_of(one: Any) -> str:
    best = "\nbest fixed" if one["best fixed length"] == "best" else ""
    return f"{one['draft length']:.0f}{best}" if pd.notna(one["draft length"]) else one["label"]


def family(method: str) -> str:
    """The colour of a fixed draft length is that of fixed lengths."""
    return COLOURS.get(method) or COLOURS.get(re.sub(r"_\d+$", "", method), OTHER)


def handles(runs: list[Run]) -> list[Patch]:
    labels: dict[str, str] = {}
    for run in runs:
        if run.record.cell.method != BASELINE:
            labels.setdefault(family(run.record.cell.method), re.sub(r" \d+$", "", run.record.label))
    grey = {"facecolor": "#777777", "edgecolor": "#777777"}
    return [
        *(Patch(facecolor=colour, label=label) for colour, label in labels.items()),
        Patch(label=EVIDENCE_NAMES["shapes"], **{**grey, **EVIDENCE["shapes"]}),
        Patch(label=LIMIT_NAME, **LIMIT),
    ]


def pairs(ax: Axes, panel: pd.DataFrame, label: Callable[[Any], str]) -> None:
    """A bar a row, in the order of the table; one without a speed-up says why instead."""
    columns = ["decode speed-up", "decode speed-up max", "predicted speed-up"]
    top = np.nanmax([1.0, *panel[columns].to_numpy(dtype=float, na_value=np.nan).ravel()])
    rows = panel.to_dict("records")
    for x, one in enumerate(rows):
        value, limit, low, high = (one[name] for name in (*columns[::2], "decode speed-up min", columns[1]))
        if pd.isna(value):
            words = one["status"] if one["status"] != "ok" else "no baseline"
            ax.text(x, 0.02 * top, words, rotation=90, ha="center", va="bottom", fontsize=TINY, color="#BB0000")
            continue
        colour = family(one["method"])
        ax.bar(x, value, 0.6, **{"facecolor": colour, "edgecolor": colour, **EVIDENCE[one["evidence"]]})
        if pd.notna(limit):
            ax.bar(x, limit, 0.7, **LIMIT)
        if pd.notna(low):
            ax.vlines(x, low, high, color="black", linewidth=0.6, zorder=4)
        text = f"{value:.2f} / {limit:.2f}" if pd.notna(limit) else f"{value:.2f}"
        above(ax, x, np.nanmax(np.array([value, limit, high], dtype=float)) + 0.025 * top, text)
    ax.axhline(1.0, color="black", linewidth=0.5, zorder=3)
    ax.set_xticks(range(len(rows)), [label(one) for one in rows])
    ax.tick_params(axis="x", length=0)
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.set_ylim(0, top * 1.55)
    ax.set_ylabel("decode speed-up")
