"""How much does a row look at each position of its context? Softmax weights of some of its queries, reduced over heads.

Contract of `probe_scores`. q [T, Hq, D], k_cache [M, Hkv, D] of one layer, dense `rows`, queries [R, Q] int64 index
into q, counts [R, Q] bool which of them count. Each query's weights are a softmax over the keys up to its own position.
Per query they are reduced over heads: "max" or "mean" over all query heads, "group_mean" within each KV head's group;
then averaged over the counted queries. Result [1, R, L] (or [Hkv, R, L] for "group_mean") fp32, 0 past a row's context.
It reads the keys again: it serves prompts, and the CPU.

Contract of `reduce_scores`, the same scores from logits that the attention kernel left behind. logits [R, Q, Hq, L]
fp16 or fp32, contiguous in L, the other strides free (a multiple of 16 is faster): scale * q.k * log2(e) at each
position that the query sees; the others may be uninitialised, and so may the logits of a query that does not count.
lse [T, Hq] fp32: log2 of the sum of 2^logit of each query and head. queries [R, Q] int64 index into lse; at [R, Q]
int64 position of each query, which sees positions 0 .. at; counts [R, Q] bool; all three contiguous, and `queries` and
`at` arbitrary where counts is False. out [1, R, L] (or [Hkv, R, L]) fp32, contiguous in L, gets the scores of all L
positions, 0 past the last counted `at`; a row without a counted query is not written.
"""

import torch
from torch import Tensor

from aspire.kernels.attention import Rows, gather_keys
from aspire.kernels.jit import jit, power_of_2, tl, triton, wanted

HEAD_REDUCTIONS = ("max", "mean", "group_mean")
Case = tuple[int, int, int, list[list[int | None]]]


def probe_scores(q: Tensor, k_cache: Tensor, rows: Rows, queries: Tensor, counts: Tensor, heads: str) -> Tensor:
    """Scores of every position of every row; see the contract at the head of this file."""
    kv_heads, dim = k_cache.shape[1:]
    r, n = queries.shape
    group = q.shape[1] // kv_heads
    picked = q[queries].view(r, n, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(r, kv_heads, n * group, dim)
    keys = gather_keys(k_cache, rows.entries, "k")  # [R, Hkv, L, D]
    logits = (picked @ keys.transpose(-1, -2)).float() * dim**-0.5  # [R, Hkv, Q*group, L]
    logits = logits.view(r, kv_heads, n, group, -1)
    positions, real = rows.keys
    at = rows.position[:, None] + queries - rows.start[:, None]  # [R, Q]
    seen = real[:, None] & (positions[:, None] <= at[..., None])  # [R, Q, L]
    weights = logits.masked_fill_(~seen[:, None, :, None], float("-inf")).softmax(-1)
    if heads == "max":
        reduced = weights.amax((1, 3))[:, None]  # [R, 1, Q, L]
    elif heads == "mean":
        reduced = weights.mean((1, 3))[:, None]
    else:
        assert heads == "group_mean", heads
        reduced = weights.mean(3)  # [R, Hkv, Q, L]
    share = counts.float() / counts.sum(1, keepdim=True)
    return torch.einsum("rsql,rq->srl", reduced, share)


def reduce_scores(
    logits: Tensor, lse: Tensor, queries: Tensor, at: Tensor, counts: Tensor, kv_heads: int, heads: str, out: Tensor
) -> None:
    """Logits of probed queries -> out; see the contract at the head of this file."""
    reduce = reduce_scores_triton if wanted(logits) else reduce_scores_torch
    reduce(logits, lse, queries, at, counts, kv_heads, heads, out)


def reduce_scores_torch(
    logits: Tensor, lse: Tensor, queries: Tensor, at: Tensor, counts: Tensor, kv_heads: int, heads: str, out: Tensor
) -> None:
    """The twin."""
    seen = torch.arange(logits.shape[3], device=at.device) <= at[..., None]  # [R, Q, L]
    seen &= counts[..., None]
    norm = lse[torch.where(counts, queries, 0)]  # [R, Q, Hq]
    weights = (logits.float() - norm[..., None]).exp2().masked_fill(~seen[:, :, None], 0.0)  # NaN goes as well
    if heads == "max":
        reduced = weights.amax(2, keepdim=True)  # [R, Q, 1, L]
    elif heads == "mean":
        reduced = weights.mean(2, keepdim=True)
    else:
        assert heads == "group_mean", heads
        reduced = weights.unflatten(2, (kv_heads, -1)).mean(3)  # [R, Q, Hkv, L]
    queries_counted = counts.sum(1)[:, None, None]
    scores = (reduced.sum(1) / queries_counted).transpose(0, 1)
    out.copy_(torch.where(queries_counted[:, 0] > 0, scores, out))


@jit
def _reduce_scores(
    logits, lse, queries, at, counts, out, positions, stride_lr, stride_lq, stride_lh, stride_n, stride_os, stride_or,
    Q: tl.constexpr, Q_LANES: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, tile of positions and scope: GROUP heads of each counted query at once."""
    r = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    scope = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, Q_LANES)
    counted = tl.load(counts + r * Q + lane, mask=lane < Q, other=0).to(tl.int32)
    number = tl.sum(counted, axis=0)
    if number > 0:
        head = tl.arange(0, LANES)
        p = start + tl.arange(0, BLOCK)
        tile = logits + r * stride_lr + (scope * GROUP + head)[:, None] * stride_lh + p[None, :]
        total = tl.zeros((BLOCK,), tl.float32)
        for q in range(Q):
            if tl.load(counts + r * Q + q) != 0:
                last = tl.load(at + r * Q + q)
                if last >= start:
                    query = tl.load(queries + r * Q + q)
                    norm = tl.load(lse + query * stride_n + scope * GROUP + head, mask=head < GROUP, other=0.0)
                    there = (head < GROUP)[:, None] & (p >= 0)[None, :]
                    end = tl.minimum(last + 1, positions)
                    source = tile + tl.cast(q, tl.int64) * stride_lq
                    # A mask that varies along the positions would keep the loads from being wide.
                    if start + BLOCK <= end:
                        x = tl.load(source, mask=there, other=float("-inf"))
                    else:
                        x = tl.load(source, mask=there & (p < end)[None, :], other=float("-inf"))
                    weights = tl.exp2(x.to(tl.float32) - norm[:, None])
                    if MAX:
                        total += tl.max(weights, axis=0)
                    else:
                        total += tl.sum(weights, axis=0)
        if MAX:
            scores = total / number
        else:
            scores = total / (number * GROUP)
        tl.store(out + scope * stride_os + r * stride_or + p, scores, mask=p < positions)


def reduce_scores_triton(
    logits: Tensor, lse: Tensor, queries: Tensor, at: Tensor, counts: Tensor, kv_heads: int, heads: str, out: Tensor
) -> None:
    """The scopes of "group_mean" are a dimension of the grid, since each reads other heads."""
    r, n, q_heads, positions = logits.shape
    scopes = kv_heads if heads == "group_mean" else 1
    assert heads in HEAD_REDUCTIONS, heads
    assert logits.dtype in (torch.float16, torch.float32) and lse.dtype == out.dtype == torch.float32, "dtypes"
    assert out.shape == (scopes, r, positions) and out.stride(2) == logits.stride(3) == lse.stride(1) == 1, "layout"
    assert queries.shape == at.shape == counts.shape == (r, n), "queries, at, counts: [R, Q]"
    assert queries.is_contiguous() and at.is_contiguous() and counts.is_contiguous(), "queries, at, counts: contiguous"
    assert queries.dtype == at.dtype == torch.int64 and counts.dtype == torch.bool, "queries, at int64, counts bool"
    group = q_heads // scopes
    lanes = power_of_2(group)
    block = 1024 if lanes <= 8 else 512
    _reduce_scores[(r, triton.cdiv(positions, block), scopes)](
        logits, lse, queries, at, counts, out, positions, logits.stride(0), logits.stride(1), logits.stride(2),
        lse.stride(0), out.stride(0), out.stride(1), Q=n, Q_LANES=power_of_2(n), GROUP=group, LANES=lanes,
        MAX=heads == "max", BLOCK=block, num_warps=4 if lanes * block <= 8192 else 8,
    )  # fmt: skip


CASES: list[Case] = [  # (Hq, Hkv, L, `at` of each row's queries, None = does not count); L may exceed every context
    (1, 1, 1, [[0]]),
    (6, 2, 63, [[62], [16], [None]]),
    (4, 4, 257, [[200, 256], [0, None], [None, None], [None, 17]]),
    (7, 1, 600, [[10, None, 12], [511, 512, 599], [None, 63, None]]),
]
BENCHMARK_CASES: list[Case] = [  # of an H200 under load: the last verify query, the first and last, all of them
    (16, 8, 90_000, [[89_999]] * 12),
    (28, 4, 17_000, [[16_990, 16_999]] * 64),
    (16, 8, 90_000, [[89_990 + i for i in range(9)] + [None] * 8] * 12),
]
