"""What does a run fix before it starts? Frozen settings of the engine, of sampling and of verification."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """How a request turns logits into tokens; every method applies it to draft and target alike.

    temperature 0 is argmax, whatever the checkpoint says. top_k 0 and top_p 1 switch that filter off.
    Raises ValueError for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 = off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


@dataclass(frozen=True)
class EngineSettings:
    """Sizes of the running batch and of the KV pool.

    slots: requests that run at once. max_len: longest sequence of a request, prompt and answer, in tokens.
    pages: pages of the KV pool, None = enough for every slot at max_len. prefill_chunk: prompt tokens a
    prefill pass takes. poison: fill rejected and freed KV entries with NaN, so that a stale read shows. graphs: launch
    each pass as a CUDA graph, None = where there is a GPU. invariant: a decoded row's result is the same bits whatever
    else is in its pass, and however many tokens it feeds; slower, and does not reach into prefill.
    """

    slots: int
    max_len: int
    page_size: int = 16
    pages: int | None = None
    prefill_chunk: int = 512
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    poison: bool = False
    graphs: bool | None = None
    invariant: bool = False

    def __post_init__(self) -> None:
        if self.graphs and not self.device.startswith("cuda"):
            raise ValueError(f"graphs need a GPU, device is {self.device}; leave graphs at None")
        for name in ("slots", "max_len", "page_size", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
