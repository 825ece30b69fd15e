"""How do the studies of traces draw? Lines and bars in the style of experiments/figures.py, a panel a question."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from experiments import figures

Panel = Callable[[Axes], None]
# Paul Tol's "bright" scheme, as far as lines need it; methods keep the colours of experiments/figures.py.
LINES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
DASHED = (0, (2, 1))


def draw(panels: Sequence[Panel], words: str, handles: list[Any], stem: Path, column: str = "half") -> list[Path]:
    """Panels below each other, legend above, words below -> stem.pdf and stem.png, the same bytes for the same data."""
    with mpl.rc_context(figures._style()):
        figure, axes = figures._page(len(panels), column, words, handles)
        for ax, panel in zip(axes, panels, strict=True):
            panel(ax)
        return figures.save(figure, stem)
