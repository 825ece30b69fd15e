"""Where in the pool are the blocks of a selection, and which of them survive a rollback?

Contract of `resolve`. blocks [S, R, K] int64, count [S, R], page_table [R, P]: units [S, R, K * block / unit] int32,
the pool entry at which each unit of a row's blocks begins, in the order of the blocks; unit = gcd(block, page size), so
that a unit lies within one page. Units past count * block / unit are unspecified. rows [R] bool: the rows wanted.
Contract of `count_below`. blocks ascending, count [S, R], bound [R]: how many of the first count are below bound.
"""

from math import gcd

import torch
from torch import Tensor

from aspire.kernels.jit import jit, tl, triton, wanted


def unit_of(block: int, page_size: int) -> int:
    """Tokens that lie together both in a block and in a page."""
    return gcd(block, page_size)


def resolve_torch(blocks: Tensor, page_table: Tensor, block: int, page_size: int) -> Tensor:
    """The twin; whatever stands past the counts is taken into the table's range first."""
    unit = unit_of(block, page_size)
    start = blocks[..., None] * block + torch.arange(0, block, unit, device=blocks.device)
    start = start.flatten(2).clamp(0, page_table.shape[1] * page_size - 1)  # [S, R, K * block / unit]
    table = page_table.expand(blocks.shape[0], -1, -1)
    return (table.gather(2, start // page_size) * page_size + start % page_size).int()


@jit
def _resolve_kernel(
    blocks, count, page_table, wanted_rows, units, rows, capacity, pages, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    PAGE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    scope, row = tl.program_id(1), tl.program_id(0)
    line = scope.to(tl.int64) * rows + row
    if tl.load(wanted_rows + row) == 0:
        return
    each: tl.constexpr = BLOCK // UNIT
    end = tl.load(count + line) * each
    base = tl.program_id(2) * SPAN
    if base < end:
        j = base + tl.arange(0, SPAN)
        ok = j < end
        position = tl.load(blocks + line * capacity + j // each, mask=ok, other=0) * BLOCK + j % each * UNIT
        page = tl.load(page_table + row.to(tl.int64) * pages + position // PAGE, mask=ok, other=0)
        tl.store(units + line * capacity * each + j, (page * PAGE + position % PAGE).to(tl.int32), mask=ok)


def resolve_triton(
    blocks: Tensor, count: Tensor, page_table: Tensor, rows: Tensor, block: int, page_size: int
) -> Tensor:
    """The launcher; see the contract at the head of this file."""
    scopes, slots, capacity = blocks.shape
    unit = unit_of(block, page_size)
    assert blocks.is_contiguous() and count.is_contiguous() and page_table.is_contiguous()
    units = torch.empty(scopes, slots, capacity * block // unit, dtype=torch.int32, device=blocks.device)
    span = 1024
    grid = (slots, scopes, triton.cdiv(units.shape[2], span))
    _resolve_kernel[grid](
        blocks, count, page_table, rows.view(torch.uint8), units, slots, capacity, page_table.shape[1],
        BLOCK=block, UNIT=unit, PAGE=page_size, SPAN=span,
    )  # fmt: skip
    return units


def resolve(blocks: Tensor, count: Tensor, page_table: Tensor, rows: Tensor, block: int, page_size: int) -> Tensor:
    """Pool entries of a selection's units; see the contract at the head of this file."""
    if wanted(blocks):
        return resolve_triton(blocks, count, page_table, rows, block, page_size)
    return resolve_torch(blocks, page_table, block, page_size)


def count_below_torch(blocks: Tensor, count: Tensor, bound: Tensor) -> Tensor:
    """The twin."""
    chosen = torch.arange(blocks.shape[2], device=blocks.device) < count[..., None]
    return (chosen & (blocks < bound[:, None])).sum(2)


@jit
def _count_kernel(blocks, count, bound, out, rows, capacity, SPAN: tl.constexpr):
    scope, row = tl.program_id(1), tl.program_id(0)
    line = scope.to(tl.int64) * rows + row
    have, limit = tl.load(count + line), tl.load(bound + row)
    last = tl.load(blocks + line * capacity + tl.maximum(have - 1, 0))
    kept = have
    if (have > 0) & (last >= limit):  # rarely: a selection made while drafting reached past what was committed
        kept = have * 0
        for base in range(0, have, SPAN):
            j = base + tl.arange(0, SPAN)
            block = tl.load(blocks + line * capacity + j, mask=j < have, other=limit)
            kept += tl.sum((block < limit).to(tl.int64), 0)
    tl.store(out + line, kept)


def count_below_triton(blocks: Tensor, count: Tensor, bound: Tensor) -> Tensor:
    """The launcher; see the contract at the head of this file."""
    scopes, rows, capacity = blocks.shape
    assert blocks.is_contiguous() and count.is_contiguous()
    out = torch.empty_like(count)
    _count_kernel[(rows, scopes)](blocks, count, bound, out, rows, capacity, SPAN=1024)
    return out


def count_below(blocks: Tensor, count: Tensor, bound: Tensor) -> Tensor:
    """Blocks that survive a rollback; see the contract at the head of this file.  # [S, R]"""
    return (count_below_triton if wanted(blocks) else count_below_torch)(blocks, count, bound)
