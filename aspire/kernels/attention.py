"""How does a row attend to its keys in the paged pool? Dense rows read all, selected rows some blocks and a tail.

Contract of `mixed_attention`. q [T, Hq, D], k_cache and v_cache [M, Hkv, D] of one layer, `Rows` says which queries
belong to which row and which keys each may read; Hq is a multiple of Hkv. Query w of row r stands at position
rows.position[r] + w and sees keys up to its own position: all of them in a dense row; in a selected row those in
the row's blocks and those from tail_start on. out [T, Hq, D] is written at the queries of the rows and nowhere else.
Entries past a row's last position are never read: they may be NaN. A row of width 0 reads and writes nothing.

On a GPU the same read can leave the logits of some queries behind (`Taps`), from which kernels/scores.py makes the
scores that a selection is chosen by.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from aspire.kernels.blocks import resolve_triton, unit_of
from aspire.kernels.jit import jit, power_of_2, tl, wanted
from aspire.kernels.rows import BlockSet, Rows
from aspire.kernels.work import Work, plan_work

__all__ = ["BlockSet", "Rows", "Taps", "gather_keys", "mixed_attention", "workspace"]


@dataclass(frozen=True)
class Taps:
    """Where the logits of probed queries go, as kernels/scores.py takes them.

    rows [R] bool: the probed rows. every: all queries of a row, or its first and its last. logits [R, Q, Hq, L] fp16 or
    fp32, written at the positions a query sees: query w at index w, or the first at 0 and the last at 1 (a row one
    query wide: 0). lse [T, Hq] fp32, log2 of the sum of 2^logit, of all queries of the pass.
    """

    rows: Tensor
    every: bool
    logits: Tensor
    lse: Tensor


_workspace: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}


def workspace(name: str, like: Tensor, elements: int) -> Tensor:
    """A flat buffer that is kept: fresh memory of megabytes a layer costs more in page faults than the copy itself."""
    key = (name, like.device, like.dtype)
    if key not in _workspace or _workspace[key].numel() < elements:
        _workspace[key] = torch.empty(elements, dtype=like.dtype, device=like.device)
    return _workspace[key][:elements]


def gather_keys(cache: Tensor, entries: Tensor, name: str) -> Tensor:
    """Cache entries [R, L] or [Hkv, R, L] of a layer, valid until the next gather of that name.  # [R, Hkv, L, D]"""
    m, heads, dim = cache.shape
    if entries.dim() == 2:
        picked = workspace(name, cache, entries.numel() * heads * dim).view(-1, heads * dim)
        torch.index_select(cache.view(m, heads * dim), 0, entries.flatten(), out=picked)
        return picked.view(*entries.shape, heads, dim).transpose(1, 2)
    head = torch.arange(heads, device=entries.device)[:, None, None]
    picked = workspace(name, cache, entries.numel() * dim).view(-1, dim)
    torch.index_select(cache.view(m * heads, dim), 0, (entries * heads + head).flatten(), out=picked)
    return picked.view(*entries.shape, dim).transpose(0, 1)


def mixed_attention_torch(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, out: Tensor) -> None:
    """The twin: for dense and for selected rows, gather the keys of each, pad, one scaled-dot-product call."""
    for part in rows.parts:
        for each in part.single if rows.alone else [part]:
            _attend_alike(q, k_cache, v_cache, each, out)


def _attend_alike(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, out: Tensor) -> None:
    kv_heads, dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    index = rows.queries  # [R, W]
    r, w = index.shape
    folded = q[index].view(r, w, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(r, kv_heads, group * w, dim)
    keys, values = gather_keys(k_cache, rows.entries, "k"), gather_keys(v_cache, rows.entries, "v")
    bias = None if rows.bias is None else rows.bias.to(q.dtype).repeat(1, 1, group, 1)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias)
    unfolded = mixed.view(r, kv_heads, group, w, dim).permute(0, 3, 1, 2, 4).reshape(r, w, -1, dim)
    out[index] = unfolded  # short rows write their last query again, with the same value


@jit
def _keys(cache, page, slot, offset, d, page_stride, token_stride, ok, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values of a tile, 0 where not ok.  # [N, D]"""
    at = cache + (page * page_stride + slot * token_stride + offset)[:, None] + d[None, :]
    if MASKED:
        return tl.load(at, mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
    return tl.load(at)


@jit
def _absorb(acc, top, total, s, v, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """One tile of logits [M, N] and values [N, D] into the running softmax, in powers of two."""
    peak = tl.maximum(top, tl.max(s, 1) * scale)
    safe = peak
    if MASKED:  # a query may have seen nothing yet
        safe = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp2(s * scale - safe[:, None])
    fade = tl.exp2(top - safe)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return acc, peak, total * fade + tl.sum(p, 1)


@jit
def _attention_kernel(
    q, k_cache, v_cache, out, parts, part_lse, pieces, spans, start, width, position, page_table, sparse, units, count,
    tail_start, lse, tapped, logits, rows, pages, capacity, q_stride, page_stride, token_stride, head_stride, scale,
    logits_row, logits_query, logits_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, DENSE: tl.constexpr, PER_HEAD: tl.constexpr,
    TAPS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, piece = tl.program_id(0), tl.program_id(1)
    row = tl.load(pieces + piece * 3)
    if row < 0:
        return
    begin, end = tl.load(pieces + piece * 3 + 1), tl.load(pieces + piece * 3 + 2)
    wide, first = tl.load(width + row).to(tl.int32), tl.load(start + row)
    at = tl.load(position + row).to(tl.int32)
    row64 = row.to(tl.int64)
    m, d, n = tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    w = m // GROUP
    live = w < wide
    q_head = head * GROUP + m % GROUP
    q_at = (first + w) * q_stride + q_head * DIM
    queries = tl.load(q + q_at[:, None] + d[None, :], mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    stop = at + wide
    acc = tl.zeros((M, D), dtype=tl.float32)
    top = tl.full((M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    offset = head.to(tl.int64) * head_stride
    padded: tl.constexpr = D != DIM
    tail = stop * 0
    head_tiles = begin * 0
    if not DENSE:
        if tl.load(sparse + row) != 0:
            tail = tl.load(tail_start + row).to(tl.int32)
            line = row64
            most = tl.load(count + row64)
            if PER_HEAD:
                for h in range(1, KV_HEADS):
                    most = tl.maximum(most, tl.load(count + h * rows + row64))
                line += head.to(tl.int64) * rows
            keys = (tl.load(count + line) * BLOCK).to(tl.int32)
            listed = units + line * capacity
            head_tiles = ((most * BLOCK + N - 1) // N).to(tl.int32)
            whole = tl.minimum(end, keys // N)
            for t in tl.range(begin, whole, num_stages=STAGES):
                j = t * N + n
                entry = tl.load(listed + j // UNIT).to(tl.int64) + j % UNIT
                page, slot = entry // PAGE, entry % PAGE
                k = _keys(k_cache, page, slot, offset, d, page_stride, token_stride, n >= 0, DIM, padded)
                v = _keys(v_cache, page, slot, offset, d, page_stride, token_stride, n >= 0, DIM, padded)
                s = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
                acc, top, total = _absorb(acc, top, total, s, v, scale, PRECISION, False)
            for t in range(tl.maximum(begin, whole), tl.minimum(end, head_tiles)):
                j = t * N + n
                ok = j < keys
                entry = tl.load(listed + j // UNIT, mask=ok, other=0).to(tl.int64) + j % UNIT
                page, slot = entry // PAGE, entry % PAGE
                k = _keys(k_cache, page, slot, offset, d, page_stride, token_stride, ok, DIM, True)
                v = _keys(v_cache, page, slot, offset, d, page_stride, token_stride, ok, DIM, True)
                s = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
                s = tl.where(ok[None, :], s, float("-inf"))
                acc, top, total = _absorb(acc, top, total, s, v, scale, PRECISION, True)
    table = page_table + row64 * pages
    tap, tap_at, kept = logits, w[:, None], live
    if TAPS > 0:
        index = w
        if TAPS == 1:  # the first query and the last
            index = tl.where(w == 0, 0, 1)
            kept = live & ((w == 0) | (w == wide - 1))
        kept = kept & (tl.load(tapped + row) != 0)
        tap_at = (index * logits_query + q_head * logits_head).to(tl.int32)[:, None]  # within a row 32 bits suffice
        tap = logits + row64 * logits_row
    from_tail = tl.maximum(begin, head_tiles)
    whole = tl.minimum(end, head_tiles + tl.maximum(at + 1 - tail, 0) // N)
    for t in tl.range(from_tail, whole, num_stages=STAGES):  # tiles that every query sees whole
        pos = tail + (t - head_tiles) * N + n
        page, slot = tl.load(table + pos // PAGE), pos % PAGE
        k = _keys(k_cache, page, slot, offset, d, page_stride, token_stride, n >= 0, DIM, padded)
        v = _keys(v_cache, page, slot, offset, d, page_stride, token_stride, n >= 0, DIM, padded)
        s = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        acc, top, total = _absorb(acc, top, total, s, v, scale, PRECISION, False)
        if TAPS > 0:
            near = kept[:, None] & (pos >= 0)[None, :]
            tl.store(tap + (tap_at + pos[None, :]), (s * scale).to(logits.dtype.element_ty), mask=near)
    for t in range(tl.maximum(from_tail, whole), end):
        pos = tail + (t - head_tiles) * N + n
        ok = pos < stop
        page, slot = tl.load(table + pos // PAGE, mask=ok, other=0), pos % PAGE
        k = _keys(k_cache, page, slot, offset, d, page_stride, token_stride, ok, DIM, True)
        v = _keys(v_cache, page, slot, offset, d, page_stride, token_stride, ok, DIM, True)
        s = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        seen = ok[None, :] & (pos[None, :] <= (at + w)[:, None])
        s = tl.where(seen, s, float("-inf"))
        acc, top, total = _absorb(acc, top, total, s, v, scale, PRECISION, True)
        if TAPS > 0:
            tl.store(tap + (tap_at + pos[None, :]), (s * scale).to(logits.dtype.element_ty), mask=seen & kept[:, None])
    sums = tl.where(total > 0, total, 1.0)
    acc = acc / sums[:, None]
    log_sum = top + tl.log2(sums)
    if tl.load(spans + row * 2 + 1) == 1:
        inside = live[:, None] & (d < DIM)[None, :]
        tl.store(out + ((first + w) * KV_HEADS * GROUP + q_head)[:, None] * DIM + d[None, :], acc, mask=inside)
        if TAPS > 0:
            tl.store(lse + (first + w) * KV_HEADS * GROUP + q_head, log_sum, mask=live)
    else:
        slot = piece.to(tl.int64) * KV_HEADS + head
        tl.store(parts + (slot * M + m)[:, None] * D + d[None, :], acc, mask=live[:, None])
        tl.store(part_lse + slot * M + m, log_sum, mask=live)


@jit
def _merge_kernel(
    parts, part_lse, spans, row_of, start, width, out, lse,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    CHUNK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Pieces of one query and head, weighted by their share of the softmax."""
    token, q_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_of + token)
    first, number = tl.load(spans + row * 2), tl.load(spans + row * 2 + 1)
    w = token - tl.load(start + row)
    if (number < 2) | (w < 0) | (w >= tl.load(width + row)):
        return
    c, d = tl.arange(0, CHUNK), tl.arange(0, D)
    m = w * GROUP + q_head % GROUP
    acc = tl.zeros((D,), dtype=tl.float32)
    top, total = float("-inf"), 0.0
    for base in range(0, number, CHUNK):
        ok = base + c < number
        slot = ((first + base + c).to(tl.int64) * KV_HEADS + q_head // GROUP) * M + m
        each = tl.load(part_lse + slot, mask=ok, other=float("-inf"))
        part = tl.load(parts + slot[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        peak = tl.maximum(top, tl.max(each, 0))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(each - safe)
        fade = tl.exp2(top - safe)
        acc = acc * fade + tl.sum(part * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        top = peak
    at = token * KV_HEADS * GROUP + q_head
    tl.store(out + at * DIM + d, acc / total, mask=d < DIM)
    if TAPS > 0:
        tl.store(lse + at, top + tl.log2(total))


@dataclass(frozen=True)
class Tuning:
    """How one shape is run. tile: keys a tile; pieces: how many a multiprocessor takes, summed over heads.

    resident: programs that a multiprocessor holds at once, as registers and shared memory allow for heads of 128.
    """

    tile: int
    warps: int
    stages: int
    pieces: int
    resident: int = 2


# (rows of the query tile, what the rows are) -> what ran best on an H200, see results/LOG.md.
TUNED = {
    (16, "dense"): Tuning(128, 4, 2, 6, 3),
    (16, "mixed"): Tuning(128, 4, 2, 6, 3),
    (16, "drafts"): Tuning(128, 4, 2, 3, 3),
    (16, "many drafts"): Tuning(64, 2, 2, 4, 4),
    (32, "dense"): Tuning(128, 4, 2, 8),
    (32, "mixed"): Tuning(128, 4, 2, 6),
    (64, "dense"): Tuning(64, 4, 3, 12),
    (64, "mixed"): Tuning(64, 4, 3, 12),
    (128, "dense"): Tuning(128, 8, 3, 8),
    (128, "mixed"): Tuning(128, 8, 3, 8),
}


EVERY = 32  # tiles of a piece, where rows are cut at fixed places


def query_tile(widest: int, group: int) -> int:
    """Rows of the matrix product: queries of a row times the group, filled up; 16 is the least the hardware takes."""
    return max(16, power_of_2(widest * group))


def tuning(rows: int, widest: int, group: int, kv_heads: int, dense: bool, itemsize: int = 2) -> Tuning:
    """How a call is run: by its query tile, and by whether rows verify, draft, or do either.

    itemsize: bytes of a number in the cache; the table is for 2, and more of them take tiles of half the keys.
    """
    kind = "dense" if dense else "mixed" if widest > 1 else "drafts"
    if kind == "drafts" and not 64 < rows * kv_heads < 320:  # either too few lines to fill a GPU, or plenty
        kind = "many drafts"
    tune = TUNED.get((query_tile(widest, group), kind), Tuning(32, 8, 2, 8))
    return tune if itemsize <= 2 else replace(tune, tile=tune.tile // 2)


def fixed_split(tune: Tuning, rows: int, length: int) -> int:
    """Bound on the pieces of rows of up to `length` keys that are cut every `EVERY` tiles, whatever the others read."""
    tiles = -(-length // tune.tile) + 2  # a selection ends and its tail begins with parts of tiles
    return rows * -(-tiles // EVERY)


def budget(tune: Tuning, device: torch.device, rows: int, kv_heads: int, dim: int) -> int:
    """Pieces that all rows together are cut into, for one head; two a row, lest a few whole ones make a wave more."""
    if device.type != "cuda":
        return 5  # the interpreter: a few, so that splitting is exercised
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(2 * rows, tune.pieces * processors * 128 // (kv_heads * max(dim, 64)))


def slots_of(tune: Tuning, device: torch.device, dim: int) -> int:
    """Programs of a call that a GPU holds at once, a third more of them with narrow heads; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    resident = tune.resident if dim > 64 else tune.resident * 4 // 3
    return torch.cuda.get_device_properties(device).multi_processor_count * resident


def plan_rows(rows: Rows, group: int, kv_heads: int, dim: int, tune: Tuning | None = None) -> Work:
    """The split of one call; a pass plans all its layers at once instead, see attention.py."""
    chosen = rows.selection
    tune = tune or tuning(len(rows.start), rows.widest or 1, group, kv_heads, chosen is None)
    device = rows.start.device
    pieces, slots = budget(tune, device, len(rows.start), kv_heads, dim), slots_of(tune, device, dim)
    if chosen is None:
        return plan_work(rows.width, rows.position, tune.tile, pieces, kv_heads=kv_heads, slots=slots)[0]
    sparse = torch.ones_like(rows.width, dtype=torch.bool) if rows.sparse is None else rows.sparse
    heads = chosen.count.shape[0] if chosen.count.dim() == 2 else 1
    return plan_work(
        rows.width, rows.position, tune.tile, pieces, sparse, chosen.count.view(heads, -1), chosen.tail_start,
        chosen.block_size, heads, kv_heads, slots,
    )[0]  # fmt: skip


def mixed_attention_triton(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, out: Tensor, taps: Taps | None = None,
    tune: Tuning | None = None,
) -> None:  # fmt: skip
    """The launcher: two launches, the second for rows that were split. rows.widest must be set."""
    kv_heads, dim = k_cache.shape[-2:]
    group = q.shape[1] // kv_heads
    assert rows.widest is not None and q.stride(1) == dim and out.is_contiguous(), "contiguous heads, a known width"
    assert all(x.is_contiguous() for x in (rows.start, rows.width, rows.position, rows.page_table))
    assert q.shape[1] % kv_heads == 0 and k_cache.stride() == v_cache.stride() and k_cache.stride(-1) == 1
    m, page = query_tile(rows.widest, group), rows.page_size
    tune = tune or tuning(len(rows.start), rows.widest, group, kv_heads, rows.selection is None, q.element_size())
    work = rows.work or plan_rows(rows, group, kv_heads, dim, tune)
    assert work.tile == tune.tile, "planned for another tile"
    chosen, d = rows.selection, max(16, power_of_2(dim))
    token_stride, head_stride = k_cache.stride()[-3:-1]
    page_stride = k_cache.stride(0) * (page if k_cache.dim() == 3 else 1)
    size = work.pieces.shape[0]
    parts = torch.empty(size, kv_heads, m, d, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(size, kv_heads, m, dtype=torch.float32, device=q.device)
    units, sparse, count, tail, unit, per_head = rows.position, rows.position, rows.position, rows.position, 1, False
    if chosen is not None:
        per_head, unit = chosen.blocks.dim() == 3, unit_of(chosen.block_size, page)
        sparse = torch.ones_like(rows.width, dtype=torch.bool) if rows.sparse is None else rows.sparse
        count, tail = chosen.count.contiguous(), chosen.tail_start
        units = units_of(rows, chosen, sparse)
        sparse = sparse.view(torch.uint8)
    lse = part_lse if taps is None else taps.lse
    logits = part_lse if taps is None else taps.logits
    strides = (0, 0, 0) if taps is None else taps.logits.stride()[:3]
    tapping = 0 if taps is None else 1 + taps.every
    common = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "D": d, "M": m, "TAPS": tapping}
    _attention_kernel[(kv_heads, size)](
        q, k_cache, v_cache, out, parts, part_lse, work.pieces, work.spans, rows.start, rows.width, rows.position,
        rows.page_table, sparse, units, count, tail, lse, part_lse if taps is None else taps.rows.view(torch.uint8),
        logits, len(rows.start), rows.page_table.shape[1], units.shape[-1], q.stride(0), page_stride, token_stride,
        head_stride, dim**-0.5 * 1.4426950408889634, *strides, N=tune.tile, PAGE=page, UNIT=unit,
        BLOCK=1 if chosen is None else chosen.block_size, DENSE=chosen is None, PER_HEAD=per_head,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=tune.stages, num_warps=tune.warps, **common,
    )  # fmt: skip
    _merge_kernel[(q.shape[0], q.shape[1])](
        parts, part_lse, work.spans, row_of_token(rows, q.shape[0]), rows.start, rows.width, out, lse,
        CHUNK=16, num_warps=2, **common,
    )  # fmt: skip


def row_of_token(rows: Rows, tokens: int) -> Tensor:
    """Row of each query in q; of a token that belongs to none, any.  # [T]"""
    if rows.row_of is not None:
        return rows.row_of
    order = (2 * rows.start + (rows.width > 0)).argsort()  # a row of width 0 may start where another does
    at = torch.arange(tokens, device=rows.start.device)
    return order[(torch.searchsorted(rows.start[order], at, right=True) - 1).clamp(min=0)]


def units_of(rows: Rows, chosen: BlockSet, sparse: Tensor) -> Tensor:
    """Pool entries of the selected blocks; made here for a call that stands alone.  # [R or Hkv, R, K']"""
    if chosen.units is not None:
        return chosen.units
    blocks, count = chosen.blocks, chosen.count
    scoped = (blocks if blocks.dim() == 3 else blocks[None]).contiguous()
    counts = (count if count.dim() == 2 else count[None]).contiguous()
    units = resolve_triton(scoped, counts, rows.page_table, sparse, chosen.block_size, rows.page_size)
    return units if blocks.dim() == 3 else units[0]


def mixed_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, out: Tensor, taps: Taps | None = None
) -> None:
    """Attention of `rows`; see the contract at the head of this file. Only the kernel serves taps."""
    if wanted(q) and rows.widest is not None:
        mixed_attention_triton(q, k_cache, v_cache, rows, out, taps)
    else:
        assert taps is None, "the twin leaves no logits behind"
        mixed_attention_torch(q, k_cache, v_cache, rows, out)
