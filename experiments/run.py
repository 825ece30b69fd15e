"""Run one cell, or one comparison of several methods on the same prefilled prompts; with -m, a sweep of them.

python -m experiments.run method=vegas benchmark=pystdlib
python -m experiments.run comparison.methods=[autoregressive,vegas,aspire]
python -m experiments.run -m method=autoregressive,vegas batch=1,8
"""

import sys
from pathlib import Path

import hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.compare import run_comparison
from experiments.config import CONF, MAX_FIT, check_overrides, for_method, plain, refuse, register
from experiments.layout import with_batch
from experiments.loading import Config
from experiments.records import Record, claim_dir, find_records, read_record
from experiments.summary import Summary
from experiments.tracking import track


def run(configs: list[Config], out: Path) -> list[Record]:
    """One comparison into `out`: refuse a folder with results, skip what a resumed run has, write a record a config."""
    first = configs[0]
    claim_dir(out, first["resume"], first["overwrite"])
    done = resumable(configs, out) if first["resume"] else []
    if len(done) == len(configs):
        return done
    records = run_comparison(configs, out)
    for record in records:
        track(record, first["tracking"], first["run_id"])
    return records


SETTLED = {"resume", "overwrite", "output_dir", "run_id", "engine", "tracking"}  # a resumption may differ in these


def resumable(configs: list[Config], out: Path) -> list[Record]:
    """Finished records of exactly these configs. Raises ValueError if one was made with another config."""
    found = {r.cell.method: r for r in map(read_record, find_records(out)) if r.status == "ok"}
    kept = []
    for config in configs:
        record = found.get(config["method"]["name"])
        if record is None:
            continue
        if config["batch"] != MAX_FIT:
            config = with_batch(config, config["batch"])
        wanted, had = unsettled(config, config), unsettled(record.config, config)
        changed = sorted(k for k in {*wanted, *had} if wanted.get(k) != had.get(k))
        if changed:
            raise ValueError(
                f"{out} holds results of another config ({', '.join(changed)} differ); choose another output_dir"
            )
        kept.append(record)
    return kept


def unsettled(config: Config, asked: Config) -> Config:
    """A config without what a run settles: of the sizes that `asked` leaves to the memory, and of the window."""
    kept = {k: v for k, v in config.items() if k not in SETTLED}
    if asked["protocol"]["tokens_per_slot"]:
        kept["protocol"] = {k: v for k, v in kept["protocol"].items() if k != "window_tokens"}
    if asked["batch"] == MAX_FIT:
        source = asked["benchmark"]["source"]
        own = {k: v for k, v in config["benchmark"]["source"].items() if source.get(k) != MAX_FIT}
        kept["benchmark"] = {**config["benchmark"], "source": own}
        del kept["batch"]
    return kept


def configs_of(config: DictConfig, overrides: list[str], run_id: str) -> list[Config]:
    """A plain config for each method of the comparison, or for the one method."""
    methods = config.comparison.methods
    each = [for_method(overrides, method) for method in methods] if methods else [config]
    return [plain(c) | {"run_id": run_id} for c in each]


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def task(config: DictConfig) -> None:
    """One Hydra job. Errors of a cell are in its record; errors of the set-up stop the job with one line."""
    hydra_config = HydraConfig.get()
    out = Path(hydra_config.runtime.output_dir)
    swept = hydra_config.mode == RunMode.MULTIRUN
    run_id = Path(hydra_config.sweep.dir).name if swept else out.name  # the cells of a sweep are one run
    try:
        configs = configs_of(config, list(hydra_config.overrides.task), run_id)
        run(configs, out)
    except ValueError as error:
        refuse(error)


def main() -> None:
    """Check the command line, hand over to Hydra, leave with 1 if any cell failed."""
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            check_overrides(sys.argv[1:])
    except ValueError as error:
        refuse(error)
    task()
    raise SystemExit(1 if Summary.failed else 0)


if __name__ == "__main__":
    main()
