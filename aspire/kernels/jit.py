"""Is Triton here? The one import of it, so that a machine without it still runs the torch twins.

A kernel runs on CUDA tensors, and on CPU tensors where TRITON_INTERPRET=1 was set before the first import (fp32 only:
the interpreter computes bf16 wrongly). `wanted(tensor)` is the dispatch rule of every operation.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor


def unchanged(function: Any) -> Any:
    """What stands for `triton.jit` where there is no Triton: the kernel is never called."""
    return function


triton: Any
tl: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:  # CPU builds of torch come without it
    triton, tl = None, SimpleNamespace(constexpr=object)
jit: Any = unchanged if triton is None else triton.jit


def wanted(tensor: Tensor) -> bool:
    """Whether an operation on this tensor goes through its Triton kernel; the twin serves everything else."""
    return tensor.is_cuda and triton is not None


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
