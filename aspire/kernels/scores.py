"""How much does a row look at each position of its context? Softmax weights of some of its queries, reduced over heads.

Contract of `probe_scores`. q [T, Hq, D], k_cache [M, Hkv, D] of one layer, dense `rows`, queries [R, Q] int64 index
into q, counts [R, Q] bool which of them count. Each query's weights are a softmax over the keys up to its own position.
Per query they are reduced over heads: "max" or "mean" over all query heads, "group_mean" within each KV head's group;
then averaged over the counted queries. Result [1, R, L] (or [Hkv, R, L] for "group_mean") fp32, 0 past a row's context.
"""

import torch
from torch import Tensor

from aspire.kernels.attention import Rows, gather_keys

HEAD_REDUCTIONS = ("max", "mean", "group_mean")


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
