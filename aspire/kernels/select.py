"""Which blocks score highest? Top-k per row with its own k, in ascending block order.

Contract of `top_blocks`. scores [S, R, M] fp32, take and limit [R] int64: of the blocks below limit[r] the take[r]
best, written in ascending order to blocks [S, R, capacity]; count [S, R] = min(take, limit, capacity). Entries past
count are unspecified. Ties go either way.
"""

import torch
from torch import Tensor


def top_blocks(scores: Tensor, take: Tensor, limit: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The best blocks of each row; see the contract at the head of this file."""
    s, r, m = scores.shape
    index = torch.arange(m, device=scores.device)
    hidden = scores.masked_fill(index >= limit[:, None], float("-inf"))
    width = min(capacity, m)
    count = torch.minimum(take, limit).clamp(0, width)
    best = hidden.topk(width, dim=-1).indices
    past = torch.arange(width, device=scores.device) >= count[:, None]
    ordered = best.masked_fill(past, m).sort(-1).values
    blocks = torch.zeros(s, r, capacity, dtype=torch.int64, device=scores.device)
    blocks[..., :width] = ordered
    return blocks, count.expand(s, r)
