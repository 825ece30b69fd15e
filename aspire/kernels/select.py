"""Which blocks score highest? Top-k per row with its own k, in ascending block order.

Contract of `top_blocks`. scores [S, R, M] fp32, contiguous in the last dimension, the other strides free; take and
limit [R] int64. Of the blocks below limit[r] the take[r] best are written in ascending order to blocks
[S, R, capacity] int64; count [S, R] int64 = min(take, limit, M, capacity), at least 0. Entries past count are
unspecified. Scores at or past limit[r] are not read: they may be uninitialised. +inf is allowed; NaN ranks with the
lowest score, so it is taken only where nothing else is left. Ties go to the lower block in the kernel and either way
in the twin.
"""

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted


def top_blocks(scores: Tensor, take: Tensor, limit: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The best blocks of each row; see the contract at the head of this file."""
    if wanted(scores):
        return top_blocks_triton(scores, take, limit, capacity)
    return top_blocks_torch(scores, take, limit, capacity)


def top_blocks_torch(scores: Tensor, take: Tensor, limit: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The twin: one top-k over the widest row."""
    s, r, m = scores.shape
    index = torch.arange(m, device=scores.device)
    lowest = torch.finfo(scores.dtype).min  # above the -inf of what is hidden
    real = scores.nan_to_num(nan=lowest, posinf=float("inf"), neginf=lowest)
    hidden = real.masked_fill_(index >= limit[:, None], float("-inf"))
    width = min(capacity, m)
    count = torch.minimum(take, limit).clamp(0, width)
    best = hidden.topk(width, dim=-1).indices
    past = torch.arange(width, device=scores.device) >= count[:, None]
    ordered = best.masked_fill(past, m).sort(-1).values
    blocks = torch.zeros(s, r, capacity, dtype=torch.int64, device=scores.device)
    blocks[..., :width] = ordered
    return blocks, count.expand(s, r)


@jit
def _score_of(key):
    """The fp32 number whose bits `key` is, in an integer order that is the order of the numbers."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@jit
def _read(scores, start, inside, n, SIZE: tl.constexpr):
    """The scores at start + inside, -inf past n; a mask would keep the loads of a full chunk from being wide."""
    if start + SIZE <= n:
        x = tl.load(scores + start + inside)
    else:
        x = tl.load(scores + start + inside, mask=start + inside < n, other=float("-inf"))
    return x


@jit
def _tally(x, t1, t2, t3, WIDTH: tl.constexpr):
    """How many of each column of x exceed each threshold, ten bits each.  # [WIDTH] int32"""
    above = (x > t1).to(tl.int32) + ((x > t2).to(tl.int32) << 10) + ((x > t3).to(tl.int32) << 20)
    return tl.sum(above, axis=0)


@jit
def _top_blocks(
    scores, take, limit, blocks, count, rows, m, capacity, stride_s, stride_r, stride_take, stride_limit,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """One scope and row: find the lowest score taken by bisection over the numbers' bits, then write in one pass."""
    row = tl.program_id(0)
    r = row % rows
    n = tl.minimum(tl.load(limit + r * stride_limit), m)
    kept = tl.minimum(tl.minimum(tl.load(take + r * stride_take), n), capacity)
    kept = tl.maximum(kept, 0).to(tl.int32)
    n = n.to(tl.int32)
    tl.store(count + row, kept.to(tl.int64))
    scores += (row // rows).to(tl.int64) * stride_s + r.to(tl.int64) * stride_r
    blocks += row.to(tl.int64) * capacity
    lane = tl.arange(0, CHUNK)
    if kept == n:
        for start in range(0, n, CHUNK):
            ids = start + lane
            tl.store(blocks + ids, ids.to(tl.int64), mask=ids < n)
    elif kept > 0:
        tile = tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        if SINGLE:
            held = _read(scores, 0, tile, n, BLOCK)
        # More than or exactly `kept` scores exceed that of key `lo`, fewer (`above`) that of `hi`. -inf and +inf first.
        lo = tl.full((), -2139095042, tl.int64)
        hi = tl.full((), 2139095040, tl.int64)
        above = tl.full((), 0, tl.int32)
        # Softmax weights lie between 2^-28 and 2^-12; where they do not, this costs one pass.
        p1 = tl.full((), 99 << 23, tl.int64)
        p2 = tl.full((), 107 << 23, tl.int64)
        p3 = tl.full((), 115 << 23, tl.int64)
        while hi - lo > 1:
            t1, t2, t3 = _score_of(p1), _score_of(p2), _score_of(p3)
            if SINGLE:
                tally = _tally(held, t1, t2, t3, WIDTH)
            else:
                tally = tl.zeros((WIDTH,), tl.int32)
                for start in range(0, n, BLOCK):
                    tally += _tally(_read(scores, start, tile, n, BLOCK), t1, t2, t3, WIDTH)
            wide = tally.to(tl.int64)
            total = tl.sum((wide & 1023) + (((wide >> 10) & 1023) << 21) + ((wide >> 20) << 42), axis=0)
            c1 = (total & 0x1FFFFF).to(tl.int32)
            c2 = ((total >> 21) & 0x1FFFFF).to(tl.int32)
            c3 = (total >> 42).to(tl.int32)
            above = tl.where(c1 < kept, c1, tl.where(c2 < kept, c2, tl.where(c3 < kept, c3, above)))
            hi = tl.where(c1 < kept, p1, tl.where(c2 < kept, p2, tl.where(c3 < kept, p3, hi)))
            lo = tl.where(c3 >= kept, p3, tl.where(c2 >= kept, p2, tl.where(c1 >= kept, p1, lo)))
            # Exactly `kept` scores exceed a probe: no tie is needed, and the search is over.
            exact = (c1 == kept) | (c2 == kept) | (c3 == kept)
            hi = tl.where(exact, tl.where(c1 == kept, p1, tl.where(c2 == kept, p2, p3)), hi)
            lo = tl.where(exact, hi - 1, lo)
            above = tl.where(exact, kept, above)
            step = tl.maximum((hi - lo) >> 2, 1)
            p1 = tl.minimum(lo + step, hi)
            p2 = tl.minimum(p1 + step, hi)
            p3 = tl.minimum(p2 + step, hi)
        least = _score_of(hi)
        ties = kept - above
        greater_before = tl.full((), 0, tl.int32)
        equal_before = tl.full((), 0, tl.int32)
        for start in range(0, n, CHUNK):
            ids = start + lane
            x = _read(scores, start, lane, n, CHUNK)
            x = tl.where(x == x, x, float("-inf"))  # NaN would equal no threshold
            greater = x > least
            equal = (x == least) & (ids < n)
            marks = greater.to(tl.int32) + (equal.to(tl.int32) << 16)
            seen = tl.cumsum(marks, axis=0)
            equals = equal_before + (seen >> 16)
            place = greater_before + (seen & 0xFFFF) + tl.minimum(equals, ties) - 1
            tl.store(blocks + place, ids.to(tl.int64), mask=greater | (equal & (equals <= ties)))
            marks = tl.sum(marks, axis=0)
            greater_before += marks & 0xFFFF
            equal_before += marks >> 16


def top_blocks_triton(
    scores: Tensor, take: Tensor, limit: Tensor, capacity: int, widest: int = 8192
) -> tuple[Tensor, Tensor]:
    """widest: most scores that one program holds at a time, a power of two from 128 on."""
    s, r, m = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(2) == 1, "scores: fp32, last dimension contiguous"
    assert take.shape == limit.shape == (r,) and take.dtype == limit.dtype == torch.int64, "take, limit: [R] int64"
    block = min(max(power_of_2(m), 128), widest)
    width = max(block // 8, 128)
    assert m <= 1000 * width, f"{m} blocks overflow the ten-bit counters of {width} columns"
    # With chunks of 2048 eight warps take 80 registers a thread, so that a multiprocessor holds three programs.
    blocks = torch.empty(s, r, capacity, dtype=torch.int64, device=scores.device)
    count = torch.empty(s, r, dtype=torch.int64, device=scores.device)
    _top_blocks[(s * r,)](
        scores, take, limit, blocks, count, r, m, capacity, scores.stride(0), scores.stride(1), take.stride(0),
        limit.stride(0), BLOCK=block, WIDTH=width, CHUNK=min(block, 2048), SINGLE=m <= block,
        num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return blocks, count


CASES = [  # (scopes, M, capacity, take and limit of each row)
    (1, 1, 1, [(1, 1), (0, 1), (1, 0)]),
    (2, 17, 5, [(3, 17), (9, 17), (9, 4), (1, 1)]),
    (1, 63, 70, [(80, 63), (63, 63), (62, 63), (-3, 63)]),
    (3, 257, 40, [(40, 257), (39, 250), (1, 129), (0, 257), (17, 0)]),
    (2, 1000, 390, [(390, 1000), (70, 999), (1000, 513), (200, 300)]),
]
BENCHMARK_CASES = [  # the same of an H200 under load: one set a request, a layer, a KV head and layer
    (1, 5_700, 400, [(390, 5_700)] * 12),
    (28, 90_000, 6_400, [(6_300, 90_000)] * 12),
    (224, 90_000, 6_400, [(6_300, 90_000)] * 12),
    (28, 17_000, 1_300, [(1_190, 17_000)] * 64),
]
