"""How do logits become the distribution that is sampled from, and a token?

A filtered distribution is kept compact, in the field's usual order of operations (temperature, top-k, top-p): ids
[R, K] ascending, probs [R, K] fp32 summing to 1, 0 where nothing is kept. K is the largest top-k of the batch, or V if
a request has none. Draft and target go through the same function, so q is the distribution the draft came from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.kernels.noise import gumbel


@dataclass(frozen=True)
class Filtered:
    """Distributions after temperature, top-k and top-p: ids [R, K] int64 ascending, probs [R, K] fp32."""

    ids: Tensor
    probs: Tensor

    def lookup(self, ids: Tensor) -> Tensor:
        """Probabilities of ids [R, M], 0 for those not kept.  # [R, M]"""
        at = torch.searchsorted(self.ids.contiguous(), ids.contiguous()).clamp(max=self.ids.shape[1] - 1)
        return torch.where(self.ids.gather(1, at) == ids, self.probs.gather(1, at), 0.0)

    def rows(self, index: Tensor) -> "Filtered":
        return Filtered(self.ids[index], self.probs[index])


def filter_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int) -> Filtered:
    """Logits [R, V] fp32 -> what is sampled from. Rows at temperature 0 put everything on the argmax.

    temperature fp32, top_k int64, top_p fp32, all [R]; candidates K bounds every top_k of the batch.
    """
    greedy = temperature == 0
    values, ids = logits.topk(candidates, dim=-1)  # descending
    rank = torch.arange(candidates, device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    scaled = (values / torch.where(greedy, 1.0, temperature)[:, None]).masked_fill(~keep, float("-inf"))
    probs = scaled.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the better tokens; the first token is always kept
    keep = keep & (before < top_p[:, None]) | (rank == 0)
    probs = scaled.masked_fill(~keep, float("-inf")).softmax(-1)
    # topk breaks ties in no fixed order, argmax takes the first: greedy decoding must not depend on topk.
    first = rank == 0
    ids = torch.where(greedy[:, None] & first, logits.argmax(-1, keepdim=True), ids)
    probs = torch.where(greedy[:, None], first.float(), probs)
    order = ids.sort(stable=True, dim=-1)
    return Filtered(order.values, probs.gather(1, order.indices))


def pick(dist: Filtered, seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """One token a row: argmax(log p + Gumbel noise keyed by (seed, position, purpose, token)).  # [R]"""
    noisy = dist.probs.log() + gumbel(seed, position, purpose, dist.ids)
    return dist.ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
