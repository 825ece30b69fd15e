"""Who is writing into a folder? The process that has its claim file locked; the lock ends with the process."""

import fcntl
import os
from pathlib import Path

_HELD: dict[Path, int] = {}  # claim file -> descriptor, open as long as this process lives


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
