"""What does MagicDec (arXiv 2408.11049) read while drafting? A sliding window with sinks, or SnapKV's choice.

Sources and deviations: baselines/README.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.kernels.select import top_blocks
from aspire.policies.selection import Probe, Selected, Selection, share


@dataclass(frozen=True)
class Window(Selection):
    """StreamingLLM: the first `sinks` tokens and the newest ones, max(floor, ratio * length) tokens in all.

    Position alone decides, so it asks for no probe; refresh it on every event and the window slides.
    """

    ratio: float = 0.07
    floor: int = 512
    sinks: int = 16
    block: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.sinks < self.floor:
            raise ValueError(f"sinks {self.sinks} must be below the floor of {self.floor} tokens")

    def capacity(self, max_len: int) -> int:
        return max(1, self.sinks)

    def select(self, scores: Tensor | None, seen: Tensor, length: Tensor) -> Selected:
        budget = share(length, self.ratio).clamp(min=self.floor)
        tail_start = (length - (budget - self.sinks)).clamp(min=0)
        count = tail_start.clamp(max=self.sinks)  # a short context never reads a sink twice
        index = torch.arange(self.capacity(0), device=length.device)
        return Selected(index.expand(1, len(length), -1), count[None], tail_start)


@dataclass(frozen=True)
class SnapKV(Selection):
    """The prompt tokens that its last queries look at most, for each KV head of each layer, chosen once at prefill.

    Weights of the last `window` prompt queries are averaged within the query group and pooled over `kernel` neighbours;
    the window itself and everything generated later are read as well.
    """

    ratio: float = 0.07
    floor: int = 512
    window: int = 32
    kernel: int = 5
    block: int = 1
    scope: str = "kv_head"

    def __post_init__(self) -> None:
        if not 0 < self.window < self.floor:
            raise ValueError(f"window {self.window} must be between 1 and the floor of {self.floor} tokens")
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    @property
    def probe(self) -> Probe:  # type: ignore[override]
        return Probe("all", None, "group_mean", prefill_queries=self.window)

    def capacity(self, max_len: int) -> int:
        return max(share(max_len, self.ratio), self.floor)

    def budget(self, length: Tensor) -> Tensor:
        return share(length, self.ratio).clamp(min=self.floor)

    def select(self, scores: Tensor | None, seen: Tensor, length: Tensor) -> Selected:
        assert scores is not None, "SnapKV needs scores"
        tail_start = (seen - self.window).clamp(min=0)
        before = torch.arange(scores.shape[-1], device=scores.device) < tail_start[:, None]
        candidates = torch.where(before, scores, 0)
        pooled = torch.nn.functional.avg_pool1d(candidates, self.kernel, stride=1, padding=self.kernel // 2)
        blocks, count = top_blocks(pooled, self.budget(seen) - self.window, tail_start, self.capacity(scores.shape[-1]))
        return Selected(blocks, count, tail_start)
