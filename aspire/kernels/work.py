"""How is the reading of a pass split over a GPU? Rows of very different length become near-equal pieces, on the device.

Contract of `plan_work`. The keys of a row are cut into tiles of TILE keys: first those of its head (the selected
units, count * unit keys), then those of its tail (positions tail_start .. position + width - 1). A dense row has no
head and tail_start 0; a row of width 0 reads nothing. A row that reads anything is cut into as many pieces as its
share of all tiles is of the number wanted, rounded, at least one; its pieces are equal up to the last. The number
wanted is `budget`, or near it the one with which a GPU, which runs `slots` programs at once, is done first: while few
programs are left, they do not fill its memory bus, see `drain`. With `every` > 0 each row is cut after every so many
tiles instead, whatever the others are, and `budget` bounds the number of pieces. Result, for every plan
p of the S plans: pieces [S, P, 3] int32 = (row, first tile, end tile), row -1 where there is none; spans [S, R, 2]
int32 = (first piece, number of pieces) of each row. The grid of the attention kernel is the size of `pieces`, whatever
the lengths are, so a captured pass stays valid.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted

CANDIDATES = range(4, 13)  # eighths of the budget that are tried, so that no last wave is left half empty


def pieces_of(budget: int, rows: int, slots: int) -> int:
    """Size of the table of pieces."""
    return (budget * CANDIDATES[-1] // 8 if slots else budget) + rows


@dataclass(frozen=True)
class Work:
    """One plan: pieces [P, 3] and spans [R, 2], int32; tile: keys a tile."""

    pieces: Tensor
    spans: Tensor
    tile: int


def row_tiles(
    width: Tensor, position: Tensor, tile: int, head: Tensor | None = None, tail_start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tiles of head and tail of each row; head [S, R] keys, None = dense.  # [S, R] each"""
    last = position + width
    heads = torch.zeros_like(last)[None] if head is None else head
    start = 0 if tail_start is None else tail_start
    live = width > 0
    return torch.where(live, -(-heads // tile), 0), torch.where(live, -(-(last - start) // tile), 0).expand_as(heads)


def drain(programs: Tensor, slots: int) -> Tensor:
    """Programs that a full bus would run in the time of these, measured on an H200.

    The last, partial wave is slow, and programs of equal work do not end together. The callers add a quarter tile for
    the start of each program, and three quarters of a tile for merging where any row is split.
    """
    last = programs % slots
    return programs - last + slots // 12 + torch.where(last > 0, torch.maximum(last, slots // 3 + last * 9 // 20), 0)


def plan_work_torch(
    tiles: Tensor, budget: int, kv_heads: int = 1, slots: int = 0, every: int = 0
) -> tuple[Tensor, Tensor]:
    """The twin: tiles [S, R] of each row -> (pieces, spans)."""
    plans, rows = tiles.shape
    size = pieces_of(budget, rows, slots)
    total = tiles.sum(1, keepdim=True).clamp(min=1)
    least = torch.full((plans, 1), 2**62, device=tiles.device)
    count = share = torch.zeros_like(tiles)
    if every:
        count, share = -(-tiles // every), torch.full_like(tiles, every)
    for eighths in () if every else CANDIDATES if slots else (8,):
        several = (tiles * (budget * eighths // 8) + total // 2) // total
        number = torch.where(tiles > 0, several.clamp(min=1), 0)
        each = (-(-tiles // number.clamp(min=1))).clamp(min=1)
        number = -(-tiles // each)
        programs = number.sum(1, keepdim=True) * kv_heads
        most, split = torch.where(tiles > 0, each, 0).amax(1, keepdim=True), number.amax(1, keepdim=True) > 1
        cost = drain(programs, max(slots, 1)) * (4 * most + 1) + split * 3 * slots
        better = cost < least
        least, count, share = least.minimum(cost), torch.where(better, number, count), torch.where(better, each, share)
    first = count.cumsum(1) - count
    pieces = torch.zeros(plans, size, 3, dtype=torch.int32, device=tiles.device)
    number = torch.arange(size, device=tiles.device)
    row = (number[:, None] >= first[:, None]).sum(2) - 1  # the last row that starts at or before this piece
    row = torch.where(number < count.sum(1, keepdim=True), row, -1)
    at = row.clamp(min=0)
    each = share.gather(1, at)
    begin = (number - first.gather(1, at)) * each
    pieces[..., 0], pieces[..., 1] = row, begin
    pieces[..., 2] = torch.minimum(begin + each, tiles.gather(1, at))
    return pieces, torch.stack([first, count], 2).int()


@jit
def _plan_kernel(
    width, position, sparse, count, tail_start, pieces, spans, rows, heads, unit, budget, size, kv_heads, slots,
    LOW: tl.constexpr, HIGH: tl.constexpr, R: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr,
    EVERY: tl.constexpr,
):  # fmt: skip
    """One program for P pieces of a plan; each counts all of them, which is faster than to wait for one that does."""
    plan = tl.program_id(0)
    r = tl.arange(0, R)
    there = r < rows
    w = tl.load(width + r, mask=there, other=0)
    tail = tl.load(position + r, mask=there, other=0) + w
    head_tiles = tl.zeros((R,), dtype=tl.int64)
    if not DENSE:
        chosen = tl.load(sparse + r, mask=there, other=0) != 0
        most = tl.zeros((R,), dtype=tl.int64)
        for head in range(heads):
            most = tl.maximum(most, tl.load(count + (plan * heads + head) * rows + r, mask=there, other=0))
        head_tiles = tl.where(chosen & (w > 0), (most * unit + TILE - 1) // TILE, 0)
        tail -= tl.where(chosen, tl.load(tail_start + r, mask=there, other=0), 0)
    tiles = (head_tiles + tl.where(w > 0, (tail + TILE - 1) // TILE, 0)).to(tl.int32)  # divided often
    total = tl.maximum(tl.sum(tiles, 0), 1)
    number, share = tiles * 0, tiles * 0 + 1
    if EVERY > 0:
        number, share = (tiles + EVERY - 1) // EVERY, tiles * 0 + EVERY
    least = total * 0 + 2147483647
    for eighths in range(LOW, HIGH):
        several = (tiles * (budget * eighths // 8) + total // 2) // total
        count_now = tl.where(tiles > 0, tl.maximum(several, 1), 0)
        each = tl.maximum((tiles + count_now - 1) // tl.maximum(count_now, 1), 1)
        count_now = (tiles + each - 1) // each
        programs = tl.sum(count_now, 0) * kv_heads
        last = programs % slots
        slow = tl.where(last > 0, tl.maximum(last, slots // 3 + last * 9 // 20), 0)
        cost = (programs - last + slots // 12 + slow) * (4 * tl.max(tl.where(tiles > 0, each, 0), 0) + 1)
        cost += tl.where(tl.max(count_now, 0) > 1, 3 * slots, 0)
        better = cost < least
        least = tl.minimum(least, cost)
        number, share = tl.where(better, count_now, number), tl.where(better, each, share)
    first = tl.cumsum(number, 0) - number
    used = tl.sum(number, 0)
    if tl.program_id(1) == 0:
        tl.store(spans + (plan * rows + r) * 2, first.to(tl.int32), mask=there)
        tl.store(spans + (plan * rows + r) * 2 + 1, number.to(tl.int32), mask=there)
    p = tl.program_id(1) * P + tl.arange(0, P)
    starts = (first[None, :] <= p[:, None]) & there[None, :]  # [P, R]
    row = tl.sum(starts.to(tl.int32), 1) - 1
    mine = r[None, :] == row[:, None]
    each = tl.sum(tl.where(mine, share[None, :], 0), 1)
    begin = (p - tl.sum(tl.where(mine, first[None, :], 0), 1)) * each
    end = tl.minimum(begin + each, tl.sum(tl.where(mine, tiles[None, :], 0), 1))
    at = pieces + (plan * size + p) * 3
    tl.store(at, tl.where(p < used, row, -1), mask=p < size)
    tl.store(at + 1, begin.to(tl.int32), mask=p < size)
    tl.store(at + 2, end.to(tl.int32), mask=p < size)


def plan_work(
    width: Tensor, position: Tensor, tile: int, budget: int, sparse: Tensor | None = None,
    count: Tensor | None = None, tail_start: Tensor | None = None, unit: int = 1, heads: int = 1,
    kv_heads: int = 1, slots: int = 0, every: int = 0,
) -> list[Work]:  # fmt: skip
    """A plan for each `heads` consecutive scopes of count [S * heads, R] (their largest counts), or one dense plan.

    sparse [R] bool: the rows that read a selection; the others are dense. slots: pieces of all kv_heads that run at
    once; then the budget is a wish, and the number of pieces the one that leaves the last wave fullest. 0 = take it.
    """
    rows, plans = width.shape[0], 1 if count is None else count.shape[0] // heads
    if not wanted(width):
        head = None
        if count is not None and sparse is not None and tail_start is not None:
            head = torch.where(sparse, count.view(plans, heads, rows).amax(1) * unit, 0)
            tail_start = torch.where(sparse, tail_start, 0)
        tiles = sum(row_tiles(width, position, tile, head, tail_start))
        made, spans = plan_work_torch(tiles, budget, kv_heads, slots, every)  # type: ignore[arg-type]
        return [Work(p, s, tile) for p, s in zip(made, spans)]
    chosen = sparse, count, tail_start, unit, heads
    return plan_work_triton(width, position, tile, budget, *chosen, kv_heads, slots, every)


def plan_work_triton(
    width: Tensor, position: Tensor, tile: int, budget: int, sparse: Tensor | None = None,
    count: Tensor | None = None, tail_start: Tensor | None = None, unit: int = 1, heads: int = 1,
    kv_heads: int = 1, slots: int = 0, every: int = 0,
) -> list[Work]:  # fmt: skip
    """The launcher; see `plan_work`."""
    rows, plans = width.shape[0], 1 if count is None else count.shape[0] // heads
    size, low, high = pieces_of(budget, rows, slots), 8, 9
    if slots:
        low, high = CANDIDATES[0], CANDIDATES[-1] + 1
    if every:
        low = high
    pieces = torch.empty(plans, size, 3, dtype=torch.int32, device=width.device)
    spans = torch.empty(plans, rows, 2, dtype=torch.int32, device=width.device)
    assert count is None or count.is_contiguous(), "counts of all scopes lie together"
    chunk = 32
    _plan_kernel[(plans, -(-size // chunk))](
        width, position, width if sparse is None else sparse.view(torch.uint8), width if count is None else count,
        width if tail_start is None else tail_start, pieces, spans, rows, heads, unit, budget, size, kv_heads,
        max(slots, 1), LOW=low, HIGH=high, R=power_of_2(max(rows, 2)), P=chunk, TILE=tile, DENSE=count is None,
        EVERY=every,
    )  # fmt: skip
    return [Work(p, s, tile) for p, s in zip(pieces, spans)]


CASES = [  # (width, position, sparse, count of one scope, tail_start, unit)
    ([1], [0], [False], [0], [0], 1),
    ([1, 1, 5], [16, 62, 252], [True, False, False], [1, 0, 0], [16, 0, 0], 16),
    ([0, 1, 17, 1], [3, 256, 0, 63], [False, True, False, True], [0, 63, 0, 17], [0, 200, 0, 60], 1),
    ([0, 0], [0, 5], [True, True], [3, 3], [0, 0], 1),
]
