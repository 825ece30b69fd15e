"""Does a pass that is launched before the tokens of the one before are known change anything? As on a GPU, on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from methods import (
    EVERY_METHOD,
    METHODS,
    WARM,
    AtRandom,
    engine_for,
    ids,
    model_of,
    prompts,
    requests,
    run,
    step_through,
)

from aspire.engine import Engine
from aspire.graphs import Flight, Launcher, Notice
from aspire.kernels.report import coming
from aspire.policies import Method
from aspire.settings import EngineSettings
from aspire.state import SlotState

ENDS = (5, 17, 50, 95)


class Hasty(Launcher):
    """Runs a pass when it is launched, and says of the next what a GPU would say, when it would say it."""

    state: Callable[["Hasty"], SlotState]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_gpu = True
        self.aloft: list[Flight] = []

    def launch(self, shape: Any, tokens: int) -> Flight:
        state = self.state()
        assert tokens == coming(state.active, state.verify, state.drafted)[0], "a row is counted that is not there"
        self.notice.take_down()
        flight = Flight(self.run(shape).clone(), tokens, self.clock())
        self.aloft.append(flight)
        assert len(self.aloft) <= 2
        return flight

    def hear(self, flight: Flight) -> list[int]:
        assert flight is (self.aloft or [flight])[-1]
        return self.notice.read(lambda: False)

    def land(self, flight: Flight) -> Any:
        assert flight is self.aloft.pop(0)
        return super().land(flight)

    def settle(self) -> None:
        assert not self.aloft, "a slot is filled while a pass is in flight"


def hasty(method: Method, slots: int, patch: pytest.MonkeyPatch) -> Engine:
    """An engine that launches like that. Padding rows may give NaN, so the model is none that refuses to."""
    settings = EngineSettings(slots=slots, max_len=160, page_size=4, prefill_chunk=16)
    engine = Engine(model_of("llama"), settings, method)
    patch.setattr("aspire.engine.Launcher", Hasty)
    patch.setattr(Hasty, "state", lambda _: engine.state, raising=False)
    return engine


@pytest.mark.parametrize(**EVERY_METHOD)
def test_requests_that_end_unforeseen(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and pages are those of an engine that waits, and an ended request leaves no trace in what is counted.

    In lockstep nobody ends unseen, and no slot stays empty for a round for it: the passes are as many.
    """
    make: Callable[[], Any] = lambda: requests(prompts(9, seed=4), WARM, 44, end_ids=ENDS)  # noqa: E731
    waiting, plain = engine_for("llama", method, 3), make()
    waiting.generate(plain)
    engine, batch = hasty(method, 3, monkeypatch), make()
    free, ahead, ghosts = engine.pool.allocator.free_pages, 0, 0

    def look(_: int) -> None:
        nonlocal ahead, ghosts
        ahead += engine._flight is not None
        ghosts += engine._flight is not None and engine._aboard.active > len(engine.seats.taken())

    step_through(engine, batch, look)
    assert ids(batch) == ids(plain) and [r.finish_reason for r in batch] == [r.finish_reason for r in plain]
    assert {r.finish_reason for r in batch} == {"stop", "length"}
    assert ahead > 5 and not engine.launcher.aloft
    if method.speculation.lockstep and method.speculation.longest:
        assert ghosts == 0 and len(engine.passes) == len(waiting.passes)
    else:
        assert ghosts > 0 and len(engine.passes) <= len(waiting.passes) + ghosts
    assert engine.pool.allocator.free_pages == free and engine._flight is None
    committed = sum(p.committed for p in engine.passes)
    assert committed == sum(len(r.output_ids) - 1 for r in batch)
    rounds = sum(len(r.rounds) for r in batch)
    assert sum(p.kinds.count("V") for p in engine.passes) == rounds


def test_all_requests_end_with_a_pass_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what the last pass says; the next requests find the engine as new."""
    (plain,) = run("llama", METHODS[0], requests(prompts(1), new=20))
    engine = hasty(METHODS[0], 1, monkeypatch)
    for end in plain.output_ids[4:7]:
        (request,) = engine.generate(requests(prompts(1), new=20, end_ids=(end,)))
        assert request.output_ids == plain.output_ids[: plain.output_ids.index(end) + 1]
        assert engine._flight is None and not engine.launcher.aloft


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_what_is_announced_is_what_comes(method: Method) -> None:
    """The four numbers that each pass posts are those that `look` finds after it, for every kind of pass."""
    if method.speculation.longest:
        method = replace(method, speculation=AtRandom(longest=4))
    engine = engine_for("llama", method, 3)
    batch, posted = requests(prompts(3), new=16), list[list[int]]()
    for request in batch:
        engine.submit(request)
    engine.fill_slots()
    engine.stepper.announce = lambda numbers: posted.append(numbers.tolist())
    kinds = set()
    while all(engine.seats):
        engine._reserve()
        shape = engine.stepper.look(engine.state).shape
        kinds.add(shape.kind)
        engine.step()
        if all(engine.seats):
            ahead = engine.stepper.look(engine.state)
            assert posted[-1] == [ahead.tokens, ahead.widest, ahead.verifying, ahead.active]
    assert kinds >= ({"draft", "mixed"} if method.speculation.longest else {"verify"}) and len(posted) > 3


def test_a_notice_is_read_when_it_is_posted_or_the_pass_is_over() -> None:
    notice, asked = Notice(4, "cpu"), list[int]()

    def over() -> bool:
        asked.append(1)
        if len(asked) == 3:
            notice.post(torch.tensor([7, 2, 1, 4]))
        return len(asked) > 5

    assert notice.read(over) == [7, 2, 1, 4] and len(asked) == 3
    notice.take_down()
    assert notice.read(over) == [7, 2, 1, 4] and len(asked) > 5  # over: whatever stands there is what was posted

    def broken() -> bool:
        raise RuntimeError("device lost")

    notice.take_down()
    with pytest.raises(RuntimeError, match="device lost"):
        notice.read(broken)
