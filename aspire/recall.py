"""How much of what a layer looks at lies in the top positions of another layer or of an earlier token?

Mass recall@k, in our reading of the paper's diagnostic (arXiv 2609.17943 section 4.3): for a decoded token t in layer l
the oracle is the k positions of largest weight there. A source is the k positions of largest weight in a layer r at
token t - age. Its recall is the weight that layer l has at t on the source's positions, over its weight on the
oracle's: 1 where the source serves as well as the oracle. Weights are those of aspire/trace.py, reduced over heads by
their maximum as ASPIRE reduces them.

Layers that serve are dense while drafting, so a layer's service of itself is left out wherever one token serves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recall:
    """matrix(age) [N, N]: recall of a source layer (row) for a served layer (column), mean over tokens.

    weights [N, T, P] and the k of their tops; ages up to `oldest`, so that all curves are means over the same tokens
    oldest .. T - 1. Raises ValueError where there are too few tokens or positions.
    """

    weights: Tensor
    k: int
    oldest: int

    def __post_init__(self) -> None:
        tokens, positions = self.weights.shape[1:]
        if tokens <= self.oldest or positions < self.k:
            raise ValueError(
                f"{tokens} tokens over {positions} positions are too few for tops of {self.k} and ages up to "
                f"{self.oldest}: decode longer texts after longer prompts"
            )

    def matrix(self, age: int) -> Tensor:
        """Every layer as the source of every layer, `age` tokens old.  # [N, N] fp64"""
        return torch.stack([self._served(layer, age) for layer in range(len(self.weights))], dim=1)

    def _served(self, layer: int, age: int) -> Tensor:
        """Recall of each source layer for `layer`.  # [N]"""
        looked = self.weights[layer, self.oldest :]  # [T', P]
        tops = self._tops[:, self.oldest - age : self._tops.shape[1] - age]  # [N, T', k]
        found = looked.expand(len(tops), -1, -1).gather(2, tops).double().sum(-1)
        return (found / looked.topk(self.k).values.double().sum(-1)).mean(1)

    @cached_property
    def _tops(self) -> Tensor:
        return self.weights.topk(self.k, sorted=False).indices


def same_layer(at: Callable[[int], Tensor], ages: Sequence[int]) -> list[float]:
    """Of each age: the layer itself, so many tokens ago; mean over layers. at: Recall.matrix."""
    return [float(at(age).diagonal().mean()) for age in ages]


def earlier_layer(now: Tensor, offsets: Sequence[int]) -> list[float]:
    """Of each offset: a layer so many below, at the same token; mean over the layers that have one."""
    return [float(now.diagonal(offset).mean()) for offset in offsets]


def one_for_all(matrix: Tensor) -> list[float]:
    """Of each source layer: recall for the other layers, mean over them."""
    n = len(matrix)
    return ((matrix.sum(1) - matrix.diagonal()) / (n - 1)).tolist()


def refreshed(matrix: Tensor, counts: Sequence[int], nearest: bool) -> list[float]:
    """Of each number of refresh layers, spread evenly: recall of the layer that serves each of the others.

    nearest: served by the nearest refresh layer, above or below (a token old: the pass that made it is over); else by
    the last one at or below, as within a pass. One nearest layer alone stands at N-2, where ASPIRE has it.
    """
    n = len(matrix)
    found = []
    for count in counts:
        sources = spread(n, count, nearest)
        served = [layer for layer in range(n) if layer not in sources]
        by = [server(sources, layer, nearest) for layer in served]
        found.append(float(matrix[by, served].mean()))
    return found


def spread(layers: int, count: int, nearest: bool) -> list[int]:
    """`count` refresh layers: in the middle of equal shares where both sides are served, else at their start."""
    if nearest and count == 1:
        return [layers - 2]
    shift = layers / count / 2 if nearest else 0
    return [int(i * layers / count + shift) for i in range(count)]


def server(sources: Sequence[int], layer: int, nearest: bool) -> int:
    """The refresh layer that serves `layer`."""
    if nearest:
        return min(sources, key=lambda source: abs(source - layer))
    return max(source for source in sources if source <= layer)
