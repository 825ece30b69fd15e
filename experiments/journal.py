"""Which requests of an interrupted cell are finished? A journal beside the record, a line for each as it ends.

The first line is the cell's config; each other line a Finished. Only runs that drain keep one: their requests end at
their own ends, while a timed window of replays is one unit and is measured again. The journal goes when the record is
complete. A line is flushed, so a killed process loses what was running and nothing else; a line that a kill has torn
is dropped.
"""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experiments.records import JOURNAL, RequestLine, Section


class Finished(Section):
    """A request that came to its end. repeat: its window, from 0; decode_s: seconds while it held a slot.

    window_s: seconds of the timed window at its end, over all processes that ran the window.
    """

    repeat: int
    decode_s: float
    window_s: float
    request: RequestLine


def begin(folder: Path, config: dict[str, Any]) -> Path:
    """The journal of a cell, with its config on the first line; one that exists stays, without a torn last line."""
    path = folder / JOURNAL
    if path.exists() and _whole(path):
        os.truncate(path, len(b"".join(_whole(path))))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"config": config}) + "\n", encoding="utf-8")
    return path


def append(path: Path, finished: Finished) -> None:
    """Add a line in one write. It survives the end of the process, not that of the machine."""
    with path.open("ab", buffering=0) as file:
        file.write(finished.model_dump_json().encode() + b"\n")


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config that the journal's requests ran with; None without a journal."""
    lines = _whole(folder / JOURNAL)
    return json.loads(lines[0])["config"] if lines else None


def read_finished(folder: Path) -> list[Finished]:
    """The finished requests in the order they ended. Raises ValueError naming the line at fault."""
    found, lines = [], _whole(folder / JOURNAL)[1:]
    for number, line in enumerate(lines, start=2):
        try:
            found.append(Finished.model_validate_json(line))
        except ValidationError as error:
            raise ValueError(
                f"{folder / JOURNAL}:{number} is not a finished request; delete the file to start anew: {error}"
            ) from error
    return found


def _whole(path: Path) -> list[bytes]:
    """The lines that end: what a kill has torn has no newline."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
