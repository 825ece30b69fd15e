"""Do the attention kernels, and those that plan for them, agree with their twins? On a CPU they run interpreted.

Pools are NaN past each row's context and outputs are NaN at first, so that a key too many or a query too many shows.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from aspire.kernels.attention import (
    BlockSet,
    Rows,
    Taps,
    Tuning,
    mixed_attention_torch,
    mixed_attention_triton,
    query_tile,
)
from aspire.kernels.jit import triton
from aspire.kernels.scores import HEAD_REDUCTIONS, probe_scores, reduce_scores
from aspire.kernels.work import Work, plan_work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
# fp32 sums of up to 257 terms in another order, and exponentials in powers of two instead of e
CLOSE = {"rtol": 1e-5, "atol": 2e-6, "equal_nan": True}
SMALL = Tuning(16, 4, 1, 1)  # tiles of 16 keys: several to a piece, several pieces to a row
PIECES = 12
RAGGED = [(257, 1), (63, 5), (17, 17), (0, 0), (1, 1), (64, 2), (9, 0)]  # (context, width); a width of 0 reads nothing
DRAFTS = [(257, 1), (63, 1), (0, 0), (17, 1), (1, 1)]
MIXED = [(257, 1), (63, 1), (0, 0), (117, 4), (17, 1), (64, 6), (1, 1)]
SPARSE = [True, False, True, False, True, False, True]
needs_triton = pytest.mark.skipif(triton is None, reason="needs triton")


@dataclass(frozen=True)
class Case:
    """q [T, Hq, D] with a query of no row before each row and after the last; caches [M, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Rows

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def attend(self, small: bool = True, taps: Taps | None = None) -> Tensor:
        """What the kernel makes of it, with small tiles and the twin's split or as it would be tuned."""
        out = torch.full_like(self.q, NAN)
        rows = replace(self.rows, work=small_work(self.rows)) if small else self.rows
        mixed_attention_triton(self.q, self.k, self.v, rows, out, taps, SMALL if small else None)
        return out


def small_work(rows: Rows) -> Work:
    """A split into tiles of 16 keys over at most PIECES + R pieces."""
    if (chosen := rows.selection) is None:
        return plan_work(rows.width, rows.position, SMALL.tile, PIECES)[0]
    heads = chosen.count.shape[0] if chosen.count.dim() == 2 else 1
    sparse = torch.ones_like(rows.width, dtype=torch.bool) if rows.sparse is None else rows.sparse
    count, size = chosen.count.view(heads, -1), chosen.block_size
    return plan_work(
        rows.width, rows.position, SMALL.tile, PIECES, sparse, count, chosen.tail_start, size, heads
    )[0]  # fmt: skip


def make(shape: list[tuple[int, int]], kv_heads: int, group: int, dim: int, page: int = 4, seed: int = 0) -> Case:
    """Dense rows of (context, width) over shuffled pages; unused page table entries point at a page of NaN."""
    rng = torch.Generator().manual_seed(seed)
    context, width = torch.tensor(shape).T.contiguous()
    pages = -(-context // page)
    order = torch.randperm(int(pages.sum()) + 1, generator=rng)
    table = order[-1].repeat(len(shape), int(pages.max()) + 1)
    start = (width + 1).cumsum(0) - width
    k, v = torch.full((2, len(order) * page, kv_heads, dim), NAN)
    for row, (length, _) in enumerate(shape):
        first = int(pages[:row].sum())
        table[row, : pages[row]] = order[first : first + int(pages[row])]
        at = torch.arange(length)
        entries = table[row, at // page] * page + at % page
        k[entries], v[entries] = torch.randn(2, length, kv_heads, dim, generator=rng)
    q = torch.randn(int(start[-1] + width[-1]) + 1, kv_heads * group, dim, generator=rng)
    index = (x.to(DEVICE) for x in (start, width, context - width, table))
    rows = Rows(*index, page, widest=int(width.max()))  # type: ignore[arg-type]
    return Case(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), rows)


def select(case: Case, block: int, per_head: bool = False, sparse: list[bool] | None = None, seed: int = 0) -> Case:
    """Random ascending blocks before a random tail, none in the last row; ids past the counts are out of range."""
    rng = torch.Generator().manual_seed(seed)
    last = case.rows.position.cpu()
    limit = (torch.rand(len(last), generator=rng) * (last // block + 1)).long()
    scopes = case.k.shape[1] if per_head else 1
    blocks = torch.full((scopes, len(last), int(limit.max()) + 1), 10**6)
    count = torch.zeros(scopes, len(last), dtype=torch.int64)
    for s in range(scopes):
        for r, n in enumerate(limit.tolist()):
            picked = torch.randperm(n, generator=rng)[: (n + 1 + s) // 2].sort().values
            blocks[s, r, : len(picked)], count[s, r] = picked, len(picked)
    count[:, -1] = 0
    if not per_head:
        blocks, count = blocks[0], count[0]
    chosen = BlockSet(*(x.to(DEVICE) for x in (blocks, count, limit * block)), block)
    mask = None if sparse is None else torch.tensor(sparse, device=DEVICE)
    return replace(case, rows=replace(case.rows, selection=chosen, sparse=mask))


def check(case: Case, tuned: bool = False) -> None:
    """Kernel against twin, as `tuned` too; queries of no row stay NaN, and those of a row are none."""
    twin = torch.full_like(case.q, NAN)
    mixed_attention_torch(case.q, case.k, case.v, case.rows, twin)
    mine = torch.zeros(len(case.q), dtype=torch.bool)
    for start, width in zip(case.rows.start.tolist(), case.rows.width.tolist()):
        mine[start : start + width] = True
    for small in (True, False)[: 1 + tuned]:
        out = case.attend(small)
        torch.testing.assert_close(out, twin, **CLOSE)
        assert torch.equal(out.isfinite().all(2).all(1).cpu(), mine) and out[~mine].isnan().all()


# -- attention ------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(
    ("shape", "kv_heads", "group", "dim", "page"),
    [
        ([(1, 1)], 1, 1, 8, 4),
        ([(17, 17)], 1, 4, 16, 1),
        (RAGGED, 2, 3, 8, 4),
        (RAGGED, 1, 2, 40, 16),  # no power of two
        ([(63, 3), (257, 2)], 1, 4, 64, 16),
        ([(0, 0), (5, 0)], 2, 1, 8, 4),
    ],
    ids=str,
)
def test_dense_rows(shape: list[tuple[int, int]], kv_heads: int, group: int, dim: int, page: int) -> None:
    """A20, A34: ragged widths and contexts in one call, and rows that read nothing."""
    case = make(shape, kv_heads, group, dim, page)
    if any(width for _, width in shape):
        check(case, tuned=True)
    else:
        assert case.attend().isnan().all() and case.attend(small=False).isnan().all()


@needs_triton
@pytest.mark.parametrize("per_head", [False, True], ids=["request-or-layer", "kv_head"])
@pytest.mark.parametrize(("block", "group", "dim"), [(16, 2, 16), (6, 3, 8), (4, 1, 40), (1, 4, 64)])
def test_selected_rows(block: int, group: int, dim: int, per_head: bool) -> None:
    """A22: one query a row, its blocks and its tail; a block of 6 lies across pages of 4."""
    check(select(make(DRAFTS, 2, group, dim), block, per_head))


@needs_triton
@pytest.mark.parametrize("per_head", [False, True], ids=["request-or-layer", "kv_head"])
@pytest.mark.parametrize(("block", "group", "dim"), [(16, 4, 16), (6, 1, 64), (4, 2, 8), (1, 3, 8)])
def test_dense_and_selected_rows_in_one_call(block: int, group: int, dim: int, per_head: bool) -> None:
    """A34: what a dense row has for a selection is not looked at."""
    check(select(make(MIXED, 2, group, dim), block, per_head, SPARSE), tuned=block == 6)


@needs_triton
def test_what_is_cut_into_one_piece_or_many_is_the_same() -> None:
    """The merge of up to 17 pieces of a row, more than it takes at a time, against a single piece."""
    case = make([(257, 2), (3, 1)], 1, 2, 8)
    rows = case.rows
    last = int(rows.page_table[0, 64] * rows.page_size)
    case.k[last] = 4 * case.q[int(rows.start[0]) + 1, 0]  # the last piece outweighs all before it
    whole, cut = torch.full_like(case.q, NAN), torch.full_like(case.q, NAN)
    for pieces, out in ((1, whole), (40, cut)):
        work = plan_work(case.rows.width, case.rows.position, SMALL.tile, pieces)[0]
        assert int(work.spans[0, 1]) == (17 if pieces == 40 else 1)
        mixed_attention_triton(case.q, case.k, case.v, replace(case.rows, work=work), out, None, SMALL)
    torch.testing.assert_close(cut, whole, **CLOSE)


@needs_triton
def test_a_bound_on_the_widths_may_be_loose() -> None:
    """A captured pass is launched for the widest row there may be."""
    case = select(make(MIXED, 2, 2, 8), 4, sparse=SPARSE)
    loose = replace(case, rows=replace(case.rows, widest=9))
    torch.testing.assert_close(loose.attend(), case.attend(), **CLOSE)


@needs_triton
def test_rows_may_lie_in_any_order_and_empty_ones_anywhere() -> None:
    """A34: a row of width 0 that starts where another does takes nothing from it; in both launches, split or whole."""
    case = make([(9, 0), (257, 2), (0, 0), (63, 5), (9, 0)], 2, 2, 8)
    start = case.rows.start.clone()
    start[0] = start[2] = start[3]
    start[4] = start[1]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 3, 0, 4, 2]):
        rows = replace(case.rows.some(torch.tensor(order, device=DEVICE), False), widest=5)
        rows = replace(rows, start=start[order])
        assert int(small_work(rows).spans[:, 1].max()) > 1
        check(replace(case, rows=rows), tuned=True)


def test_query_tile() -> None:
    assert [query_tile(w, g) for w, g in ((1, 1), (1, 16), (17, 1), (9, 2), (9, 7))] == [16, 16, 32, 32, 64]


# -- taps -----------------------------------------------------------------------------------------------------------


def tapped(case: Case, every: bool, probed: list[bool], dtype: torch.dtype = torch.float32) -> Taps:
    """Room for the logits, NaN, in a buffer longer than any context."""
    rows = case.rows
    wide = rows.widest if every else min(rows.widest, 2)  # type: ignore[type-var]
    length = rows.page_table.shape[1] * rows.page_size
    logits = torch.full((len(rows.start), wide, case.q.shape[1], length), NAN, dtype=dtype, device=DEVICE)  # type: ignore
    lse = torch.full(case.q.shape[:2], NAN, device=DEVICE)
    return Taps(torch.tensor(probed, device=DEVICE), every, logits, lse)


def direct(case: Case, taps: Taps) -> tuple[Tensor, Tensor]:
    """Logits and lse of dense rows by a loop over rows and queries, NaN where nothing is to be written."""
    logits, lse, rows = torch.full_like(taps.logits, NAN), torch.full_like(taps.lse, NAN), case.rows
    k = case.k.repeat_interleave(case.group, 1)
    for r, (start, width, at) in enumerate(zip(rows.start.tolist(), rows.width.tolist(), rows.position.tolist())):
        for w in range(width):
            p = torch.arange(at + w + 1, device=DEVICE)
            keys = k[rows.page_table[r, p // rows.page_size] * rows.page_size + p % rows.page_size]
            x = torch.einsum("hd,lhd->hl", case.q[start + w].double(), keys.double()) * case.q.shape[2] ** -0.5
            x = x / torch.log(torch.tensor(2.0, dtype=torch.float64))
            lse[start + w] = torch.log2(torch.exp2(x).sum(1)).float()
            index = w if taps.every else 0 if w == 0 else 1
            if taps.rows[r] and (taps.every or w in (0, width - 1)):
                logits[r, index, :, : at + w + 1] = x.to(logits.dtype)
    return logits, lse


def queries_of(case: Case, taps: Taps) -> tuple[Tensor, Tensor, Tensor]:
    """queries, at and counts of the tapped queries, as `reduce_scores` takes them."""
    rows, wide = case.rows, taps.logits.shape[1]
    column = torch.arange(wide, device=DEVICE)
    counts = (column < rows.width[:, None]) & taps.rows[:, None]
    offset = torch.minimum(column if taps.every else column * 10**6, (rows.width[:, None] - 1).clamp(min=0))
    return rows.start[:, None] + offset, rows.position[:, None] + offset, counts.contiguous()


@needs_triton
@pytest.mark.parametrize("every", [False, True], ids=["first_last", "every"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("small", [True, False], ids=["split", "tuned"])
def test_taps(small: bool, group: int, every: bool) -> None:
    """Logits of the probed queries, lse of all, nothing else; and the scores made of them are those of the prompts."""
    probed = [True, True, False, True, True, True, True]
    case = make(RAGGED, 2, group, 8)
    taps = tapped(case, every, probed)
    assert not small or (small_work(case.rows).spans[:, 1] > 1).any(), "nothing is split"
    out = case.attend(small, taps)
    torch.testing.assert_close(out, case.attend(small), **CLOSE)
    logits, lse = direct(case, taps)
    torch.testing.assert_close(taps.logits, logits, **CLOSE)
    torch.testing.assert_close(taps.lse, lse, **CLOSE)
    queries, at, counts = queries_of(case, taps)
    live = (counts.any(1)).nonzero()[:, 0]
    rows = case.rows.some(live, False)
    for heads in HEAD_REDUCTIONS:
        scopes = case.k.shape[1] if heads == "group_mean" else 1
        scores = torch.full((scopes, len(counts), logits.shape[3]), NAN, device=DEVICE)
        reduce_scores(taps.logits, taps.lse, queries, at, counts, case.k.shape[1], heads, scores)
        twin = probe_scores(case.q, case.k, rows, queries[live], counts[live], heads)
        # a weight is 2^(logit - lse): the difference of two numbers of about 10, each good to 1e-6
        torch.testing.assert_close(scores[:, live, : twin.shape[2]], twin, rtol=3e-5, atol=1e-8)
        assert not scores[:, live, twin.shape[2] :].any() and scores[:, ~counts.any(1)].isnan().all()


@needs_triton
def test_taps_beside_selected_rows() -> None:
    """A mixed pass taps its verify rows, in layers where its draft rows read a selection; group 1, one head."""
    case = select(make(MIXED, 1, 1, 16), 4, sparse=SPARSE)
    taps = tapped(case, False, [False, True, True, True, False, False, False], torch.float16)
    torch.testing.assert_close(case.attend(True, taps), case.attend(), **CLOSE)
    logits, lse = direct(case, taps)
    # a rounding to 11 bits
    torch.testing.assert_close(taps.logits, logits, rtol=1e-3, atol=1e-5, equal_nan=True)
    dense = [i for r in (1, 3, 5) for i in range(int(case.rows.start[r]), int(case.rows.start[r] + MIXED[r][1]))]
    torch.testing.assert_close(taps.lse[dense], lse[dense], **CLOSE)
