"""How is a whole step launched at once, and when does the host hear of it?

As a CUDA graph, captured once for each shape of pass and replayed ever after. The host hears of the next pass while
this one still runs, and of what this one did once it has ended.

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


class Notice:
    """A few numbers that a pass leaves for the host while it runs; on a CPU, whose passes block, nobody reads them."""

    def __init__(self, numbers: int, device: str) -> None:
        on_gpu = device.startswith("cuda")
        self._numbers = torch.zeros(numbers, dtype=torch.int64, pin_memory=on_gpu)
        self._posted = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._flag = self._posted.numpy()

    def post(self, numbers: Tensor) -> None:
        """Part of a step. Copies of one stream arrive in order, the flag last."""
        self._numbers.copy_(numbers, non_blocking=True)
        self._posted.copy_(self._one, non_blocking=True)

    def take_down(self) -> None:
        """The next pass will post another; none may be on its way."""
        self._flag[0] = 0

    def read(self, over: Callable[[], bool]) -> list[int]:
        """Wait until it is posted; over: whether the pass has ended, which raises what went wrong on the device."""
        while not self._flag[0] and not over():
            pass
        return [int(number) for number in self._numbers]


class Launcher:
    """Launches passes and brings their reports to the host. Two at most are in flight."""

    def __init__(
        self, run: Callable[[Any], Tensor], idle: Callable[[], Any], device: str, captures: bool,
        clock: Callable[[], float], notice: Notice,
    ) -> None:  # fmt: skip
        """run and idle as in `Graphs`; captures: whether passes are captured (a GPU only); each posts the notice."""
        self.on_gpu, self.clock, self.notice = device.startswith("cuda"), clock, notice
        self.graphs = Graphs(run, idle) if captures else None
        self.run = self.graphs or run
        self._pinned: dict[tuple[torch.Size, int], Tensor] = {}
        self._turn = 0

    def launch(self, shape: Hashable, tokens: int) -> Flight:
        """Start a pass; on a GPU this returns before it has run."""
        started = self.clock()
        if not self.on_gpu:
            return Flight(self.run(shape), tokens, started)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.graphs and shape not in self.graphs.captured:
            self.graphs.misses += 1
            self.graphs.capture(shape)
        self.notice.take_down()
        begin.record()
        report = self.run(shape)
        self._turn ^= 1  # the report of the pass before may not have been read yet
        place = report.shape, self._turn
        if place not in self._pinned:
            self._pinned[place] = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        host = self._pinned[place].copy_(report, non_blocking=True)
        end.record()
        return Flight(host, tokens, started, (begin, end))

    def hear(self, flight: Flight) -> list[int]:
        """What the last pass launched says of the next, at the latest when it ends; on a GPU."""
        assert flight.events is not None
        return self.notice.read(flight.events[1].query)

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
