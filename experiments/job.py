"""What does one Hydra job do? A cell or a comparison into its folder; in a sweep it also says how it ended.

Launchers send this function to other processes by name, with plain config: nothing here has touched a GPU by then.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments import sweep
from experiments.config import for_method, plain, refuse
from experiments.hold import claim_dir
from experiments.records import Record
from experiments.tracking import track

Config = dict[str, Any]


class TimeLimit(BaseException):
    """The launcher's time is up. Not an Exception: a failing cell is followed by the next, this ends the job."""


def run(configs: list[Config], out: Path) -> list[Record]:
    """One comparison into `out`: refuse a folder with results, skip what a resumed run has, write a record a config."""
    first = configs[0]
    claim_dir(out, first["resume"], first["overwrite"])
    # Imported here, since they take seconds and a refusal needs none of them.
    from experiments.compare import run_comparison
    from experiments.resume import resumable

    kept = resumable(configs, out) if first["resume"] else []
    if len(kept) == len(configs):
        return kept
    records = run_comparison(configs, out, kept=kept)
    for record in records:
        if record not in kept:
            track(out / record.cell_id, first["tracking"], first["run_id"])
    return records


def configs_of(config: DictConfig, overrides: list[str], run_id: str) -> list[Config]:
    """A plain config for each method of the comparison, or for the one method."""
    methods = config.comparison.methods
    each = [for_method(overrides, method) for method in methods] if methods else [config]
    return [plain(c) | {"run_id": run_id} for c in each]


def job(config: DictConfig) -> None:
    """Errors of a cell are in its record. An error of the set-up ends a single run; in a sweep it ends its job."""
    hydra_config = HydraConfig.get()
    out, overrides = Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task)
    if hydra_config.mode != RunMode.MULTIRUN:
        try:
            run(configs_of(config, overrides, out.name), out)
        except (ValueError, OSError) as error:
            refuse(error)
        return
    root = Path(hydra_config.sweep.dir)
    limit_time()
    status, error = sweep.FAILED, None
    try:
        sweep.mark(out, sweep.RUNNING)
        sweep.refresh(root)
        records = run(configs_of(config, overrides, root.name), out)  # the cells of a sweep are one run
        status = sweep.FAILED if any(r.status == "failed" for r in records) else sweep.OK
    except TimeLimit as late:
        status, error = sweep.TIMEOUT, str(late)
    except Exception as fault:
        error = str(fault) if isinstance(fault, ValueError) else f"{type(fault).__name__}: {fault}"
    try:
        sweep.mark(out, status, error)
        sweep.refresh(root)
    except OSError as full:
        error = f"{error}; {full}" if error else str(full)
    if error:
        print(f"error: job {hydra_config.job.num}: {error}", file=sys.stderr)


def limit_time() -> None:
    """Under submitit, which signals a job whose time is up: end it in order, so that its status says why."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return

    def end(*_: Any) -> None:
        raise TimeLimit("the launcher's time limit (hydra.launcher.timeout_min) is over; resume=true goes on")

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, end)
