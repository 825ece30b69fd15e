"""Figure 1: every method on every workload of a profile, then the figure and the table beside the published numbers.

python -m experiments.fig1                    # profile=auto: paper on a GPU of 80 GB or more, else embedded
python -m experiments.fig1 profile=embedded output_dir=runs/fig1 resume=true protocol.repeats=5
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hydra import compose, initialize_config_dir

from experiments.config import CONF, METHODS, UNIQUE, check_overrides, nearest, register, script, split
from experiments.environment import gpu_gib
from experiments.hold import claim_dir
from experiments.redraw import redraw
from experiments.run import configs_of, run
from experiments.summary import conclude


@dataclass(frozen=True)
class Panel:
    """One workload of one model; overrides on top of the profile's experiment file."""

    model: str
    benchmark: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}-{self.benchmark}"


def paper_panels() -> list[Panel]:
    """Three models, five workloads; one batch for all methods, a prompt a slot, so that prompts and answers fit."""
    batches = {"aime25": 30, "codeelo": 32, "longbench_16k": 16, "longbench2_30k": 8, "longbench2_80k": 4}
    panels = []
    for model in ("qwen3_1p7b", "qwen3_8b", "ds_r1_llama_8b"):
        for benchmark, batch in batches.items():
            sizes = (f"batch={batch}", f"benchmark.source.requests={batch}")
            panels.append(Panel(model, benchmark, sizes))
    return panels


PROFILES = {
    "embedded": [Panel("smollm2_135m", "pystdlib"), Panel("smollm2_135m", "arithmetic")],
    "paper": paper_panels(),
}


def choose_profile(wanted: str) -> str:
    """The profile to run, with the reason printed. Raises ValueError for an unknown one."""
    if wanted == "auto":
        gib = gpu_gib()
        chosen = "paper" if gib >= 74 else "embedded"  # 80 GB, less what the driver keeps
        why = f"a GPU of {gib:.0f} GiB" if gib else "no GPU"
        print(f"profile {chosen}: found {why}; paper needs a GPU of 80 GB or more")
        return chosen
    if wanted not in PROFILES:
        raise ValueError(f"unknown profile {wanted!r}{nearest(wanted, ['auto', *PROFILES])}")
    print(f"profile {wanted}: asked for")
    return wanted


def run_panel(panel: Panel, profile: str, overrides: list[str], out: Path) -> None:
    """Measure all methods on one workload."""
    words = [f"model={panel.model}", f"benchmark={panel.benchmark}", f"experiment=fig1_{profile}", *panel.overrides]
    # Calibrated anew for every figure: a file of another hour describes another load of the machine.
    words += [f"comparison.methods=[{','.join(METHODS)}]", f"calibration.dir={out / 'calibration'}", *overrides]
    config = compose("config", [*words, "output_dir=."])
    print(f"\n{panel.model} on {panel.benchmark}, {len(config.comparison.methods)} methods -> {out / panel.name}")
    run(configs_of(config, words, out.name), out / panel.name)


def main(arguments: list[str]) -> int:
    """Run a profile; returns how many cells failed. Raises ValueError for bad arguments, before any work."""
    register()
    own, overrides = split(arguments, {"profile": "auto", "output_dir": ""})
    profile = choose_profile(own["profile"])
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{UNIQUE}"
    out = Path(own["output_dir"] or f"runs/fig1-{profile}-{stamp}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides([f"experiment=fig1_{profile}", *overrides])
        claim_dir(out, "resume=true" in overrides, "overwrite=true" in overrides)
        for panel in PROFILES[profile]:
            run_panel(panel, profile, overrides, out)
    failed = conclude(out)
    for path in redraw(out):
        print(f"wrote {path}")
    return failed


if __name__ == "__main__":
    script(main)
