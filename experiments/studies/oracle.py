"""Gap to hindsight: how much speed does ASPIRE leave to one who knows which drafts will stand? Modelled, not measured."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments.figures import COLOURS
from experiments.studies.panels import DASHED, LINES, Panel, draw
from experiments.studies.gap import CLOSED, FIXED, ORACLE, OWN, STEPPED, GapLine
from experiments.tables import DASH, MARKS, NOTES, Run, caption

DRAWN = {
    FIXED: COLOURS["aspire_fixed"], STEPPED: COLOURS["aspire_fsm"], CLOSED: COLOURS["aspire"], OWN: LINES[0],
    ORACLE: "#000000",
}  # fmt: skip
ASSUMES = (
    "A replay of recorded verdicts: whether a draft stands depends on its position alone, not on how many were drafted "
    "before it or how old the selection was; a batch is copies of a request, without barriers or empty slots. The oracle "
    "takes the least time there is, request by request; the best length of each request is one for all its rounds."
)


def rows(name: str, lines: Sequence[GapLine]) -> list[dict[str, str]]:
    """The table of a profile: a row a cost model. Speeds are over autoregressive decoding in the same replay."""
    return [
        {
            "drafts of": f"{name}, {line.requests} requests", "cost model of": f"{line.model} {MARKS['modelled']}",
            "batch": str(line.batch), "context": DASH if line.context is None else str(line.context),
            **{policy: f"{line.speedup(policy):.2f}" for policy in DRAWN},
            "gap to oracle": f"{100 * line.gap(CLOSED, ORACLE):.1f} %",
            "gap to best length": f"{100 * line.gap(CLOSED, OWN):.1f} %",
        }
        for line in lines
    ]  # fmt: skip


def words(runs: Sequence[Run]) -> str:
    """What a reader must know beside the numbers."""
    return f"{ASSUMES} {MARKS['modelled']} {NOTES['‡']}. Acceptance: {caption(list(runs))}"


def figure(runs: dict[str, tuple[Run, list[GapLine]]], stem: Path) -> list[Path]:
    """A panel a profile, a group of bars a cost model, dashed outlines: modelled."""
    panels = [bars(name, lines) for name, (_, lines) in runs.items()]
    handles = [Patch(fill=False, edgecolor=colour, linestyle=DASHED, label=name) for name, colour in DRAWN.items()]
    text = f"Modelled decode speed-up over autoregressive decoding. {words([run for run, _ in runs.values()])}"
    return draw(panels, text, handles, stem, column="full")


def bars(name: str, lines: Sequence[GapLine]) -> Panel:
    step = 1 / (len(DRAWN) + 1.2)

    def paint(ax: Axes) -> None:
        for place, line in enumerate(lines):
            for at, (policy, colour) in enumerate(DRAWN.items()):
                x = place + (at - (len(DRAWN) - 1) / 2) * step
                ax.bar(
                    x, line.speedup(policy), 0.9 * step, fill=False, edgecolor=colour, linestyle=DASHED, linewidth=0.8
                )
        ax.axhline(1, color="black", linewidth=0.5)
        ax.set_xticks(range(len(lines)), [f"{line.model}\nB = {line.batch}, {line.context or 'own'}" for line in lines])
        ax.tick_params(axis="x", length=0)
        ax.set_ylabel("speed-up, modelled")
        ax.set_title(f"drafts of {name}", loc="left", pad=2)

    return paint
