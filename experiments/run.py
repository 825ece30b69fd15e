"""Run one cell, or one comparison of several methods on the same prefilled prompts; with -m, a sweep of them.

python -m experiments.run method=vegas benchmark=pystdlib
python -m experiments.run comparison.methods=[autoregressive,vegas,aspire]
python -m experiments.run -m method=autoregressive,vegas batch=1,8
python -m experiments.run -m method=autoregressive,vegas output_dir=runs/mine resume=true    # or dry_run=true
"""

import sys

import hydra
from hydra import initialize_config_dir

from experiments.config import CONF, check_overrides, refuse, register
from experiments.job import configs_of, job, run
from experiments.summary import conclude
from experiments.sweep import Plan, check_paths, listing, plan_of, start

__all__ = ["configs_of", "main", "run"]


def plan_words(words: list[str]) -> Plan:
    """What the command line asks. Raises ValueError for an unknown key, a bad value, a path that is not there."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(words)
        plan = plan_of(words)
    check_paths(plan.jobs)
    return plan


def main() -> None:
    """Check the command line, hand over to Hydra, leave with 1 if any cell failed, with 2 if none could start."""
    register()
    task = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(job)
    if any(word in ("--help", "-h", "--hydra-help", "--info", "-i", "--cfg", "-c") for word in sys.argv[1:]):
        return task()
    try:
        plan = plan_words(sys.argv[1:])
        if plan.dry_run:
            return print(listing(plan))
        start(plan)
    except (ValueError, OSError) as error:
        refuse(error)
    sys.argv[1:] = plan.words
    try:
        task()
    finally:
        failed = conclude(plan.root) if plan.swept or plan.root.is_dir() else 1
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
