"""Gap to hindsight: how much speed does ASPIRE leave to one who knows which drafts will stand? Modelled."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments.config import CONF
from experiments.figures import COLOURS
from experiments.records import Record, find_records, read_lines, read_record, read_requests
from experiments.studies.draw import HUES
from experiments.studies.gap import CLOSED, FIXED, ORACLE, OWN, STEPPED, GapLine, Scenario, line_of, scenario_of
from experiments.studies.traced import AGAIN, DASHED, Panel, Traced, draw, finished, page, write_lines
from experiments.tables import MARKS, NOTES, Run, caption

GAP = "gap.jsonl"
DRAWN = {
    FIXED: COLOURS["aspire_fixed"], STEPPED: COLOURS["aspire_fsm"], CLOSED: COLOURS["aspire"], OWN: HUES[0],
    ORACLE: "#000000",
}  # fmt: skip
ASSUMES = (
    "A replay of recorded verdicts: whether a draft stands depends on its position alone, not on how many were drafted "
    "before it, how old the selection was or how long the context is; a batch is copies of a request, without barriers "
    "or empty slots. The oracle takes the least time there is, request by request; the best length of each request is "
    "one for all its rounds."
)


class OracleGap(Traced):
    """Recorded drafts, replayed under fitted cost models. costs: patterns of folders with records of ASPIRE, from the
    repository's root: each that was calibrated gives a cost model."""

    costs: tuple[str, ...]

    def scenarios(self) -> list[Scenario]:
        """Raises ValueError where no record has a cost model."""
        folders = [
            folder
            for pattern in self.costs
            for top in sorted(CONF.parent.glob(pattern))
            for folder in find_records(top)
        ]
        records = [record for record in map(read_record, folders) if record.cell.method == "aspire"]
        found = [scenario_of(record) for record in records if record.status == "ok"]
        if not found:
            raise ValueError(
                f"no record of method=aspire below {', '.join(self.costs)}; run one, or name other folders"
            )
        return found

    def derive(self, folder: Path) -> None:
        lines = read_requests(folder)
        write_lines(folder / GAP, [line_of(lines, scenario) for scenario in self.scenarios()])

    def read(self, folder: Path) -> list[GapLine]:
        return read_lines(folder / GAP, GapLine, AGAIN)

    def columns(self, lines: Sequence[GapLine]) -> dict[str, float | None]:
        gaps = [line.gap(CLOSED, ORACLE) for line in lines]
        own = [line.gap(CLOSED, OWN) for line in lines]
        return {"mean gap": fmean(gaps), "largest gap": max(gaps), "mean gap to best length": fmean(own)}

    def row(self, run: Run, part: list[Record]) -> dict[str, Any]:
        row = super().row(run, part)
        return row | {"shown evidence": f"modelled on acceptance: {row['shown evidence']}"}

    def table(self, frame: pd.DataFrame) -> str:
        cells = finished(frame)
        return page(self.title, [rows(profile, x) for profile, _, x in cells], [words([run for _, run, _ in cells])])

    def figure(self, frame: pd.DataFrame, stem: Path) -> list[Path]:
        return figure({profile: (run, lines) for profile, run, lines in finished(frame)}, stem)


def rows(name: str, lines: Sequence[GapLine]) -> list[dict[str, str]]:
    """The table of a profile: a row a cost model. Speeds are over autoregressive decoding in the same replay."""
    return [
        {
            "drafts of": f"{name}, {line.requests} requests", "cost model of": f"{line.model} {MARKS['modelled']}",
            "batch": str(line.batch), "context": str(line.context),
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
        ax.set_xticks(range(len(lines)), [f"{line.model}\nB = {line.batch}, {line.context}" for line in lines])
        ax.tick_params(axis="x", length=0)
        ax.set_ylabel("speed-up, modelled")
        ax.set_title(f"drafts of {name}", loc="left", pad=2)

    return paint
