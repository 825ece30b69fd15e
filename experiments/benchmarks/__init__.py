"""Which prompts does a run ask, and which answers are right? Three sources need no download, the others read files of
the Hugging Face Hub or of this machine.
"""

from typing import TYPE_CHECKING, Any

from .arithmetic import Arithmetic, Problem
from .item import (
    Item,
    count_tokens,
    cut_end,
    cut_middle,
    data_hash,
    encode_chat,
    fit_document,
    request_seed,
    template_hash,
)
from .pystdlib import PyStdlib
from .shapes import Shapes

if TYPE_CHECKING:
    from .files import FileBenchmark

__all__ = [
    "Arithmetic",
    "FileBenchmark",
    "Item",
    "Problem",
    "PyStdlib",
    "Shapes",
    "count_tokens",
    "cut_end",
    "cut_middle",
    "data_hash",
    "encode_chat",
    "fit_document",
    "request_seed",
    "template_hash",
]


def __getattr__(name: str) -> Any:
    """FileBenchmark when it is asked for: only it needs the data set library."""
    if name == "FileBenchmark":
        from .files import FileBenchmark

        return FileBenchmark
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
