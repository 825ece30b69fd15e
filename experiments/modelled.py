"""How well does the simulator know the measured cells, and what does it say of the paper's card? Table and figure.

Both come from the lines that experiments/simulate.py wrote; everything here is modelled and marked so.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.lines import Line2D

from experiments import figures
from experiments.figures import COLOURS
from experiments.simulate import BASELINE, Checked, error_lines
from experiments.tables import DASH, MARKS, NOTES, RESULTS

MODELLED = "modelled"  # below results/records
WORKLOADS = {17000: "longbench_16k", 35000: "longbench2_30k", 90000: "longbench2_80k"}
TICKS = (300, 1000, 3000)  # tok/s
SIGN = MARKS["modelled"]
SHARES = (
    "Another card is taken to reach the shares of its data sheet that the H200 reached. Acceptance is emulated, the "
    "published speed-ups are measured on text: the two may be compared in shape alone."
)


def read(root: Path) -> tuple[list[Checked], list[dict[str, Any]]]:
    """Validation and scenarios; both empty where nothing was simulated."""
    lines = [_lines(root / name) for name in ("validation.jsonl", "what_if.jsonl")]
    return [Checked(**line) for line in lines[0]], lines[1]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def write_modelled(root: Path, out: Path, paper: Path = RESULTS / "paper") -> list[Path]:
    """Table and figure; none where nothing was simulated."""
    checked, scenarios = read(root)
    if not checked:
        return []
    path = out / "tables" / "modelled.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = [
        "# Modelled", " ".join(error_lines(checked)), validation(checked), "## The paper's card", SHARES,
        what_if(scenarios, pd.read_csv(paper / "fig1_speedups.csv")), f"{SIGN} {NOTES[SIGN]}.",
    ]  # fmt: skip
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return [path, *scatter(checked, out / "figures" / "modelled")]


def validation(checked: list[Checked]) -> str:
    """A row a measured cell."""
    by_model = {one.cell: one for one in checked if one.held == "model"}
    rows = [
        {
            "model": one.model, "context": str(one.context), "batch": str(one.batch), "method": one.method,
            "measured tok/s": f"{one.measured:.1f}", f"predicted tok/s {SIGN}": f"{one.predicted:.1f}",
            "error %": f"{100 * one.error:+.1f}", "error %, model held out": f"{100 * by_model[one.cell].error:+.1f}",
            "passes measured": str(one.passes_measured), f"passes {SIGN}": str(one.passes),
        }
        for one in checked
        if one.held == "cell"
    ]  # fmt: skip
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def what_if(scenarios: list[dict[str, Any]], published: pd.DataFrame) -> str:
    """A row a scenario, the published speed-up of the same model and method beside it."""
    known = published.set_index(["model", "workload", "method"])["speedup"].to_dict()

    def row(one: dict[str, Any]) -> dict[str, str]:
        paper = known.get((one["model"], WORKLOADS.get(one["context"]), one["method"]))
        return {
            "card": one["card"], "model": one["model"], "context": str(one["context"]), "batch": str(one["batch"]),
            "method": f"{one['method']} {SIGN}", "acceptance": f"emulated: {one['acceptance']}",
            "tokens per round": f"{one['tokens_per_round']:.2f}", "tok/s": f"{one['tok_s']:.1f}",
            "plain tok/s": f"{one['plain_tok_s']:.1f}", "speed-up": f"{one['speedup']:.2f}",
            "published speed-up": DASH if paper is None else f"{paper:.2f}",
        }  # fmt: skip

    return pd.DataFrame(map(row, scenarios)).to_markdown(index=False, disable_numparse=True)


def scatter(checked: list[Checked], stem: Path) -> list[Path]:
    """Predicted against measured, a panel for each way of holding out."""
    colour = {name: COLOURS.get(name, COLOURS["aspire_fixed"]) for name in (BASELINE, "aspire_fixed", "aspire")}
    handles = [Line2D([], [], **_open(hue), label=f"{name} {SIGN}") for name, hue in colour.items()]
    handles.append(Line2D([], [], color="black", lw=0.5, ls=(0, (2, 1)), label="equal"))
    with mpl.rc_context(figures._style()):
        words = f"Modelled decode tok/s against measured, one point a cell. {' '.join(error_lines(checked))}"
        figure, axes = figures._page(2, "half", words, handles)
        for ax, held in zip(axes, ("cell", "model"), strict=True):
            own = [one for one in checked if one.held == held]
            ends = [min(one.measured for one in own), max(one.measured for one in own)]
            ax.plot(ends, ends, color="black", lw=0.5, ls=(0, (2, 1)))
            for one in own:
                name = one.method if one.method in colour else "aspire_fixed"
                ax.plot(one.measured, one.predicted, **_open(colour[name]))
            ax.set(xscale="log", yscale="log")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_ticks(TICKS, [f"{tick:,}" for tick in TICKS])
            ax.minorticks_off()
            ax.set_xlabel("measured tok/s")
            ax.set_ylabel("modelled tok/s")
            ax.set_title(f"{'size' if held == 'cell' else 'model'} held out", loc="left", pad=2)
        return figures.save(figure, stem)


def _open(hue: str) -> dict[str, Any]:
    return {"marker": "o", "ms": 3.2, "mfc": "none", "mec": hue, "mew": 0.7, "linestyle": ""}
