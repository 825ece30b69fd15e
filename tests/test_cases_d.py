"""Cases D05 and D07: do all pages come back, and does a pause of the drafting leave anything stale behind?"""

from dataclasses import dataclass, replace

import pytest
import torch
from methods import ASPIRE, METHODS, engine_for, ids, prompts, requests, run, step_through
from torch import Tensor

from aspire.policies import Method, Speculation
from aspire.state import SlotState
from aspire.verify import Emulation, Verification

BY_NAME = {m.name: m for m in METHODS}


@pytest.mark.parametrize("method", [BY_NAME["magicdec_stream"], BY_NAME["sparsespec"], ASPIRE], ids=lambda m: m.name)
def test_d05_no_page_leaks(method: Method) -> None:
    """D05: 40 short requests, random accept counts, end ids in mid-block, some preempted: all pages come back."""
    how = Verification(emulation=Emulation("iid", alpha=0.5))
    engine = engine_for("llama", method, 8, verification=how, max_len=32)
    free = engine.pool.allocator.free_pages
    batch = requests(prompts(40, shortest=1, longest=7), new=12, end_ids=(5, 50, 95))

    def preempt_some(step: int) -> None:
        if step % 5 == 0 and engine.seats[step % 8]:
            engine.preempt(step % 8)

    step_through(engine, batch, preempt_some)
    assert {r.finish_reason for r in batch} == {"stop", "length"}
    assert engine.preemptions > 0
    assert engine.pool.allocator.free_pages == free
    assert set(engine.pool.allocator.owners) == {0}


@dataclass(frozen=True)
class Paused(Speculation):
    """Four drafts a round, but none in the rounds first_paused .. resumed - 1."""

    longest: int = 4
    first_paused: int = 2
    resumed: int = 32

    def wants_verify(self, state: SlotState) -> Tensor:
        paused = (state.rounds >= self.first_paused) & (state.rounds < self.resumed)
        return paused | (state.drafted >= self.longest)


@pytest.mark.parametrize("whole", [False, True], ids=["small_budget", "whole_budget"])
@pytest.mark.parametrize("name", ["vegas", "aspire", "sparsespec"])
def test_d07_a_pause_leaves_no_stale_selection(name: str, whole: bool) -> None:
    """D07: 30 rounds without drafts; then the selection is fresh, the text plain, a whole budget accepts everything."""
    method, pause = BY_NAME[name], Paused()
    selection = replace(method.selection, floor=200) if whole else method.selection
    engine, batch = engine_for("llama", replace(method, selection=selection, speculation=pause), 4), prompts(4, seed=31)
    made, resumed = requests(batch, new=70), set()

    def selection_is_fresh(_: int) -> None:
        state = engine.state
        for slot in (state.active & (state.rounds == pause.resumed) & (state.drafted == 0)).nonzero()[:, 0].tolist():
            resumed.add(slot)
            length = int(state.length[slot])
            assert length - 6 <= int(state.tail_start[slot]) < length

    step_through(engine, made, selection_is_fresh)
    assert len(resumed) == 4
    assert ids(made) == ids(run("llama", METHODS[0], requests(batch, new=70)))
    drafted, accepted = torch.tensor([pair for r in made for pair in r.rounds[pause.resumed :]]).sum(0).tolist()
    assert drafted > 40
    assert accepted == drafted or not whole
