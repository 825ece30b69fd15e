"""How do two parts of a step run at the same time? The smaller one on a second stream, in a captured pass as well.

Work of `beside` may write only what nothing reads before `rejoin`, which has to follow in the same step: memory that
one stream frees is not safe from the other in between.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def _second_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What is launched in here runs beside what is launched after it; on a CPU before it."""
    if device.type != "cuda":
        yield
        return
    second = _second_stream(device)
    second.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(second):
        yield


def rejoin(device: torch.device) -> None:
    """Whatever is launched from here on waits for what runs beside."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_second_stream(device))
