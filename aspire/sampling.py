"""How do logits become the distribution that is sampled from, and a token?

A filtered distribution is kept compact, in the field's usual order of operations (temperature, top-k, top-p): ids
[R, K] ascending, probs [R, K] fp32 summing to 1, 0 where nothing is kept. K is the largest top-k of the batch, or V if
a request has none. Draft and target go through the same function, so q is the distribution the draft came from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.kernels import filter as kernels


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
    """Logits [R, V] fp32 or bf16 -> what is sampled from. Rows at temperature 0 put everything on the argmax.

    temperature fp32, top_k int64, top_p fp32, all [R]; candidates K bounds every top_k of the batch.
    """
    return Filtered(*kernels.filter_logits(logits, temperature, top_k, top_p, candidates))


def pick(dist: Filtered, seed: Tensor, position: Tensor, purpose: int) -> Tensor:
    """One token a row: argmax(log p + Gumbel noise keyed by (seed, position, purpose, token)).  # [R]"""
    return kernels.pick_torch(dist.ids, dist.probs, seed, position, purpose)


def filter_and_pick(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int,
    seed: Tensor, key: Tensor, purpose: int,
) -> tuple[Filtered, Tensor]:  # fmt: skip
    """`filter_logits`, and `pick` with noise keyed by (seed, key, purpose, token), in one launch on a GPU.

    Tokens that are to agree (coupled drafts and targets) must all come from here or all from `pick`: on a GPU the two
    may round a near tie differently.
    """
    ids, probs, picks = kernels.filter_and_pick(logits, temperature, top_k, top_p, candidates, seed, key, purpose)
    return Filtered(ids, probs), picks
