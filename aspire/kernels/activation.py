"""How do the two halves of the gated MLP's first product become the input of its second?

Contract of `silu_mul`. gate_up [T, 2I], gate first, last dimension contiguous -> silu(gate) * up, [T, I], new and
contiguous, in the same dtype. The kernel computes in fp32 and rounds once; the twin rounds silu(gate) as well.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    """One program for BLOCK columns of a token."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    at = gate_up_ptr + row * stride + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + i, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * width and gate_up.stride(1) == 1
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_2(width))
    if tokens:
        _silu_mul_kernel[(tokens, -(-width // block))](gate_up, out, gate_up.stride(0), width, BLOCK=block)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; see the contract at the head of this file."""
    return silu_mul_triton(gate_up) if wanted(gate_up) else silu_mul_torch(gate_up)


CASES = [(t, i) for t in (1, 17, 63) for i in (64, 257, 1025)]  # (T, I)
