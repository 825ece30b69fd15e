"""Do the kernels that score and select agree with their twins? Interpreted on a CPU, compiled where there is a GPU."""

import pytest
import torch
from torch import Tensor

from aspire.kernels import scores as scoring
from aspire.kernels import select as selecting
from aspire.kernels.jit import triton
from aspire.kernels.scores import HEAD_REDUCTIONS, reduce_scores_torch, reduce_scores_triton
from aspire.kernels.select import top_blocks, top_blocks_torch, top_blocks_triton
from aspire.policies import Probe, TopBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
needs_triton = pytest.mark.skipif(triton is None, reason="needs triton")


def distinct(shape: tuple[int, ...], seed: int) -> Tensor:
    """Weights over many orders of magnitude, no two of a row alike."""
    rng = torch.Generator().manual_seed(seed)
    ranks = torch.rand(shape, generator=rng).argsort(-1)
    return torch.exp2(-30 * ranks.float() / shape[-1]).to(DEVICE)


def poisoned(scores: Tensor, limit: Tensor) -> Tensor:
    """NaN at and past each row's limit."""
    index = torch.arange(scores.shape[-1], device=DEVICE)
    return scores.masked_fill(index >= limit[:, None], NAN)


def chosen(result: tuple[Tensor, Tensor]) -> list[list[int]]:
    """The ids of each scope and row."""
    blocks, count = (x.flatten(0, 1).tolist() for x in result)
    return [ids[:n] for ids, n in zip(blocks, count)]


def check_plateaus(scores: Tensor, take: Tensor, limit: Tensor, capacity: int, widest: int) -> None:
    """Where scores are equal the ids may differ, not the scores taken; the kernel takes the lower ids."""
    ours = chosen(top_blocks_triton(scores, take, limit, capacity, widest))
    twins = chosen(top_blocks_torch(scores, take, limit, capacity))
    for row, ids, theirs, n in zip(scores.flatten(0, 1), ours, twins, limit.tolist() * len(scores)):
        assert len(ids) == len(theirs) and ids == sorted(set(ids)) and all(0 <= b < n for b in ids)
        assert sorted(row[ids].tolist()) == sorted(row[theirs].tolist())
        best = sorted(range(n), key=lambda b: (-float(row[b]), b))
        assert ids == sorted(best[: len(ids)])


def inputs(case: int) -> tuple[int, int, Tensor, Tensor, int]:
    scopes, m, capacity, rows = selecting.CASES[case]
    take, limit = torch.tensor(rows, device=DEVICE).T
    return scopes, m, take, limit, capacity


@needs_triton
@pytest.mark.parametrize("widest", [256, 8192], ids=["chunks", "one-tile"])
@pytest.mark.parametrize("case", range(len(selecting.CASES)))
class TestTopBlocks:
    """take 0, 1, below zero, more than limit or capacity; limit 0; rows of one scope strided."""

    def test_distinct_scores(self, case: int, widest: int) -> None:
        """The same ids and counts, whatever stands past the limit."""
        scopes, m, take, limit, capacity = inputs(case)
        wide = torch.full((scopes, len(take), m + 3), NAN, device=DEVICE)
        wide[..., :m] = poisoned(distinct((scopes, len(take), m), case), limit)
        scores = wide[..., :m]
        before = wide.clone()
        ours = top_blocks_triton(scores, take, limit, capacity, widest)
        twins = top_blocks_torch(scores, take, limit, capacity)
        assert ours[0].shape == (scopes, len(take), capacity) and ours[0].dtype == ours[1].dtype == torch.int64
        assert torch.equal(ours[1], twins[1]) and chosen(ours) == chosen(twins)
        assert torch.equal(wide.nan_to_num(7.0), before.nan_to_num(7.0))

    def test_plateaus(self, case: int, widest: int) -> None:
        """Few different scores: infinity, both zeros, a denormal, negative ones and minus infinity among them."""
        scopes, m, take, limit, capacity = inputs(case)
        values = torch.tensor([INF, 3.0, 2.0**-20, 1e-40, 0.0, -0.0, -5.0], device=DEVICE)
        rng = torch.Generator().manual_seed(case)
        pick = torch.randint(0, len(values), (scopes, len(take), m), generator=rng)
        check_plateaus(poisoned(values[pick.to(DEVICE)], limit), take, limit, capacity, widest)
        check_plateaus(poisoned(torch.zeros(pick.shape, device=DEVICE), limit), take, limit, capacity, widest)

    def test_nan_comes_last(self, case: int, widest: int) -> None:
        """Below the limit NaN is taken where nothing else is left."""
        scopes, m, take, limit, capacity = inputs(case)
        scores = distinct((scopes, len(take), m), case)
        scores[..., ::3] = NAN
        result = top_blocks_triton(scores, take, limit, capacity, widest)
        for ids, theirs, n in zip(
            chosen(result), chosen(top_blocks_torch(scores, take, limit, capacity)), limit.tolist() * scopes
        ):
            real = n - len(range(0, n, 3))
            assert [b for b in ids if b % 3] == [b for b in theirs if b % 3] and len(ids) == len(theirs)
            assert sum(b % 3 > 0 for b in ids) == min(real, len(ids)) and all(b < n for b in ids)


@needs_triton
def test_minus_infinity_and_neighbouring_floats() -> None:
    """The bisection ends at either end of the range and between numbers one bit apart."""
    one = int(torch.tensor(1.0).view(torch.int32))
    near = torch.tensor([one + 3, one + 1, one + 2, one, one + 4], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([-INF, INF, -INF, INF, -INF])
    scores = torch.stack([near, -near, ends, ends])[None].to(DEVICE)
    for take in range(6):
        takes, limit = (torch.full((4,), n, device=DEVICE) for n in (take, 5))
        check_plateaus(scores, takes, limit, 5, 128)


# -- scores ---------------------------------------------------------------------------------------------------------


def probed(case: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Logits that are NaN where no query sees or counts, in a wider buffer; indices out of range where none counts."""
    q_heads, kv_heads, length, positions = scoring.CASES[case]
    rng = torch.Generator().manual_seed(case)
    counts = torch.tensor([[x is not None for x in row] for row in positions])
    at = torch.tensor([[10**9 if x is None else x for x in row] for row in positions])
    rows, n = at.shape
    order = torch.randperm(rows * n + 2, generator=rng)
    queries = torch.where(counts, order[: rows * n].view(rows, n), 10**9)
    logits = torch.full((rows, n, q_heads, length + 5), NAN, dtype=dtype)[..., :length]
    lse = torch.full((len(order), q_heads), NAN)
    for r, q in counts.nonzero().tolist():
        seen = int(at[r, q]) + 1
        logits[r, q, :, :seen] = 4 * torch.randn(q_heads, seen, generator=rng)
        lse[queries[r, q]] = torch.log2(logits[r, q, :, :seen].float().exp2().sum(-1))
    moved = (x.to(DEVICE) for x in (logits, lse, queries, at, counts))
    return (*moved, kv_heads)  # type: ignore[return-value]


@needs_triton
@pytest.mark.parametrize("heads", HEAD_REDUCTIONS)
@pytest.mark.parametrize("case", range(len(scoring.CASES)))
def test_reduce_scores(case: int, heads: str) -> None:
    """Kernel against twin and twin against a softmax; rows without a counted query stay NaN."""
    logits, lse, queries, at, counts, kv_heads = probed(case)
    rows, n, q_heads, length = logits.shape
    scopes = kv_heads if heads == "group_mean" else 1
    ours = torch.full((scopes, rows, length + 2), NAN, device=DEVICE)[..., :length]
    twins = ours.clone()
    reduce_scores_triton(logits, lse, queries, at, counts, kv_heads, heads, ours)
    reduce_scores_torch(logits, lse, queries, at, counts, kv_heads, heads, twins)
    # fp32 sums of a few terms in another order; exp2 of a GPU is good to two units in the last place
    torch.testing.assert_close(ours, twins, rtol=1e-5, atol=1e-9, equal_nan=True)
    expected = torch.full_like(ours, NAN)
    for r in range(rows):
        counted = [(q, int(at[r, q]) + 1) for q in range(n) if counts[r, q]]
        if counted:
            expected[:, r] = 0
        for q, seen in counted:
            weights = (logits[r, q, :, :seen] * torch.log(torch.tensor(2.0))).softmax(-1)
            by_scope = weights.view(scopes, -1, seen)
            reduced = by_scope.amax(1) if heads == "max" else by_scope.mean(1)
            expected[:, r, :seen] += reduced / len(counted)
    torch.testing.assert_close(twins, expected, rtol=1e-4, atol=1e-9, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("heads", HEAD_REDUCTIONS)
def test_reduce_scores_takes_half_precision(heads: str) -> None:
    """Kernel and twin read the same rounded logits; nothing is computed in half precision."""
    logits, lse, queries, at, counts, kv_heads = probed(2, torch.float16)
    out = [torch.full((kv_heads if heads == "group_mean" else 1, *logits.shape[::3]), NAN, device=DEVICE) for _ in "ab"]
    reduce_scores_triton(logits, lse, queries, at, counts, kv_heads, heads, out[0])
    reduce_scores_torch(logits, lse, queries, at, counts, kv_heads, heads, out[1])
    torch.testing.assert_close(*out, rtol=1e-5, atol=1e-9, equal_nan=True)


# -- what a captured graph asks of a selection ------------------------------------------------------------------------


@pytest.mark.parametrize("block, sinks", [(1, 0), (1, 3), (4, 0), (4, 3)])
def test_block_scores_copy_only_what_they_change(block: int, sinks: int) -> None:
    """Blocks of one token are the scores themselves; the argument is never written to."""
    policy = TopBlocks(Probe(), block, floor=32, recent=4, sinks=sinks)
    scores = torch.rand(2, 3, 17)
    before = scores.clone()
    summed = policy.block_scores(scores)
    assert torch.equal(scores, before) and (summed is scores) == (block == 1 and not sinks)
    padded = torch.cat([before, torch.zeros(2, 3, -17 % block)], -1).view(2, 3, -1, block).sum(-1)
    padded[..., : -(-sinks // block)] = INF
    assert torch.equal(summed, padded)


@pytest.mark.parametrize("ratio", [0.0, 0.07, 0.1, 1.0])
@pytest.mark.parametrize("block", [1, 16])
def test_capacity_is_the_budget_of_the_longest(block: int, ratio: float) -> None:
    policy = TopBlocks(Probe(), block, ratio=ratio, floor=32, recent=4)
    for length in (1, 17, 457, 1000, 3200, 90_000):
        assert policy.capacity(length) == int(policy.budget(torch.tensor(length)))


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU goes through the twin")
def test_a_cpu_selects_by_the_twin() -> None:
    scores, take, limit = torch.rand(1, 1, 17), torch.tensor([3]), torch.tensor([17])
    assert chosen(top_blocks(scores, take, limit, 4)) == chosen(top_blocks_torch(scores, take, limit, 4))
