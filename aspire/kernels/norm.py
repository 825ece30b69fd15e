"""How is a row of hidden states normed, and how does a layer's result join the residual on the way?

Contract. `rms_norm(x [T, E], weight [E], eps)` -> [T, E]; `add_rms_norm(x, delta [T, E], weight, eps)` gives the sum
and the sum normed, both [T, E] and new; x and delta are left alone. Output dtype = input dtype. Rows may be strided,
their last dimension is contiguous. The sum is rounded to x.dtype before it is normed; the mean square is formed in
fp32 whatever the dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_torch(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight, eps)


@jit
def _rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr,
    x_stride, delta_stride, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row; sum and out are contiguous, delta and sum are touched only with ADD."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < width
    x = tl.load(x_ptr + row * x_stride + e, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row * delta_stride + e, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + e, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + e, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(sum, normed); without delta the sum is x itself."""
    tokens, width = x.shape
    assert x.stride(1) == 1 and weight.shape == (width,) and weight.is_contiguous()
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype and delta.stride(1) == 1)
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    other, total = (x, x) if delta is None else (delta, torch.empty_like(out))
    if tokens:
        block = power_of_2(width)
        _rms_norm_kernel[(tokens,)](
            x, other, weight, total, out, x.stride(0), other.stride(0), width, eps,
            ADD=delta is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return total, out


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)[1]


def add_rms_norm_triton(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch(x, delta, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; see the contract at the head of this file."""
    return rms_norm_triton(x, weight, eps) if wanted(x) else rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, the same normed); see the contract at the head of this file."""
    return (add_rms_norm_triton if wanted(x) else add_rms_norm_torch)(x, delta, weight, eps)


CASES = [(t, e) for t in (1, 17, 63) for e in (64, 257)]  # (T, E)
