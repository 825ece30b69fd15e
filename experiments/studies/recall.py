"""Mass recall: which layer, how many tokens ago, tells best where a layer will look? Curves of predictor sources."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from experiments.records import read_lines
from experiments.studies.draw import HUES
from experiments.studies.sources import Asked, Curves, RecallLine, mean, traced
from experiments.studies.traced import AGAIN, DASHED, Panel, Traced, draw, finished, page, write_lines
from experiments.tables import Run, caption

RECALL = "recall.jsonl"
POSITIONS = {"all": "all positions", "prompt": "the prompt's positions"}
STYLES = {"all": "-", "prompt": DASHED}
NAMES = {
    "age": "same layer, earlier token", "offset": "same token, earlier layer", "source": "same token",
    "source_old": "a token old", "refresh": "the last one below, same token", "refresh_old": "the nearest, a token old",
}  # fmt: skip


READING = (
    "Mass recall: the attention on a source's top positions, over that on the layer's own top positions (our reading "
    "of the paper's diagnostic); heads reduced by their maximum; mean over layers, decoded tokens and prompts. A "
    "layer's service of itself is left out where one token serves, since layers that serve are dense. The prompt's "
    "positions leave out the answer's own, which every draft row reads as its tail and no older token can know."
)


class MassRecall(Traced):
    """Texts of plain decoding, traced. asked: what is looked at."""

    asked: Asked

    def derive(self, folder: Path) -> None:
        write_lines(folder / RECALL, traced(folder, self.asked))

    def read(self, folder: Path) -> list[RecallLine]:
        return read_lines(folder / RECALL, RecallLine, AGAIN)

    def columns(self, lines: Sequence[RecallLine]) -> dict[str, float | None]:
        found = sources(mean(lines, "all"))
        return {"prompts": len(lines), **{f"{source}: {at}": value for (source, at), value in found.items()}}

    def table(self, frame: pd.DataFrame) -> str:
        cells = finished(frame)
        tables = [rows(f"{profile}, {run.record.cell.model}, {len(x)} prompts", x) for profile, run, x in cells]
        tops = f"Tops of {self.asked.k} positions, {self.asked.tokens} tokens of each answer."
        return page(self.title, tables, [f"{READING} {tops}", caption([run for _, run, _ in cells])])

    def figure(self, frame: pd.DataFrame, stem: Path) -> list[Path]:
        return figure({profile: (run, lines) for profile, run, lines in finished(frame)}, stem)


def rows(name: str, lines: Sequence[RecallLine]) -> list[dict[str, str]]:
    """The table of a profile: a row a source, a column a set of positions."""
    each = {key: mean(lines, key) for key in POSITIONS}
    found = {key: sources(curves) for key, curves in each.items()}
    return [
        {"profile": name, "source": source, "at": at}
        | {words: f"{found[key][source, at]:.3f}" for key, words in POSITIONS.items()}
        for source, at in found["all"]
    ]


def sources(curves: Curves) -> dict[tuple[str, str], float]:
    """(source, where) -> recall, in the table's order; of layers that serve all, those at which the figure bends."""
    layers = len(curves.source)
    places = {"N/4": layers // 4, "N/2": layers // 2, "3N/4": 3 * layers // 4, "N-2": layers - 2, "N-1": layers - 1}
    shown = {**{str(at): at for at in range(min(4, layers))}, **places}
    return {
        **{("same layer, earlier token", f"{age} ago"): value for age, value in curves.age.items()},
        **{("same token, earlier layer", f"{offset} below"): value for offset, value in curves.offset.items()},
        **{("one layer for all, same token", f"layer {name}"): curves.source[at] for name, at in shown.items()},
        **{("one layer for all, a token old", f"layer {name}"): curves.source_old[at] for name, at in shown.items()},
        **{("refresh layers at or below, same token", str(count)): value for count, value in curves.refresh.items()},
        **{("nearest refresh layer, a token old", str(count)): value for count, value in curves.refresh_old.items()},
    }


def figure(runs: dict[str, tuple[Run, list[RecallLine]]], stem: Path) -> list[Path]:
    """Three panels a profile: by age and offset, by source layer, by number of refresh layers."""
    panels: list[Panel] = []
    for name, (_, lines) in runs.items():
        each = {key: mean(lines, key) for key in POSITIONS}
        panels += [
            panel(each, ("age", "offset"), "tokens ago, or layers below", f"{name}: {len(lines)} prompts"),
            panel(each, ("source", "source_old"), "layer that serves all others"),
            panel(each, ("refresh", "refresh_old"), "number of refresh layers"),
        ]
    words = f"{READING} {caption([run for run, _ in runs.values()])}"
    handles = [Line2D([], [], color="black", linestyle=STYLES[key], label=text) for key, text in POSITIONS.items()]
    return draw(panels, words, handles, stem)


def panel(each: dict[str, Curves], curves: tuple[str, str], xlabel: str, title: str = "") -> Panel:
    """Two curves, NAMES says of what, for each set of positions; those with keys stand on an axis of powers of two."""

    def paint(ax: Axes) -> None:
        for positions, found in each.items():
            for colour, name in zip(HUES, curves):
                at, values = points(getattr(found, name))
                ax.plot(at, values, marker=".", ms=3, linewidth=0.8, linestyle=STYLES[positions], color=colour)
        if isinstance(getattr(each["all"], curves[0]), dict):
            ticks = sorted({at for name in curves for at in getattr(each["all"], name)})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, map(str, ticks))
        ax.legend(handles=[Line2D([], [], color=c, label=NAMES[name]) for c, name in zip(HUES, curves)], frameon=False)
        ax.set(xlabel=xlabel, ylabel="mass recall", ylim=(0, 1.02))
        ax.set_title(title, loc="left", pad=2)

    return paint


def points(curve: dict[int, float] | list[float]) -> tuple[list[int], list[float]]:
    """x and y of a curve."""
    keyed = curve if isinstance(curve, dict) else dict(enumerate(curve))
    return [*keyed], [*keyed.values()]
