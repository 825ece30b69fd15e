"""How are few rows multiplied at the speed at which the weights can be read, with the small kernels around swallowed?

Contract. x [M, K], M <= `MOST_ROWS`, weight [N, K] contiguous, all of one dtype (bf16; fp32 in tests), sums in fp32:
`norm_linear(x, norm_weight [K], eps, weight, bias [N] | None)` -> rms_norm(x) @ weight.T + bias, [M, N];
`norm_gated(x, norm_weight, eps, gate_up [2I, K])` -> silu(gate) * up of rms_norm(x) @ gate_up.T, gate first, [M, I];
`linear_add(x, weight, residual [M, N])` -> residual + x @ weight.T, rounded once, [M, N].
The result is new and contiguous, in x.dtype; nothing else is written. x and residual may be strided, their last
dimension is contiguous. The norm rounds x * norm_weight and scales the sum by 1 / rms at the end, where the twin rounds
the normed row: one rounding to the dtype in both.

All rows make one tile, and a program reads its rows of the weight once, from end to end; x comes from L2. From 32 rows
on cuBLAS with the small kernels around it is as fast or faster on an H200, see results/LOG.md.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.kernels.activation import silu_mul_torch
from aspire.kernels.jit import jit, power_of_2, tl, wanted
from aspire.kernels.norm import rms_norm_torch

MOST_ROWS = 16  # one tile of a tensor core


def norm_linear_torch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(rms_norm_torch(x, norm_weight, eps), weight, bias)


def norm_gated_torch(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    return silu_mul_torch(F.linear(rms_norm_torch(x, norm_weight, eps), gate_up))


def linear_add_torch(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return (residual.float() + F.linear(x.float(), weight.float())).to(x.dtype)


@dataclass(frozen=True)
class Tile:
    """How a product is cut: columns and K of a tile, stages of the pipeline, warps.

    split: parts of a tile's K, which the warps share out; 1 = they share rows and columns, and repeat some work.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    split: int = 1


def tile_of(kind: str, k: int, itemsize: int) -> Tile:
    """What ran best for the layers of Qwen3-1.7B and 8B on an H200, cut down for small models and for fp32."""
    deepest = max(16, power_of_2(k)) if k < 512 else 512 * 2 // itemsize
    if kind == "norm_gated":
        return Tile(64, min(256 // itemsize, deepest), 4, 4)
    return Tile(16, deepest, 3 if kind == "norm_linear" else 4, 4, 4 if deepest >= 64 else 1)


@jit
def _skinny_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr,
    rows, n_size, k_size, x_stride, residual_stride, eps,
    NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    WHOLE_K: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_N columns of all rows; with GATED for those of gate and of up. norm_ptr is read only with
    NORM, bias_ptr with BIAS, residual_ptr with ADD. Columns past the last read the last row of the weight instead.
    Operands are [.., rows, K] and [.., K, columns], where SPLIT > 1 puts the parts of K in front.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(column, n_size - 1).to(tl.int64)
    m = tl.arange(0, BLOCK_M).to(tl.int64)
    if SPLIT > 1:
        part = tl.arange(0, SPLIT)[:, None] * (BLOCK_K // SPLIT) + tl.arange(0, BLOCK_K // SPLIT)[None, :]
        k, k_down = part[:, None, :], part[:, :, None]
        m_down, n_across = m[None, :, None], n[None, None, :]
        total = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((SPLIT, BLOCK_M, BLOCK_K // SPLIT), tl.float32)
    else:
        k, k_down = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_K)[:, None]
        m_down, n_across = m[:, None], n[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    up = total
    x_at = x_ptr + m_down * x_stride + k
    weight_at = weight_ptr + n_across * k_size + k_down
    up_at = weight_ptr + (n_across + n_size) * k_size + k_down
    if NORM:  # loaded a step before it is used: too narrow for the pipeline of the other loads
        norm = tl.load(norm_ptr + k, mask=k < k_size, other=0.0)
    for start in range(0, k_size, BLOCK_K):
        if WHOLE_K:
            weight = tl.load(weight_at + start)
            x = tl.load(x_at + start, mask=m_down < rows, other=0.0)
        else:
            inside = start + k_down < k_size
            weight = tl.load(weight_at + start, mask=inside, other=0.0)
            x = tl.load(x_at + start, mask=(m_down < rows) & (start + k < k_size), other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * norm.to(tl.float32)).to(weight.dtype)
            after = start + BLOCK_K + k
            norm = tl.load(norm_ptr + after, mask=after < k_size, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        if GATED:
            if WHOLE_K:
                weight = tl.load(up_at + start)
            else:
                weight = tl.load(up_at + start, mask=inside, other=0.0)
            up = tl.dot(x, weight, up, input_precision="ieee")
    if SPLIT > 1:
        total = tl.sum(total, 0)
        if GATED:
            up = tl.sum(up, 0)
        if NORM:
            squares = tl.sum(squares, 2)
            scale = tl.rsqrt(tl.sum(squares, 0) / k_size + eps)[:, None]
    elif NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / k_size + eps)[:, None]
    real = (m < rows)[:, None]
    stored = real & (column < n_size)[None, :]
    if NORM:
        total *= scale
    if GATED:
        up *= scale
    if BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * up
    if ADD:
        at = residual_ptr + m[:, None] * residual_stride + column[None, :]
        total += tl.load(at, mask=stored, other=0.0).to(tl.float32)
    out_at = out_ptr + m[:, None] * n_size + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=stored)


def _launch(
    kind: str, x: Tensor, weight: Tensor, norm_weight: Tensor | None, eps: float, bias: Tensor | None,
    residual: Tensor | None, tile: Tile | None,
) -> Tensor:  # fmt: skip
    """The product of `kind`; what it does not use is None."""
    gated = kind == "norm_gated"
    (m, k), n = x.shape, weight.shape[0] // (2 if gated else 1)
    assert m <= MOST_ROWS and weight.shape == (2 * n if gated else n, k) and weight.dtype == x.dtype
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert norm_weight is None or (norm_weight.shape == (k,) and norm_weight.is_contiguous())
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous())
    assert residual is None or (residual.shape == (m, n) and residual.dtype == x.dtype and residual.stride(1) == 1)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = tile or tile_of(kind, k, x.element_size())
    _skinny_kernel[(-(-n // tile.block_n),)](
        x, x if norm_weight is None else norm_weight, weight, x if bias is None else bias,
        x if residual is None else residual, out,
        m, n, k, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        NORM=norm_weight is not None, GATED=gated, BIAS=bias is not None, ADD=residual is not None,
        WHOLE_K=k % tile.block_k == 0, SPLIT=tile.split, BLOCK_M=MOST_ROWS, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def norm_linear_triton(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    return _launch("norm_linear", x, weight, norm_weight, eps, bias, None, tile)


def norm_gated_triton(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor, tile: Tile | None = None) -> Tensor:
    assert gate_up.shape[0] % 2 == 0
    return _launch("norm_gated", x, gate_up, norm_weight, eps, None, None, tile)


def linear_add_triton(x: Tensor, weight: Tensor, residual: Tensor, tile: Tile | None = None) -> Tensor:
    return _launch("linear_add", x, weight, None, 0.0, None, residual, tile)


def serves(x: Tensor) -> bool:
    """Whether these kernels are the way to multiply x: few rows, bf16, CUDA. Decided by shape, so capturable.

    Not for fp32: there a row's result must not depend on how many rows there are, and cuBLAS serves both counts.
    """
    return wanted(x) and x.dtype == torch.bfloat16 and x.shape[0] <= MOST_ROWS


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(rms_norm(x), weight, bias); see the contract at the head of this file."""
    return (norm_linear_triton if wanted(x) else norm_linear_torch)(x, norm_weight, eps, weight, bias)


def norm_gated(x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """silu_mul(linear(rms_norm(x), gate_up)); see the contract at the head of this file."""
    return (norm_gated_triton if wanted(x) else norm_gated_torch)(x, norm_weight, eps, gate_up)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual + linear(x, weight); see the contract at the head of this file."""
    return (linear_add_triton if wanted(x) else linear_add_torch)(x, weight, residual)


# (M, N, K); the last has SmolLM2's odd widths, made small
CASES = [(1, 17, 64), (12, 63, 257), (16, 257, 63), (7, 32, 96), (16, 60, 144)]
