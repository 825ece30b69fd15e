"""What may a draft row read? A selection turns probe scores into blocks plus a tail that is always read.

A selection never touches attention: it declares a `Probe`, the engine delivers scores. Budgets are given in tokens, so
that one budget serves every block size.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor

from aspire.kernels.scores import HEAD_REDUCTIONS
from aspire.kernels.select import top_blocks

SCOPES = ("request", "layer", "kv_head")


@dataclass(frozen=True)
class Probe:
    """The attention scores a selection asks for.

    queries: "first_last" or "all" of a verify row (a draft row has one, a prefill row gives its last
    `prefill_queries`). layers: which ones, negative from the end, None = all. heads: see kernels/scores.py.
    """

    queries: str = "first_last"
    layers: tuple[int, ...] | None = None
    heads: str = "mean"
    prefill_queries: int = 1

    def __post_init__(self) -> None:
        if self.queries not in ("first_last", "all"):
            raise ValueError(f"probe queries must be first_last or all, got {self.queries}")
        if self.heads not in HEAD_REDUCTIONS:
            raise ValueError(f"probe heads must be one of {HEAD_REDUCTIONS}, got {self.heads}")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))  # a config hands over a list

    def at(self, layers: int) -> tuple[int, ...]:
        """The probed layers of a model with `layers` layers."""
        return tuple(range(layers)) if self.layers is None else tuple(x % layers for x in self.layers)


@dataclass(frozen=True)
class Selected:
    """blocks [S, R, K] int64 ascending, count [S, R], tail_start [R]: positions from there on are read as well."""

    blocks: Tensor
    count: Tensor
    tail_start: Tensor


Count = TypeVar("Count", int, Tensor)


def share(count: Count, ratio: float) -> Count:
    """ceil(count * ratio) with the ratio as it is written: 0.07 is seven hundredths, whatever its binary form."""
    exact = Fraction(ratio).limit_denominator(10**6)
    return (count * exact.numerator + exact.denominator - 1) // exact.denominator


class Selection(ABC):
    """Base of all selections. `block` is in tokens; `scope` says who shares a set: request, layer or kv_head."""

    block: int
    scope: str = "request"
    probe: Probe | None = None

    @abstractmethod
    def capacity(self, max_len: int) -> int:
        """Most blocks ever selected, the tail aside, for sequences of at most max_len tokens."""

    @abstractmethod
    def select(self, scores: Tensor | None, seen: Tensor, length: Tensor) -> Selected:
        """Choose for the next draft rows.

        scores [S, R, L] fp32 by position (None without a probe); seen [R]: positions the first probed query saw (after
        a prefill: the prompt); length [R]: positions the next draft row will see.
        """

    def scopes(self, layers: int, kv_heads: int) -> int:
        assert self.scope in SCOPES, self.scope
        return {"request": 1, "layer": layers, "kv_head": layers * kv_heads}[self.scope]


@dataclass(frozen=True)
class Everything(Selection):
    """No selection: draft rows read the whole context."""

    block: int = 1

    def capacity(self, max_len: int) -> int:
        return 1

    def select(self, scores: Tensor | None, seen: Tensor, length: Tensor) -> Selected:
        none = torch.zeros(1, length.shape[0], 1, dtype=torch.int64, device=length.device)
        return Selected(none, none[..., 0], torch.zeros_like(length))


@dataclass(frozen=True)
class TopBlocks(Selection):
    """The highest-scoring blocks before the tail, within max(floor, ratio * length) tokens.

    ratio, floor, recent, sinks: budget in tokens and shares of it. The last ceil(recent / block) blocks, a partial
    one included, and the first ceil(sinks / block) are always read. tail_in_budget: whether the tail counts against
    the budget.
    Source: ASPIRE section 4.3 (block 16, one set a request), Vegas (block 1, a set a layer), SparseSpec (block 1, a
    set a KV head); the differences are these fields.
    """

    probe: Probe
    block: int = 16
    scope: str = "request"
    ratio: float = 0.07
    floor: int = 512
    recent: int = 128
    sinks: int = 0
    tail_in_budget: bool = True

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ValueError(f"selection scope must be one of {SCOPES}, got {self.scope}")
        if not 0 <= self.ratio <= 1 or self.block < 1 or self.floor < 1 or self.recent < 0 or self.sinks < 0:
            raise ValueError(f"budget out of range: {self}")
        if self.recent and self.recent + self.sinks > self.floor:
            raise ValueError(f"recent {self.recent} + sinks {self.sinks} tokens exceed the floor of {self.floor}")
        if (self.scope == "kv_head") != (self.probe.heads == "group_mean"):
            raise ValueError("a set per kv_head needs a probe with heads=group_mean, and only such a set takes one")

    def budget(self, length: Tensor) -> Tensor:
        """Blocks to read of a context of `length` tokens.  # [R]"""
        return share(self.ceil_blocks(length), self.ratio).clamp(min=self.ceil_blocks(self.floor))

    def ceil_blocks(self, tokens: Count) -> Count:
        return tokens if self.block == 1 else (tokens + self.block - 1) // self.block

    def capacity(self, max_len: int) -> int:
        return max(share(self.ceil_blocks(max_len), self.ratio), self.ceil_blocks(self.floor))

    def select(self, scores: Tensor | None, seen: Tensor, length: Tensor) -> Selected:
        assert scores is not None, "TopBlocks needs scores"
        last = self.ceil_blocks(length) - self.ceil_blocks(self.recent)
        limit = torch.minimum(seen // self.block, last).clamp(min=0)  # blocks before the tail
        tail_start = limit * self.block
        take = self.budget(length)
        if self.tail_in_budget:
            take = take - self.ceil_blocks(length - tail_start)
        blocks, count = top_blocks(self.block_scores(scores), take, limit, self.capacity_for(scores))
        return Selected(blocks, count, tail_start)

    def capacity_for(self, scores: Tensor) -> int:
        return self.capacity(scores.shape[-1])

    def block_scores(self, scores: Tensor) -> Tensor:
        """Sum of token importance over each block; sinks come first.  # [S, R, L / block]"""
        s, r, length = scores.shape
        summed = scores
        if self.block > 1:
            padded = torch.nn.functional.pad(scores, (0, -length % self.block))
            summed = padded.view(s, r, -1, self.block).sum(-1)
        if self.sinks:
            summed = summed.clone() if summed is scores else summed
            summed[..., : self.ceil_blocks(self.sinks)] = float("inf")
        return summed
