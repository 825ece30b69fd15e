"""What are the jobs of a command line, and how far is each? The plan, and the index of a sweep's folder.

Job n of a sweep has the folder ROOT/n, where `job.json` says how it ended. `index.json` and `index.md` in ROOT list the
jobs with their overrides, status and records; they are made before the first job and again as each one ends.
"""

import json
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from experiments.config import first_choices
from experiments.hold import claim_dir
from experiments.records import STATUS, find_records, read_record, write_whole

INDEX, PAGE = "index.json", "index.md"
PENDING, RUNNING, OK, FAILED, TIMEOUT, UNFINISHED = "pending", "running", "ok", "failed", "timeout", "unfinished"
PATHS = ("path", "model.path", "model.tokenizer", "benchmark.source.path")
FREE = ("resume", "overwrite", "output_dir", "tracking")  # words in which a resumption may differ


@dataclass(frozen=True)
class Plan:
    """A command line, understood. words: with the folder spelt out, so that every process has the same one."""

    words: list[str]
    jobs: list[list[str]]  # the overrides of each
    root: Path
    launcher: str
    swept: bool
    dry_run: bool
    resume: bool
    overwrite: bool


def plan_of(words: list[str]) -> Plan:
    """Hydra must be initialised. Raises ValueError for a resumption that does not say of what."""
    overrides = [word for word in words if not word.startswith("-")]
    config = compose("config", first_choices(overrides), return_hydra_config=True)
    named = any(word.startswith("output_dir=") for word in overrides)
    if config.resume and not named:
        raise ValueError("resume=true continues a folder; name it: output_dir=FOLDER")
    swept = bool({"-m", "--multirun"} & {*words}) or config.hydra.mode == RunMode.MULTIRUN
    spelt = words if named else [*words, f"output_dir={config.output_dir}"]
    jobs = jobs_of(overrides) if swept else [overrides]
    launcher = str(config.hydra.launcher._target_) if swept else "none"
    if swept:
        check_launcher(jobs, [word for word in overrides if word.startswith("hydra")], launcher)
    return Plan(
        spelt, jobs, Path(config.output_dir), launcher, swept, config.dry_run, config.resume, config.overwrite
    )  # fmt: skip


def jobs_of(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job, as Hydra's own sweeper multiplies them out."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return BasicSweeper.split_arguments([x for x in parsed if not x.is_hydra_override()], None)[0]


def check_launcher(jobs: list[list[str]], hydra_words: list[str], launcher: str) -> None:
    """Raises ValueError where an experiment file of a sweep over several asks for another launcher than is in force."""
    for word in sorted({word for words in jobs for word in words if word.startswith("experiment=")}):
        asked = compose("config", [word, *hydra_words], return_hydra_config=True).hydra.launcher._target_
        if asked != launcher:
            raise ValueError(
                f"{word} asks for {asked}, but a sweep over experiments has one launcher, {launcher}; "
                "name it on the command line: hydra/launcher=NAME"
            )


def check_paths(jobs: list[list[str]]) -> None:
    """Raises ValueError for a local path that is not there, before the first job starts."""
    for number, words in enumerate(jobs):
        for word in words:
            key, _, value = word.partition("=")
            value = value.strip("'\"")
            local = key == "path" or value.startswith(("/", "./", "../", "~"))
            if key in PATHS and value not in ("", "null") and local and not Path(value).expanduser().exists():
                raise ValueError(
                    f"job {number}: {key}={value} does not exist; quote a value that holds a comma: \"{key}='a,b'\""
                )


def listing(plan: Plan) -> str:
    """What dry_run prints."""
    lines = [f"{len(plan.jobs)} job{'s' if len(plan.jobs) > 1 else ''} in {plan.root}, launcher {plan.launcher}"]
    return "\n".join(lines + [f"{number}: {' '.join(words)}" for number, words in enumerate(plan.jobs)])


def start(plan: Plan) -> None:
    """Make sure of the folder; of a sweep also take it and write its index.

    Raises ValueError if it cannot be written, is taken, or holds another sweep.
    """
    try:
        plan.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=plan.root) as file:
            file.write(bytes(2**16))
    except OSError as error:
        raise ValueError(f"cannot write to {plan.root}: {error.strerror}; choose another output_dir") from None
    if not plan.swept:
        return
    claim_dir(plan.root, plan.resume, plan.overwrite)
    if plan.resume and (plan.root / INDEX).exists():
        hold_equal(json.loads((plan.root / INDEX).read_text())["jobs"], plan)
    jobs = [{"job": number, "overrides": kept(words)} for number, words in enumerate(plan.jobs)]
    write_whole(plan.root / INDEX, json.dumps({"launcher": plan.launcher, "jobs": jobs}))
    refresh(plan.root)


def kept(words: list[str]) -> list[str]:
    """The overrides that tell jobs apart and make their results."""
    return [word for word in words if word.split("=")[0].split(".")[0].lstrip("+~") not in FREE]


def hold_equal(before: list[dict[str, Any]], plan: Plan) -> None:
    """Raises ValueError at the first job that is another one than in the index; more jobs may follow."""
    for one, words in zip(before, [*map(kept, plan.jobs), *[[]] * len(before)], strict=False):
        if one["overrides"] != words:
            lost, new = (
                [x for x in a if x not in b] for a, b in ((one["overrides"], words), (words, one["overrides"]))
            )
            raise ValueError(
                f"job {one['job']} of {plan.root} had {' '.join(lost) or 'nothing more'}, now it has "
                f"{' '.join(new) or 'nothing more'}; resume with the same overrides, or choose another output_dir"
            )


def mark(folder: Path, status: str, error: str | None = None) -> None:
    """Say how far a job is."""
    content = {"status": status, "error": error, "host": socket.gethostname(), "pid": os.getpid()}
    write_whole(folder / STATUS, json.dumps(content) + "\n")


def state(root: Path, job: dict[str, Any], ended: bool) -> dict[str, Any]:
    """A job of the index as its folder has it now. ended: the sweep is over, so that nothing can be running."""
    folder, status, error = root / str(job["job"]), PENDING, None
    if (folder / STATUS).exists():
        said = json.loads((folder / STATUS).read_text())
        status, error = said["status"], said["error"]
    if ended and status in (PENDING, RUNNING):
        status, error = UNFINISHED, "its process ended without a word; resume=true goes on"
    cells = []
    for place in find_records(folder):
        record = read_record(place)
        cells.append({
            "cell": record.cell_id, "status": record.status, "error": record.error,
            "record": str(place.relative_to(root)),
        })  # fmt: skip
    return {"job": job["job"], "status": status, "error": error, "overrides": job["overrides"], "cells": cells}


def refresh(root: Path, ended: bool = False) -> list[dict[str, Any]]:
    """Write both index files anew from the folders; returns the jobs."""
    index = json.loads((root / INDEX).read_text())
    index["jobs"] = [state(root, job, ended) for job in index["jobs"]]
    write_whole(root / INDEX, json.dumps(index, indent=1) + "\n")
    lines = [
        f"Sweep of {len(index['jobs'])} jobs, launcher `{index['launcher']}`.", "",
        "| job | status | overrides | records |", "|---|---|---|---|",
    ]  # fmt: skip
    for job in index["jobs"]:
        cells = "<br>".join(f"[{c['cell']}]({c['record']}) {c['status']}" for c in job["cells"])
        why = f": {job['error']}" if job["error"] else ""
        row = [str(job["job"]), job["status"] + why, f"`{' '.join(job['overrides'])}`", cells]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |")
    write_whole(root / PAGE, "\n".join(lines) + "\n")
    return list(index["jobs"])
