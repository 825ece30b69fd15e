"""How is a whole step launched at once, and when does the host hear of it?

As a CUDA graph, captured once for each shape of pass and replayed ever after.

A step reads and writes fixed tensors, and its shapes follow from `Shape` alone, so a captured one stays right whatever
the slots hold. A shape that comes up unprepared is captured on the spot; such misses are counted, since they cost time.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


@cache
def capture_stream() -> Any:
    """One for all captures: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream()


@dataclass
class Graphs:
    """Captured passes by shape. run(shape) launches a pass eagerly and returns its report, a device tensor.

    idle: a context in which a pass changes nothing, for the run before the capture that compiles and allocates.
    """

    run: Callable[[Any], Tensor]
    idle: Callable[[], Any]
    misses: int = 0
    captured: dict[Hashable, tuple[Any, Tensor]] = field(default_factory=dict)
    pool: Any = None

    def __call__(self, shape: Hashable) -> Tensor:
        """Launch a captured pass; its report is overwritten by the next pass of the same shape."""
        graph, report = self.captured[shape]
        graph.replay()
        return report

    def capture(self, shape: Hashable) -> None:
        """Prepare a shape; what the slots hold stays as it is."""
        with self.idle():
            side = capture_stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.run(shape)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the eager run took: replays never use it
            graph = torch.cuda.CUDAGraph()
            collects = gc.isenabled()
            gc.disable()  # nothing may be freed on the device during a capture
            try:
                with torch.cuda.stream(side):
                    graph.capture_begin(*([] if self.pool is None else [self.pool]))
                    try:
                        report = self.run(shape)
                    finally:
                        graph.capture_end()
            finally:
                if collects:
                    gc.enable()
            self.pool = self.pool or graph.pool()
        self.captured[shape] = (graph, report)


@dataclass
class Flight:
    """A pass that has been launched: its report, on the host once `land` has returned."""

    report: Tensor
    tokens: int  # fed, padding aside
    started: float
    events: tuple[Any, Any] | None = None  # begin and end of its work on the GPU


@dataclass(frozen=True)
class Landing:
    """seconds the pass took: of the device on a GPU, of the clock elsewhere."""

    report: np.ndarray
    tokens: int
    seconds: float


class Launcher:
    """Launches passes and brings their reports to the host. One at most is in flight when the next is launched."""

    def __init__(
        self, run: Callable[[Any], Tensor], idle: Callable[[], Any], device: str, captures: bool,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """run and idle as in `Graphs`; captures: whether passes are captured (a GPU only)."""
        self.on_gpu, self.clock = device.startswith("cuda"), clock
        self.graphs = Graphs(run, idle) if captures else None
        self.run = self.graphs or run
        self._pinned: dict[torch.Size, Tensor] = {}

    def launch(self, shape: Hashable, tokens: int) -> Flight:
        """Start a pass; on a GPU this returns before it has run."""
        started = self.clock()
        if not self.on_gpu:
            return Flight(self.run(shape), tokens, started)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.graphs and shape not in self.graphs.captured:
            self.graphs.misses += 1
            self.graphs.capture(shape)
        begin.record()
        report = self.run(shape)
        if report.shape not in self._pinned:
            self._pinned[report.shape] = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        host = self._pinned[report.shape].copy_(report, non_blocking=True)
        end.record()
        return Flight(host, tokens, started, (begin, end))

    def land(self, flight: Flight) -> Landing:
        """Wait for a pass."""
        if flight.events is None:
            return Landing(flight.report.numpy(), flight.tokens, self.clock() - flight.started)
        begin, end = flight.events
        end.synchronize()
        return Landing(flight.report.numpy().copy(), flight.tokens, begin.elapsed_time(end) / 1e3)

    def settle(self) -> None:
        """Wait until a GPU has done all it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()


@contextmanager
def masked(*flags: Tensor) -> Iterator[None]:
    """Hold boolean tensors at False, then give them back what they held."""
    kept = [flag.clone() for flag in flags]
    try:
        for flag in flags:
            flag.zero_()
        yield
    finally:
        for flag, before in zip(flags, kept, strict=True):
            flag.copy_(before)
