"""How do projected heads become rotated queries and cached keys?

Contract. `Heads` holds the raw projection of one layer. `rotate_heads` gives q [T, Hq, D], k and v [T, Hkv, D]: q and k
are RMS-normed per head where the model has weights for it, then rotated in the half-split layout of Hugging Face.
`store_heads` gives q and writes k and v of token t into k_cache[entries[t]] and v_cache[entries[t]], whole; entries
[T] int64 are distinct where they are >= 0, and no other entry of the caches changes. An entry < 0 marks a padding
token: nothing is cached for it, its query is finite and of no use. Caches are [M, Hkv, D] with any stride of entry and
head and a contiguous last dimension. q of the kernel is new and contiguous; that of the twin may be a view.

The kernel norms and rotates in fp32 and rounds once. The twin rounds after each operation, cos and sin included.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted
from aspire.kernels.kv import write_kv


@dataclass(frozen=True)
class Angles:
    """By which angle each token's heads turn, made once a pass: cos and sin fp32 [T, D/2], contiguous."""

    cos: Tensor
    sin: Tensor
    dtype: torch.dtype  # of the model

    @cached_property
    def wide(self) -> tuple[Tensor, Tensor]:
        """cos and signed sin for the twin, each [T, 1, D] in the model's dtype.

        The first half of sin is negated here, once a pass, so that `rotate` needs no negation a layer.
        """
        cos, sin = self.cos, self.sin
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.dtype),
        )


@dataclass(frozen=True)
class Heads:
    """The projection of one layer, as it comes: qkv [T, (Hq + 2 Hkv) * D]; q_norm and k_norm [D], or both None."""

    qkv: Tensor
    angles: Angles
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    heads: int
    kv_heads: int

    @property
    def dim(self) -> int:
        return self.qkv.shape[1] // (self.heads + 2 * self.kv_heads)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, H, D] in the half-split layout; cos and sin come from `Angles.wide`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_heads(h: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q [T, Hq, D] and k [T, Hkv, D], and v [T, Hkv, D]: views, not contiguous."""
    hq, hkv = h.heads, h.kv_heads
    qkv = h.qkv.view(h.qkv.shape[0], hq + 2 * hkv, h.dim)
    qk, v = qkv.split((hq + hkv, hkv), 1)
    if h.q_norm is not None and h.k_norm is not None:
        q = F.rms_norm(qk[:, :hq], h.q_norm.shape, h.q_norm, h.eps)
        k = F.rms_norm(qk[:, hq:], h.k_norm.shape, h.k_norm, h.eps)
        qk = torch.cat((q, k), 1)
    q, k = rotate(qk, *h.angles.wide).split((hq, hkv), 1)
    return q, k, v


def store_heads_torch(h: Heads, k_cache: Tensor, v_cache: Tensor, entries: Tensor) -> Tensor:
    """The twin; synchronises with the device, since it filters the padding."""
    q, k, v = rotate_heads(h)
    write_kv(k_cache, v_cache, entries, k, v)
    return q


@jit
def _store_heads_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, entries_ptr, q_ptr, k_ptr, v_ptr,
    qkv_stride, k_entry_stride, k_head_stride, v_entry_stride, v_head_stride, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for HEADS heads of a token, in the order q, k, v; each half of a head is a tile [HEADS, BLOCK]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    is_q = head < HQ
    is_v = head >= HQ + HKV
    mask = (head < HQ + 2 * HKV)[:, None] & inside[None, :]
    at = qkv_ptr + token * qkv_stride + head[:, None] * (2 * HALF) + d[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    x, y = low, high
    if NORM:
        q_low = tl.load(q_norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + HALF + d, mask=inside, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + d, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / (2 * HALF) + eps)[:, None]
        x = x * scale * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        y = y * scale * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
    cos = tl.load(cos_ptr + token * HALF + d, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + d, mask=inside, other=0.0)[None, :]
    turned_low = x * cos - y * sin
    turned_high = y * cos + x * sin

    q_at = q_ptr + (token * HQ + head[:, None]) * (2 * HALF) + d[None, :]
    q_mask = mask & is_q[:, None]
    tl.store(q_at, turned_low.to(q_ptr.dtype.element_ty), mask=q_mask)
    tl.store(q_at + HALF, turned_high.to(q_ptr.dtype.element_ty), mask=q_mask)

    entry = tl.load(entries_ptr + token)
    cached = mask & (entry >= 0)
    k_head = (head - HQ).to(tl.int64)[:, None]
    k_at = k_ptr + entry * k_entry_stride + k_head * k_head_stride + d[None, :]
    k_mask = cached & (head >= HQ)[:, None] & (head < HQ + HKV)[:, None]
    tl.store(k_at, turned_low.to(k_ptr.dtype.element_ty), mask=k_mask)
    tl.store(k_at + HALF, turned_high.to(k_ptr.dtype.element_ty), mask=k_mask)
    v_head = (head - HQ - HKV).to(tl.int64)[:, None]
    v_at = v_ptr + entry * v_entry_stride + v_head * v_head_stride + d[None, :]
    v_mask = cached & is_v[:, None]
    tl.store(v_at, low.to(v_ptr.dtype.element_ty), mask=v_mask)
    tl.store(v_at + HALF, high.to(v_ptr.dtype.element_ty), mask=v_mask)


def store_heads_triton(h: Heads, k_cache: Tensor, v_cache: Tensor, entries: Tensor) -> Tensor:
    tokens, dim, total = h.qkv.shape[0], h.dim, h.heads + 2 * h.kv_heads
    angles = h.angles
    assert h.qkv.shape[1] == total * dim and dim % 2 == 0 and h.qkv.stride(1) == 1
    assert entries.shape == (tokens,) and entries.dtype == torch.int64 and entries.is_contiguous()
    for table in (angles.cos, angles.sin):
        assert table.shape == (tokens, dim // 2) and table.dtype == torch.float32 and table.is_contiguous()
    for cache in (k_cache, v_cache):
        assert cache.shape[1:] == (h.kv_heads, dim) and cache.stride(2) == 1
    assert (h.q_norm is None) == (h.k_norm is None)
    q = torch.empty((tokens, h.heads, dim), dtype=h.qkv.dtype, device=h.qkv.device)
    heads = min(8, power_of_2(total))
    if tokens:
        _store_heads_kernel[(tokens, -(-total // heads))](
            h.qkv, angles.cos, angles.sin,
            h.qkv if h.q_norm is None else h.q_norm, h.qkv if h.k_norm is None else h.k_norm,
            entries, q, k_cache, v_cache,
            h.qkv.stride(0), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1), h.eps,
            HQ=h.heads, HKV=h.kv_heads, HALF=dim // 2, NORM=h.q_norm is not None,
            HEADS=heads, BLOCK=power_of_2(dim // 2),
        )  # fmt: skip
    return q


def store_heads(h: Heads, k_cache: Tensor, v_cache: Tensor, entries: Tensor) -> Tensor:
    """Queries [T, Hq, D]; k and v go into the caches. See the contract at the head of this file."""
    return (store_heads_triton if wanted(h.qkv) else store_heads_torch)(h, k_cache, v_cache, entries)


CASES = [  # (T, Hq, Hkv, D, with norms)
    (1, 2, 2, 8, False),
    (1, 6, 2, 64, True),
    (17, 6, 2, 8, True),
    (17, 3, 3, 128, False),
    (17, 4, 2, 96, True),  # halves that are no power of two
    (63, 2, 1, 64, True),
    (63, 9, 3, 8, False),
]
