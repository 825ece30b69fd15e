"""What do the kernels besides attention take? Launches of each at the sizes of a pass, for the kernel benchmark.

An entry of LAUNCHES makes its inputs and returns a function that launches the kernel so many times, and that number.
Inputs that a pass has just written lie in L2 there as well; those of megabytes come in several copies, which do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aspire.kernels import filter as sampling
from aspire.kernels import judge, scores, select
from aspire.kernels.activation import silu_mul
from aspire.kernels.attention import budget, tuning
from aspire.kernels.blocks import count_below, resolve
from aspire.kernels.heads import Angles, Heads, store_heads
from aspire.kernels.norm import add_rms_norm, rms_norm
from aspire.kernels.work import plan_work

DEVICE, CALLS = "cuda", 24
L2 = 2**27  # bytes that no cache of a GPU holds
Launch = tuple[Callable[[], None], int]
PAGE, LAYERS, KV_HEADS = 16, 28, 8  # Qwen3-1.7B


def in_turn(launch: Callable[..., Any], inputs: list[tuple], calls: int = CALLS) -> Launch:
    """Launch with one set of inputs after the other."""

    def run() -> None:
        for i in range(calls):
            launch(*inputs[i % len(inputs)])

    return run, calls


def filled(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_()


def copies(nbytes: int) -> range:
    """How many sets of inputs of that size are more than L2 holds."""
    return range(max(1, min(CALLS, -(-L2 // nbytes))))


def ints(value: int, count: int) -> Tensor:
    return torch.full((count,), value, device=DEVICE)


def planned(rows: int, context: int, sparse: bool) -> Launch:
    """The split of a pass: of its dense rows, or of every layer's selection."""
    tune = tuning(rows, 1, 2, KV_HEADS, not sparse)
    pieces = budget(tune, torch.device(DEVICE), rows, KV_HEADS, 128)
    base = (ints(1, rows), ints(context - 1, rows), tune.tile, pieces)
    if not sparse:
        return in_turn(plan_work, [base])
    chosen = (ints(1, rows).bool(), ints(6_300, LAYERS * rows).view(LAYERS, rows), ints(context - 128, rows), 1)
    return in_turn(plan_work, [base + chosen])


def table_of(rows: int, context: int) -> Tensor:
    pages = -(-context // PAGE)
    return torch.randperm(rows * pages, device=DEVICE).view(rows, pages)


def blocks_of(scopes: int, rows: int, context: int, block: int, read: int) -> tuple[Tensor, Tensor]:
    """Ascending blocks of every scope, and their counts."""
    count = read // block
    step = context // block // count
    blocks = (torch.arange(count, device=DEVICE) * step).expand(scopes, rows, -1).contiguous()
    return blocks, torch.full((scopes, rows), count, device=DEVICE)


def resolved(scopes: int, block: int) -> Launch:
    rows, context = 12, 90_000
    blocks, count = blocks_of(scopes, rows, context, block, 6_300)
    return in_turn(resolve, [(blocks, count, table_of(rows, context), ints(1, rows).bool(), block, PAGE)])


def trimmed(scopes: int, block: int) -> Launch:
    """Nothing to trim, as in most passes."""
    blocks, count = blocks_of(scopes, 12, 90_000, block, 6_300)
    return in_turn(count_below, [(blocks, count, ints(90_000, 12))])


def filtered(rows: int, vocab: int, candidates: int) -> Launch:
    options = (
        torch.full((rows,), 0.7, device=DEVICE), ints(50, rows), torch.full((rows,), 0.9, device=DEVICE), candidates,
        ints(1, rows), ints(2, rows), 0,
    )  # fmt: skip
    return in_turn(sampling.filter_and_pick, [(filled(rows, vocab), *options) for _ in copies(2 * rows * vocab)])


def judged(rows: int, width: int, k: int) -> Launch:
    """Rejection, each draft from the distribution that judges it, so that all of them stand."""
    ids = (torch.arange(k, device=DEVICE) * 3).expand(rows, width, k).contiguous()
    probs = torch.rand(rows, width, k, device=DEVICE)
    probs /= probs.sum(-1, keepdim=True)
    tokens = ids[:, :-1, 0].contiguous()
    own = (tokens, ints(width - 1, rows), ints(1, rows), ints(90_000, rows), ints(3, rows))
    p, q = (ids.flatten(0, 1), probs.flatten(0, 1)), (ids[:, :-1], probs[:, :-1])
    return in_turn(judge.verdict_triton, [(("reject",), *own, p, q)])


def selected(scopes: int, m: int, capacity: int, rows: list[tuple[int, int]]) -> Launch:
    """Scores as a softmax leaves them, over many orders of magnitude."""
    take, limit = torch.tensor(rows, device=DEVICE).T
    values = filled(scopes, len(rows), m, dtype=torch.float32).mul_(3).softmax(-1)
    return in_turn(select.top_blocks, [(values, take, limit, capacity)], 6)


def reduced(q_heads: int, kv_heads: int, length: int, positions: list[list[int | None]]) -> Launch:
    counts = torch.tensor([[x is not None for x in row] for row in positions], device=DEVICE)
    at = torch.tensor([[x or 0 for x in row] for row in positions], device=DEVICE)
    rows, n = at.shape
    wide = -(-length // 16) * 16  # as the pages of a table are
    logits = filled(rows, n, q_heads, wide, dtype=torch.float16)[..., :length]
    queries = torch.arange(rows * n, device=DEVICE).view(rows, n)
    lse = torch.full((rows * n, q_heads), 18.0, device=DEVICE)
    heads = "max" if q_heads == 2 * kv_heads else "mean"
    out = torch.empty(1, rows, length, device=DEVICE)
    return in_turn(scores.reduce_scores, [(logits, lse, queries, at, counts, kv_heads, heads, out)], 6)


def normed(tokens: int, added: bool) -> Launch:
    x, weight = filled(tokens, 2048), filled(2048)
    return in_turn(add_rms_norm if added else rms_norm, [(x, *([filled(tokens, 2048)] if added else []), weight, 1e-6)])


def stored(tokens: int) -> Launch:
    hq, dim, size = 16, 128, 65_536
    caches = [filled(size, KV_HEADS, dim) for _ in "kv"]
    turns = [filled(tokens, dim // 2, dtype=torch.float32) for _ in "cs"]
    angles = Angles(turns[0].cos(), turns[0].sin(), torch.bfloat16)
    heads = Heads(filled(tokens, (hq + 2 * KV_HEADS) * dim), angles, filled(dim), filled(dim), 1e-6, hq, KV_HEADS)
    return in_turn(store_heads, [(heads, *caches, torch.randperm(size, device=DEVICE)[:tokens])])


LAUNCHES: dict[str, Callable[[], Launch]] = {
    "plan_work, 12 rows of 90,000, once a pass": partial(planned, 12, 90_000, False),
    "plan_work, 12 rows of 90,000, 28 selections, once a pass": partial(planned, 12, 90_000, True),
    "resolve, 12 rows, blocks of 16, once a pass": partial(resolved, 1, 16),
    "resolve, 12 rows, 28 x 6,300 tokens, once a pass": partial(resolved, LAYERS, 1),
    "count_below, 12 rows, 28 x 6,300 tokens, once a pass": partial(trimmed, LAYERS, 1),
    **{f"filter_and_pick, {r} x {v:,}, {k} candidates": partial(filtered, r, v, k) for r, v, k in sampling.BENCHMARK},
    "judge, rejection, 12 rows, 17 wide, 50 candidates": partial(judged, 12, 17, 50),
    **{
        f"top_blocks, {s} x {len(rows)} rows of {m:,}, {rows[0][0]:,} taken": partial(selected, s, m, capacity, rows)
        for s, m, capacity, rows in select.BENCHMARK_CASES
    },
    **{
        f"reduce_scores, {len(at)} rows, {len(at[0])} queries, {hq} heads, {n:,}": partial(reduced, hq, hkv, n, at)
        for hq, hkv, n, at in scores.BENCHMARK_CASES
    },
    **{f"rms_norm, {t} x 2048": partial(normed, t, False) for t in (12, 64)},
    **{f"add_rms_norm, {t} x 2048": partial(normed, t, True) for t in (12, 64)},
    **{
        f"silu_mul, {t} x 6144": (lambda t=t: in_turn(silu_mul, [(filled(t, 2 * 6144),)]))  # type: ignore[misc]
        for t in (12, 64)
    },
    **{f"store_heads, {t} tokens, 16 + 2 x 8 heads of 128": partial(stored, t) for t in (12, 64)},
}
