"""Where else do records go? To Weights & Biases, if asked: a sink fed from finished records, one W&B run a record.

A process of its own sends each record, with a time limit, so that nothing of the tracker stays in this one and no
failure, prompt or wait of it can harm a cell: results live on disk. `mode: disabled` starts nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.records import PASSES, RECORD, REQUESTS, Record, RequestLine, read_record, read_requests

MODES = ("online", "offline", "disabled")
HIDDEN = "(hidden)"
SECRET_KEY = re.compile(
    r"(^|[_\-.])(token|secrets?|passw(or)?d|passphrase|credentials?|auth|bearer|apikey|(api|access|private)[_-]?key)$",
    re.I,
)
SECRET_VALUE = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|xox[abprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|wandb_v\d\w{16,}"
    r"|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+)|://[^/\s:@]+:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY"
)
KEY = re.compile(r"^[0-9a-f]{40}$")  # a W&B key, and a commit
COMMITS = ("revision", "commit", "sha")


def track(folder: Path, tracking: dict[str, Any], group: str) -> bool:
    """Send a cell's folder; a failure is a warning. Returns whether it was sent (false too where none was asked)."""
    if tracking["mode"] == "disabled":
        return False
    asked = json.dumps(tracking | {"group": tracking["group"] or group})
    command = [sys.executable, "-m", "experiments.tracking", str(folder), asked]
    # The environment may not turn an offline run into an online one.
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_MODE"} | {"WANDB_SILENT": "true"}
    try:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return _warn(folder, str(error))
    try:
        said, _ = child.communicate(timeout=tracking["timeout_s"])
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the tracker's own helper too
        child.communicate()
        return _warn(folder, f"no answer in {tracking['timeout_s']} s (tracking.timeout_s)")
    return child.returncode == 0 or _warn(folder, said.strip().splitlines()[-1] if said.strip() else "it died")


def _warn(folder: Path, why: str) -> bool:
    warnings.warn(
        f"tracking of {folder} failed, the record on disk is complete; send it with: "
        f"python -m experiments.upload {folder}: {why}",
        stacklevel=3,
    )
    return False


def send(folder: Path, tracking: dict[str, Any]) -> None:
    """One new W&B run of a cell's folder, opened and closed here. Raises what wandb raises."""
    import wandb

    record = read_record(folder)
    lines = read_requests(folder) if (folder / REQUESTS).exists() else []
    settings = wandb.Settings(init_timeout=tracking["timeout_s"], console="off", disable_git=True, x_disable_stats=True)
    run = wandb.init(
        project=tracking["project"], entity=tracking["entity"], group=tracking["group"], name=record.cell_id,
        mode=tracking["mode"], config=hide(record.config), dir=str(folder), settings=settings, reinit="finish_previous",
    )  # fmt: skip
    run.summary.update(numbers(record) | {"status": record.status, "error": record.error})
    run.log({"rounds": wandb.Table(columns=["drafted", "accepted", "rounds"], data=rounds(lines))})
    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", f"record-{record.cell_id}")[:128], type="record")
    for name in (RECORD, REQUESTS, PASSES):
        if (folder / name).exists():
            artifact.add_file(str(folder / name))
    run.log_artifact(artifact)
    run.finish(exit_code=0 if record.status == "ok" else 1)


def numbers(record: Record) -> dict[str, float]:
    """What is plotted: every number of the tokens, timing and metrics sections."""
    flat: dict[str, float] = {}
    for section in ("tokens", "timing", "metrics"):
        for key, value in getattr(record, section).model_dump().items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                flat[f"{section}/{key}"] = value
    return flat


def rounds(lines: list[RequestLine]) -> list[list[int]]:
    """[drafted, accepted, how many rounds], over all requests."""
    counts = Counter(pair for line in lines for pair in line.rounds)
    return [[drafted, accepted, count] for (drafted, accepted), count in sorted(counts.items())]


def hide(tree: Any, key: str = "") -> Any:
    """A config without what is, or looks like, a secret."""
    if isinstance(tree, dict):
        return {name: hide(value, str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [hide(value, key) for value in tree]
    if SECRET_KEY.search(key) and tree is not None:
        return HIDDEN
    if isinstance(tree, str):
        commit = any(word in key.lower() for word in COMMITS)
        if SECRET_VALUE.search(tree) or (KEY.match(tree) and not commit):
            return HIDDEN
    return tree


def main(words: list[str]) -> None:
    """The process that sends: a folder, and how, as JSON. Its last line is the reason of a failure."""
    try:
        send(Path(words[0]), json.loads(words[1]))
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(sys.argv[1:])
