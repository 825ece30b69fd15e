"""Is Triton here? The one import of it, so that a machine without it still runs the torch twins.

A kernel runs on CUDA tensors, and on CPU tensors where TRITON_INTERPRET=1 was set before the first import (fp32 only:
the interpreter computes bf16 wrongly). `wanted(tensor)` is the dispatch rule of every operation.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

triton: Any
tl: Any
try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # CPU builds of torch come without it
    triton = None
    tl = SimpleNamespace(constexpr=object)

    def jit(function: Any) -> Any:
        return function


def wanted(tensor: Tensor) -> bool:
    """Whether an operation on this tensor goes through its Triton kernel; the twin serves everything else."""
    return tensor.is_cuda and triton is not None


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()
