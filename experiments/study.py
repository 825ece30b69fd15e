"""One experiment of the paper, by one command: its cells, its table, its figure and the verdict on each claim.

python -m experiments.study                                    # lists the studies
python -m experiments.study draft_length profile=embedded
python -m experiments.study budget profile=h200 output_dir=runs/budget resume=true protocol.repeats=3
Profiles: embedded (SmolLM2 on a CPU), h200 (SmolLM2 on a GPU), shapes (random weights, emulated acceptance, a GPU),
paper (its own models on a large GPU, from the Hub).
"""

from datetime import datetime
from pathlib import Path

from hydra import initialize_config_dir

from experiments.config import CONF, UNIQUE, check_overrides, nearest, register, script, split
from experiments.records import find_records
from experiments.studies.pages import verdict_table, write_study
from experiments.studies.study import Study, names, study_of
from experiments.summary import conclude


def listing() -> str:
    """Every study with its profiles and its question."""
    studies = [study_of(name) for name in names()]
    width = max(len(study.name) for study in studies)
    return "\n".join(f"{s.name:{width}}  {', '.join(s.profiles):24}  {s.title}" for s in studies)


def choose(study: Study, wanted: str) -> str:
    """The profile to run. Raises ValueError for one that the study has not."""
    profile = wanted or study.profiles[0]
    if profile not in study.profiles:
        raise ValueError(f"study {study.name} has no profile {profile!r}{nearest(profile, study.profiles)}")
    return profile


def main(arguments: list[str]) -> int:
    """Run a study; returns how many cells failed. Raises ValueError for bad arguments, before any work."""
    if not arguments:
        print(listing())
        return 0
    register()
    name, rest = arguments[0], arguments[1:]
    study = study_of(name)
    own, words = split(rest, {"profile": "", "output_dir": ""})
    profile = choose(study, own["profile"])
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{UNIQUE}"
    out = Path(own["output_dir"] or f"runs/study-{name}-{profile}-{stamp}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides([f"profile={profile}", f"experiment={name}", *words])
        study.measure(profile, words, out)
    failed = conclude(out)
    rows = study.frame(find_records(out))
    for path in write_study(study, rows, out, out):
        print(f"wrote {path}")
    print(verdict_table(study.verdicts(rows)))
    return failed


if __name__ == "__main__":
    script(main)
