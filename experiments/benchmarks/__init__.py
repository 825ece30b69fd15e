"""Which prompts does a run ask, and which answers are right? Three sources need no download, the others come from the
Hugging Face Hub or from local files.
"""

from typing import TYPE_CHECKING, Any

from .arithmetic import Arithmetic, Problem, grade
from .item import (
    Item,
    answer_part,
    count_tokens,
    cut_end,
    cut_middle,
    data_hash,
    encode_chat,
    fit_document,
    request_seed,
)
from .pystdlib import PyStdlib
from .shapes import Shapes

if TYPE_CHECKING:
    from .hub import HubBenchmark

__all__ = [
    "Arithmetic",
    "HubBenchmark",
    "Item",
    "Problem",
    "PyStdlib",
    "Shapes",
    "answer_part",
    "count_tokens",
    "cut_end",
    "cut_middle",
    "data_hash",
    "encode_chat",
    "fit_document",
    "grade",
    "request_seed",
]


def __getattr__(name: str) -> Any:
    """HubBenchmark when it is asked for: only it needs the data set library."""
    if name == "HubBenchmark":
        from .hub import HubBenchmark

        return HubBenchmark
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
