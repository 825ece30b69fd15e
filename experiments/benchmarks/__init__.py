"""Which prompts does a run ask, and which answers are right? Two sources need no download, the others come from the
Hugging Face Hub or from local files.
"""

from .arithmetic import Arithmetic, Problem, grade
from .hub import HubBenchmark
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

__all__ = [
    "Arithmetic",
    "HubBenchmark",
    "Item",
    "Problem",
    "PyStdlib",
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
