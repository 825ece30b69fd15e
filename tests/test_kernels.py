"""Do the torch twins do what their contracts say? Each against a loop over rows, heads and keys, with poison around."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aspire.kernels.attention import BlockSet, Rows, mixed_attention
from aspire.kernels.kv import copy_entries, write_kv
from aspire.kernels.scores import probe_scores
from aspire.kernels.select import top_blocks
from aspire.policies import Probe, TopBlocks

KV_HEADS, GROUP, DIM = 2, 3, 8
NAN = float("nan")
RAGGED = [(257, 1), (63, 5), (17, 17), (1, 1), (64, 2)]  # (context, width)
ODD = [[(1, 1)], [(17, 1)], [(63, 1), (257, 1)], [(17, 17)], [(63, 3), (64, 1)], RAGGED]


@dataclass(frozen=True)
class Case:
    """q [T, Hq, D] with queries of no row in between; a cache that is NaN past each row's context."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Rows

    def entry(self, row: int, position: int) -> int:
        page = int(self.rows.page_table[row, position // self.rows.page_size])
        return page * self.rows.page_size + position % self.rows.page_size

    def visible(self, row: int, query: int, kv_head: int) -> list[int]:
        """Positions that a query may read, straight from the contract."""
        at = int(self.rows.position[row]) + query
        chosen, sparse = self.rows.selection, self.rows.sparse
        if chosen is None or (sparse is not None and not sparse[row]):
            return list(range(at + 1))
        blocks, count = (x if x.dim() == n else x[kv_head] for x, n in ((chosen.blocks, 2), (chosen.count, 1)))
        size = chosen.block_size
        head = [b * size + i for b in blocks[row, : int(count[row])].tolist() for i in range(size)]
        return [p for p in head if p <= at] + list(range(int(chosen.tail_start[row]), at + 1))

    def weights(self, row: int, query: int, head: int) -> dict[int, float]:
        """Softmax weight of each visible position."""
        kv_head, q = head // GROUP, self.q[int(self.rows.start[row]) + query, head]
        positions = self.visible(row, query, kv_head)
        logits = torch.stack([q @ self.k[self.entry(row, p), kv_head] for p in positions]) * DIM**-0.5
        return dict(zip(positions, logits.softmax(0).tolist()))


def make_case(shape: list[tuple[int, int]], page_size: int = 4, seed: int = 0) -> Case:
    """Rows of (context, width) over shuffled pages; unused page table entries point at a page of NaN."""
    rng = torch.Generator().manual_seed(seed)
    context, width = torch.tensor(shape).T
    pages = -(-context // page_size)
    order = torch.randperm(int(pages.sum()) + 1, generator=rng)
    table = order[-1].repeat(len(shape), int(pages.max()) + 1)
    start = (width + 1).cumsum(0) - width  # one query of nobody before each row
    caches = [torch.full((len(order) * page_size, KV_HEADS, DIM), NAN) for _ in range(2)]
    rows = Rows(start, width, context - width, table, page_size)
    case = Case(torch.randn(int(start[-1] + width[-1]) + 1, KV_HEADS * GROUP, DIM, generator=rng), *caches, rows)
    for row, (length, _) in enumerate(shape):
        first = int(pages[:row].sum())
        table[row, : pages[row]] = order[first : first + int(pages[row])]
        entries = [case.entry(row, p) for p in range(length)]
        for cache in caches:
            cache[entries] = torch.randn(length, KV_HEADS, DIM, generator=rng)
    return case


def select(case: Case, block: int, per_head: bool, seed: int = 0) -> Case:
    """Random ascending blocks before a random tail; entries past count are out of range."""
    rng = torch.Generator().manual_seed(seed)
    rows, scopes = len(case.rows.start), KV_HEADS if per_head else 1
    last = case.rows.position  # a draft row's own tokens are always read
    limit = (torch.rand(rows, generator=rng) * (last // block + 1)).long()
    limit[-1] = last[-1] // block
    blocks = torch.full((scopes, rows, int(limit.max()) + 1), 10**6)
    count = torch.zeros(scopes, rows, dtype=torch.int64)
    for s in range(scopes):
        for r, n in enumerate(limit.tolist()):
            picked = torch.randperm(n, generator=rng)[: (n + 1 + s) // 2].sort().values
            blocks[s, r, : len(picked)], count[s, r] = picked, len(picked)
    if not per_head:
        blocks, count = blocks[0], count[0]
    return replace(case, rows=replace(case.rows, selection=BlockSet(blocks, count, limit * block, block)))


def check_attention(case: Case) -> None:
    """Every query of every row against the loop; no other row of `out` may change, nor q, k or v."""
    before = case.q.clone(), case.k.clone(), case.v.clone()
    out = torch.full_like(case.q, NAN)
    mixed_attention(case.q, case.k, case.v, case.rows, out)
    expected = torch.full_like(out, NAN)
    for row, (start, width) in enumerate(zip(case.rows.start.tolist(), case.rows.width.tolist())):
        for query in range(width):
            for head in range(KV_HEADS * GROUP):
                mixed = [
                    w * case.v[case.entry(row, p), head // GROUP] for p, w in case.weights(row, query, head).items()
                ]
                expected[start + query, head] = torch.stack(mixed).sum(0)
    # fp32 sums of up to 257 terms in another order
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for was, now in zip(before, (case.q, case.k, case.v)):
        assert torch.equal(was.nan_to_num(), now.nan_to_num())


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_dense_attention(shape: list[tuple[int, int]], page_size: int) -> None:
    """A20, A34: ragged widths and contexts in one call; nothing past a context is read, no stray query is written."""
    check_attention(make_case(shape, page_size))


@pytest.mark.parametrize("per_head", [False, True], ids=["request-or-layer", "kv_head"])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_selected_attention(shape: list[tuple[int, int]], block: int, per_head: bool) -> None:
    """A22: only the selected blocks and the tail are read, whatever stands past `count`; blocks are not pages."""
    check_attention(select(make_case(shape), block, per_head))


@pytest.mark.parametrize("per_head", [False, True], ids=["request-or-layer", "kv_head"])
@pytest.mark.parametrize("block", [1, 4, 16])
def test_dense_and_selected_rows_beside_empty_slots(block: int, per_head: bool) -> None:
    """A34: one call for a mixed pass; a row of width 0 reads and writes nothing, whatever its slot still holds."""
    case = select(make_case([(0, 0), *RAGGED, (9, 0)]), block, per_head)
    for sparse in ([True, True, False, True, False, True, True], [False] * 7):
        check_attention(replace(case, rows=replace(case.rows, sparse=torch.tensor(sparse))))
    check_attention(case)
    check_attention(replace(case, rows=replace(case.rows, selection=None, widest=17)))
    idle = replace(case, rows=replace(case.rows, width=torch.zeros(7, dtype=torch.int64), widest=3))
    check_attention(idle)


def test_a_row_reads_the_same_alone_and_in_a_batch() -> None:
    """A34: permuting rows or taking one alone changes nothing beyond rounding."""
    case = select(make_case(RAGGED), 4, per_head=True)
    together, alone = torch.full_like(case.q, NAN), torch.full_like(case.q, NAN)
    mixed_attention(case.q, case.k, case.v, case.rows, together)
    chosen = case.rows.selection
    assert chosen is not None
    for r in reversed(range(len(RAGGED))):
        one = slice(r, r + 1)
        blocks = BlockSet(chosen.blocks[:, one], chosen.count[:, one], chosen.tail_start[one], chosen.block_size)
        start, width, position, table = (
            x[one] for x in (case.rows.start, case.rows.width, case.rows.position, case.rows.page_table)
        )
        mixed_attention(case.q, case.k, case.v, Rows(start, width, position, table, 4, blocks), alone)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 50, 63, 64])
def test_a_context_within_the_budget_is_read_like_a_dense_one(context: int, block: int) -> None:
    """C04: budget 64 tokens, context up to 64: bit-equal to dense attention."""
    case = make_case([(context, 1)])
    selection = TopBlocks(Probe(heads="max"), block, ratio=0.07, floor=64, recent=16)
    scores, length = torch.rand(1, 1, context), torch.tensor([context])
    for seen in {context, max(1, context - 3)}:
        chosen = selection.select(scores, torch.tensor([seen]), length)
        blocks = BlockSet(chosen.blocks[0], chosen.count[0], chosen.tail_start, block)
        dense, sparse = torch.full_like(case.q, NAN), torch.full_like(case.q, NAN)
        mixed_attention(case.q, case.k, case.v, case.rows, dense)
        mixed_attention(case.q, case.k, case.v, replace(case.rows, selection=blocks), sparse)
        assert torch.equal(dense.nan_to_num(), sparse.nan_to_num()) and dense.isfinite().any()


# -- probes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["max", "mean", "group_mean"])
@pytest.mark.parametrize("which", ["first_last", "all"])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_probe_scores(shape: list[tuple[int, int]], which: str, heads: str) -> None:
    """Weights of the counted queries, each over its own past, reduced over heads, then averaged; 0 past the context."""
    case = make_case(shape)
    width = case.rows.width
    if which == "all":
        queries, counts = case.rows.queries, torch.arange(int(width.max())) < width[:, None]
    else:
        queries = torch.stack([case.rows.start, case.rows.start + width - 1], 1)
        counts = torch.stack([width > 0, width > 1], 1)
    got = probe_scores(case.q, case.k, case.rows, queries, counts, heads)
    scopes = KV_HEADS if heads == "group_mean" else 1
    longest = max(context for context, _ in shape)
    assert got.shape == (scopes, len(shape), longest) and got.dtype == torch.float32
    expected = torch.zeros(scopes, len(shape), longest)
    for row, (_, wide) in enumerate(shape):
        probed = list(range(wide)) if which == "all" else sorted({0, wide - 1})
        for query in probed:
            by_head = torch.zeros(KV_HEADS * GROUP, longest)
            for head in range(KV_HEADS * GROUP):
                for position, weight in case.weights(row, query, head).items():
                    by_head[head, position] = weight
            if heads == "group_mean":
                reduced = by_head.view(KV_HEADS, GROUP, longest).mean(1)
            else:
                reduced = (by_head.amax(0) if heads == "max" else by_head.mean(0))[None]
            expected[:, row] += reduced / len(probed)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)
    for row, (context, _) in enumerate(shape):
        assert not got[:, row, context:].any()


# -- selecting and moving -------------------------------------------------------------------------------------------


@given(
    st.integers(1, 3),
    st.sampled_from([1, 17, 63, 257]),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(-3, 80), st.integers(0, 257)), min_size=1, max_size=4),
)
def test_top_blocks(scopes: int, width: int, capacity: int, rows: list[tuple[int, int]]) -> None:
    """The best `take` of the first `limit` blocks in ascending order, never more than there are or than fit."""
    take, limit = (torch.tensor(x) for x in zip(*((t, min(n, width)) for t, n in rows)))
    scores = torch.rand(scopes, len(rows), width, generator=torch.Generator().manual_seed(width))
    blocks, count = top_blocks(scores.clone(), take, limit, capacity)
    assert blocks.shape == (scopes, len(rows), capacity) and count.shape == (scopes, len(rows))
    for s in range(scopes):
        for r, (t, n) in enumerate(zip(take.tolist(), limit.tolist())):
            kept = max(0, min(t, n, capacity))
            best = sorted(range(n), key=lambda b: -float(scores[s, r, b]))[:kept]
            assert blocks[s, r, : int(count[s, r])].tolist() == sorted(best)


def test_top_blocks_takes_infinite_scores_first_and_splits_ties_somehow() -> None:
    """Sinks score infinity; equal scores still give distinct blocks."""
    scores = torch.zeros(1, 1, 63)
    scores[..., :2] = float("inf")
    blocks, count = top_blocks(scores, torch.tensor([17]), torch.tensor([63]), 20)
    chosen = blocks[0, 0, : int(count)].tolist()
    assert chosen[:2] == [0, 1] and chosen == sorted(set(chosen)) and len(chosen) == 17


@pytest.mark.parametrize("tokens", [1, 17, 63, 257])
def test_write_kv_touches_its_entries_only(tokens: int) -> None:
    """Every entry named is overwritten whole, every other one stays as it was (NaN)."""
    caches = [torch.full((300, KV_HEADS, DIM), NAN) for _ in range(2)]
    entries = torch.randperm(300, generator=torch.Generator().manual_seed(tokens))[:tokens]
    new = torch.randn(2, tokens, KV_HEADS, DIM)
    write_kv(*caches, entries, *new)
    for cache, values in zip(caches, new):
        for row, entry in enumerate(entries.tolist()):
            assert torch.equal(cache[entry], values[row])
        assert cache.isnan().all((1, 2)).sum() == 300 - tokens


def test_copy_entries_copies_every_layer_and_nothing_else() -> None:
    """Source and target may overlap: what is copied is what was there before."""
    before = torch.randn(2, 3, 17, KV_HEADS, DIM)  # k and v, layers
    k, v = before.clone()
    source, target = torch.tensor([3, 5, 16, 0]), torch.tensor([5, 1, 2, 3])
    copy_entries(k, v, source, target)
    moved = dict(zip(target.tolist(), source.tolist()))
    for cache, was in zip((k, v), before):
        for entry in range(17):
            assert torch.equal(cache[:, entry], was[:, moved.get(entry, entry)])
