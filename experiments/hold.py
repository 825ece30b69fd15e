"""Who may write into a folder? The process that has its claim file locked; the lock ends with the process."""

import fcntl
import os
import socket
from pathlib import Path

from experiments.records import CLAIM, JOURNAL, PASSES, RECORD, REQUESTS, STATUS, find_records

_HELD: dict[Path, int] = {}  # claim file -> descriptor, open as long as this process lives


def claim_dir(path: Path | str, resume: bool = False, overwrite: bool = False) -> Path:
    """Take an output folder for this process, or refuse; of several that ask at once exactly one gets it.

    resume keeps what is there; overwrite deletes the records below it, so that old cells cannot mix with new ones.
    What Hydra and a sweep put into a fresh output folder (.hydra, *.log, job.json) does not count as results.
    Raises ValueError when the folder has results or an owner, or when both flags are set.
    """
    path = Path(path)
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other; set one of them")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another output folder")
    path.mkdir(parents=True, exist_ok=True)
    taken = any(entry.name not in (".hydra", STATUS) and entry.suffix != ".log" for entry in path.iterdir())
    try:
        # The marker decides, not the emptiness seen above: creation with O_EXCL is atomic, a listing is not.
        handle = None if taken else os.open(path / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        taken, handle = True, None
    if taken and not (resume or overwrite):
        raise ValueError(
            f"{path} already has results or another run; set resume=true to continue it, "
            "overwrite=true to replace its records, or choose another folder"
        )
    if handle is not None:
        with os.fdopen(handle, "w") as file:
            file.write(f"{socket.gethostname()} {os.getpid()}\n")
    if (path / CLAIM).exists():
        hold(path / CLAIM)
    if overwrite:
        for folder in find_records(path):
            for name in (RECORD, REQUESTS, PASSES):
                (folder / name).unlink(missing_ok=True)
        for journal in list(path.rglob(JOURNAL)):
            journal.unlink()
    return path


def hold(claim: Path) -> None:
    """Lock a claim file that exists. Raises ValueError if another process has it; a second call changes nothing."""
    claim = claim.resolve()
    if claim in _HELD:
        if os.path.exists(claim) and os.path.samestat(os.fstat(_HELD[claim]), claim.stat()):
            return
        os.close(_HELD.pop(claim))  # the folder was deleted and made again
    handle = os.open(claim, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"{claim.parent} is being written by another run; wait for it, or end it") from None
    _HELD[claim] = handle
