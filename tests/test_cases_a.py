"""Cases of group A (exactness): does each known fault of this kind of engine stay away?"""

import copy
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from methods import (
    ASPIRE,
    EVERY_METHOD,
    EVERY_SPECULATIVE,
    IDENTITY,
    METHODS,
    VEGAS,
    WARM,
    AtRandom,
    engine_for,
    ids,
    prompts,
    requests,
    run,
    solo,
    step_through,
)
from torch import Tensor

from aspire.attention import Plan
from aspire.engine import Engine
from aspire.kernels.attention import Rows, mixed_attention
from aspire.policies import Fixed, Method
from aspire.request import Request
from aspire.sampling import Filtered
from aspire.settings import Sampling
from aspire.state import SlotState
from aspire.step import Stepper
from aspire.verify import Drafts, Emulation, Verification, match, reject
from experiments.benchmarks import request_seed

BY_NAME = {m.name: m for m in METHODS}
ASYNC = [BY_NAME[name] for name in ("sparsespec", "aspire_fsm", "aspire", "vegas_async")]
EVERY_ASYNC = {**EVERY_METHOD, "argvalues": ASYNC}
PROMPTS = prompts(8, seed=31)


@cache
def plain(new: int = 24, warm: bool = False) -> list[list[int]]:
    return ids(run("llama", METHODS[0], requests(PROMPTS, WARM if warm else None, new)))


def first(answer: list[int], ends: tuple[int, ...]) -> int:
    """Tokens up to and including the first end id."""
    return 1 + next(i for i, token in enumerate(answer) if token in ends)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a01_end_id_in_the_middle_of_a_draft_block(at: int) -> None:
    """A01: the end id at draft position 1 to 4 and in the bonus slot; drafts that all stand."""
    row = next(i for i, answer in enumerate(plain()) if len(set(answer[:6])) == 6)
    answer = plain()[row]
    (request,) = run("llama", IDENTITY, requests([PROMPTS[row]], end_ids=(answer[at],)))
    assert request.output_ids == answer[: at + 1]
    assert request.finish_reason == "stop"
    assert request.rounds == [(min(at, 4), min(at, 4))]  # one round; what came after the end counts nowhere


@pytest.mark.parametrize("chars", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("at", [1, 2, 5, 6, 11])
def test_a03_stop_string_within_and_across_steps(at: int, chars: int) -> None:
    """A03: a stop string that ends early in a run of nine, or spans tokens and steps, cuts both where it ends."""

    def decode(tokens: list[int]) -> str:
        return "".join(chr(97 + t // 26) + chr(97 + t % 26) + "." for t in tokens)

    answer = plain()[0]
    stop = decode(answer)[3 * at + 1 : 3 * at + 1 + chars]
    length = next(n for n in range(1, len(answer) + 1) if stop in decode(answer[:n]))
    for method in (METHODS[0], replace(IDENTITY, speculation=Fixed(8)), replace(IDENTITY, speculation=Fixed(2))):
        (request,) = run("llama", method, requests(PROMPTS[:1], stop=(stop,), decode=decode))
        assert request.output_ids == answer[:length]
        assert request.finish_reason == "stop"
        assert request.text == decode(answer).split(stop)[0]


def test_a03_stop_string_in_one_step_of_many_tokens() -> None:
    """A03: 'xEND' and six tokens more in one step; then 'E' and 'ND' in two."""
    table = {0: "xEND", 1: "a", 2: "E", 3: "ND", 4: "b"}

    def request() -> Request:
        return Request("r", [1], stop=("END",), decode=lambda tokens: "".join(map(table.__getitem__, tokens)))

    long, split = request(), request()
    assert long.append([0, 1, 1, 1, 1, 1, 1, 1]) == 1
    assert (long.output_ids, long.text, long.finish_reason) == ([0], "x", "stop")
    assert (split.append([4, 2]), split.append([3, 4])) == (2, 1)
    assert (split.output_ids, split.text, split.finish_reason) == ([4, 2, 3], "b", "stop")


@pytest.mark.parametrize("new", range(1, 13))
def test_a05_the_cap_is_delivered_in_full(new: int) -> None:
    """A05: full acceptance, k = 4, no end id: exactly max_new_tokens come, and the counters say so."""
    (request,) = run("llama", IDENTITY, requests(PROMPTS[:1], new=new))
    assert request.output_ids == plain()[0][:new]
    assert request.finish_reason == "length"
    counts = [accepted + 1 for _, accepted in request.rounds]
    assert sum(counts) - (new - 1) in (0, 1)  # a last round cut by the cap has no bonus token


@pytest.mark.parametrize(**EVERY_METHOD)
def test_a06_every_end_id_ends_and_none_when_ignored(method: Method) -> None:
    """A06: the stop set is a union, honoured at its first member; without end ids the answer runs to the cap."""
    for row in (0, 1):
        answer = plain()[row]
        ends = (answer[9], answer[3])
        (request,) = run("llama", method, requests([PROMPTS[row]], end_ids=ends))
        assert request.output_ids == answer[: first(answer, ends)]
        assert request.finish_reason == "stop"
    (ignoring,) = run("llama", method, requests(PROMPTS[:1]))
    assert (ignoring.output_ids, ignoring.finish_reason) == (plain()[0], "length")


# -- batches and seeds -------------------------------------------------------------------------------------------------


def mixed_batch() -> list[Request]:
    """Greedy and sampled rows of distinct seeds and lengths, so that rows finish at different steps."""
    batch = requests(PROMPTS)
    for i, request in enumerate(batch):
        request.sampling = Sampling(0.8 if i % 2 else 0.0, top_k=12, seed=i * 77)
        request.max_new_tokens = 5 + 5 * i % 17
    return batch


@pytest.mark.parametrize("name", ["sparsespec", "aspire"])
def test_a16_rows_equal_their_solo_run(name: str) -> None:
    """A16, G02: B up to 8, temperatures 0 and 0.8 mixed, distinct seeds, rows leave and enter at different steps."""
    alone = ids(solo("llama", METHODS[0], mixed_batch))
    for slots in (2, 3, 5, 8):
        assert ids(run("llama", BY_NAME[name], mixed_batch(), slots=slots)) == alone


def test_a17_repeats_differ_and_do_not_depend_on_the_batch() -> None:
    """A17: eight repeats of a prompt at temperature 0.6 are distinct, and repeat i is the same at batch 1 and 8."""

    def repeats() -> list[Request]:
        seeds = [request_seed(0, "aime/7", i) for i in range(8)]
        return [Request(f"r{i}", PROMPTS[0], Sampling(0.6, seed=s), 16) for i, s in enumerate(seeds)]

    together = ids(run("qwen3", ASPIRE, repeats(), slots=8))
    assert len(set(map(tuple, together))) == 8
    assert ids(run("qwen3", ASPIRE, repeats(), slots=1)) == together


# -- rejected entries --------------------------------------------------------------------------------------------------


def test_a20_rejected_keys_weigh_nothing() -> None:
    """A20, unit: scores [2, 1] with two zero keys behind give weights [.731, .269], not [.610, .225]."""
    k = torch.zeros(4, 1, 16)
    k[0, 0, 0], k[1, 0, 0] = 2.0, 1.0
    q, v = torch.zeros(1, 1, 16), torch.eye(4, 16)[:, None]
    q[..., 0] = 4.0  # times 1 / sqrt(16)
    one = torch.tensor([1])
    out = torch.empty(1, 1, 16)
    mixed_attention(q, k, v, Rows(one - 1, one, one, torch.tensor([[0]]), 4), out)
    torch.testing.assert_close(out[0, 0, :4], torch.tensor([0.7311, 0.2689, 0.0, 0.0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("poison", [False, True])
def test_a20_a_row_that_rejects_all_beside_one_that_accepts_all(poison: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A20, engine: k = 4, row 0 accepts 4 and row 1 none, for more than ten rounds; row 1 says what it says alone."""
    healthy = Stepper._append_drafts

    def spoil(self: Stepper, plan: Plan, state: SlotState, column: Tensor, dist: Filtered, picks: Tensor) -> None:
        healthy(self, plan, state, column, dist, picks)
        state.draft_tokens[1] = (state.draft_tokens[1] + (state.drafted[1] > 0).long()) % 97

    monkeypatch.setattr(Stepper, "_append_drafts", spoil)
    batch = requests(PROMPTS[:2], new=61)
    batch[1].max_new_tokens = 13
    run("llama", replace(IDENTITY, speculation=Fixed(1)), batch, poison=poison)
    assert {a for _, a in batch[1].rounds} == {0}
    assert {a for _, a in batch[0].rounds} == {1}
    batch = requests(PROMPTS[:2], new=61)
    batch[1].max_new_tokens = 13
    monkeypatch.setattr(Stepper, "_append_drafts", lambda *a: (healthy(*a), a[2].draft_tokens[1].fill_(96))[0])
    run("llama", IDENTITY, batch, poison=poison)
    assert len(batch[1].rounds) >= 10
    assert ids(batch) == [plain(61)[0], plain(61)[1][:13]]


def test_a22_a_selection_made_by_a_verify_names_nothing_rejected() -> None:
    """A22, unit: verify at 100 .. 104, token 103 scores best, only 100 stands: nothing from 101 on is selected."""
    for selection in (VEGAS.selection, ASPIRE.selection, BY_NAME["sparsespec"].selection):
        scopes = selection.scopes(2, 2)
        scores = torch.rand(scopes, 1, 105, generator=torch.Generator().manual_seed(0))
        scores[..., 101:] = 50.0
        chosen = selection.select(scores, torch.tensor([101]), torch.tensor([102]))
        assert int(chosen.tail_start) <= 101
        for blocks, count in zip(chosen.blocks[:, 0], chosen.count[:, 0]):
            assert all((b + 1) * selection.block <= 101 for b in blocks[:count].tolist())


def assert_selection_is_final(engine: Engine) -> None:
    """No slot may read a position that the next row does not write and that no earlier row left valid."""
    state = engine.state
    for slot in state.active.nonzero()[:, 0].tolist():
        written = int(state.length[slot] - 1 + state.drafted[slot])  # by the next draft row
        assert int(state.tail_start[slot]) <= written
        for blocks, count in zip(state.blocks[:, slot], state.block_count[:, slot]):
            stops = [(b + 1) * state.block_tokens for b in blocks[:count].tolist()]
            assert all(stop <= int(state.tail_start[slot]) for stop in stops)
            assert stops == sorted(set(stops))


@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_a22_selections_never_outlive_a_rollback(method: Method) -> None:
    """A22, engine: after each step every selection names final positions only; rejected entries are NaN."""
    method = replace(method, speculation=AtRandom())
    engine = engine_for("llama", method, 3)
    step_through(engine, requests(PROMPTS[:5], new=20), lambda _: assert_selection_is_final(engine))


# -- ragged and mixed batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [-1, 0, "agrees"])
@pytest.mark.parametrize("judge", [match, reject], ids=["match", "reject"])
def test_a31_rows_shorter_than_the_widest(judge: object, padding: object) -> None:
    """A31: rows of 5, 3, 1, 0 drafts that all agree: each emits its own length + 1, whatever the padding says."""
    count, columns, vocab = torch.tensor([5, 3, 1, 0]), 5, 11
    said = torch.randint(1, vocab, (4, columns + 1), generator=torch.Generator().manual_seed(0))
    tokens = said[:, :-1].clone()
    if padding != "agrees":
        tokens[torch.arange(columns) >= count[:, None]] = padding  # type: ignore[call-overload]
    wide = torch.arange(vocab).expand(4 * (columns + 1), vocab).contiguous()
    target = Filtered(wide, torch.nn.functional.one_hot(said.flatten(), vocab).float())
    q = Filtered(
        wide.view(4, columns + 1, vocab)[:, 1:].contiguous(),
        torch.nn.functional.one_hot(tokens.clamp(min=0), vocab).float(),
    )
    slots = torch.arange(4)
    verdict = judge(target, Drafts(tokens, count, slots, slots + 9, slots, q))  # type: ignore[operator]
    assert verdict.accepted.tolist() == count.tolist()
    for row, length in enumerate(count.tolist()):
        assert verdict.tokens[row, : length + 1].tolist() == said[row, : length + 1].tolist()


@pytest.mark.parametrize("method", [ASPIRE, VEGAS, IDENTITY], ids=lambda m: m.name)
def test_a34_mixed_batches_in_any_row_order(method: Method) -> None:
    """A34: verifying, drafting, just prefilled (last chunk of one token), empty rows: text and rounds as alone."""
    method = replace(method, speculation=AtRandom(chance=0.3))
    lengths, caps = (17, 33, 9, 2), (24, 18, 12, 4)

    def batch() -> list[Request]:
        made = requests([p[:n] for p, n in zip(prompts(4, shortest=33, longest=45), lengths)], WARM)
        for request, cap in zip(made, caps):
            request.max_new_tokens = cap
        return made

    alone = solo("llama", method, batch)
    for seed in range(4):
        order = random.Random(seed).sample(range(4), 4)
        made = batch()
        engine = engine_for("llama", method, 4)
        engine.generate([made[i] for i in order])
        assert any({"D", "V", "."} <= set(p.kinds) for p in engine.passes)
        assert ids(made) == ids(alone)
        assert [r.rounds for r in made] == [r.rounds for r in alone]


def assert_host_and_device_agree(engine: Engine) -> None:
    for slot, seat in enumerate(engine.seats):
        state = engine.state
        assert bool(state.active[slot]) == (seat is not None)
        if seat is None:
            continue
        request = seat.request
        assert int(state.length[slot]) == request.length
        assert int(state.last_token[slot]) == request.output_ids[-1]
        assert int(state.room[slot]) == request.max_new_tokens - len(request.output_ids) > 0
        assert sum(a + 1 for _, a in request.rounds) + 1 == len(request.output_ids)
        pages = seat.pages.pages
        assert state.page_table[slot, : len(pages)].tolist() == pages
    held = [page for seat in engine.seats if seat for page in seat.pages.pages]
    allocator = engine.pool.allocator
    assert len(set(held)) == len(held) == engine.pool.pages - allocator.free_pages  # D05, at every step


@pytest.mark.parametrize("method", [*ASYNC, IDENTITY], ids=lambda m: m.name)
def test_a35_host_and_device_agree_after_every_step(method: Method) -> None:
    """A35, D05: random accept patterns; length, last token, room and pages are the same on both sides at every step."""
    how = Verification(emulation=Emulation("iid", alpha=0.6))
    engine = engine_for("llama", method, 3, verification=how)
    batch = requests(PROMPTS[:5], new=40)
    for request, end in zip(batch, plain()[0][2:]):
        request.end_ids = (end,)
    step_through(engine, batch, lambda _: assert_host_and_device_agree(engine))
    assert len({pair for r in batch for pair in r.rounds}) >= 4


# -- preemption and look-ahead -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(**EVERY_ASYNC)
@pytest.mark.parametrize("warm", [False, True])
def test_a38_preempted_between_draft_and_verify(method: Method, warm: bool) -> None:
    """A38, D06: r0 finishes, r1 is preempted in mid-draft, twice, r2 has three tokens of room: text as undisturbed."""
    batch = requests(PROMPTS[:3], WARM if warm else None)
    batch[0].max_new_tokens, batch[2].max_new_tokens = 2, 4
    engine = engine_for("llama", method, 3)
    free = engine.pool.allocator.free_pages

    def disturb(step: int) -> None:
        for slot, seat in enumerate(engine.seats):
            if seat and seat.request is batch[1] and int(engine.state.drafted[slot]) and engine.preemptions < 2:
                if step == 1:  # the scenario as told
                    assert batch[0].finished
                    assert int(engine.state.room[2]) == 3
                    assert int(engine.state.drafted[2]) == 1
                engine.preempt(slot)
                assert int(engine.state.drafted[slot]) == 0
                return

    step_through(engine, batch, disturb)
    assert engine.preemptions == 2
    assert ids(batch) == [plain(24, warm)[0][:2], plain(24, warm)[1], plain(24, warm)[2][:4]]
    assert engine.pool.allocator.free_pages == free


@pytest.mark.parametrize("method", [METHODS[0], VEGAS, *ASYNC], ids=lambda m: m.name)
def test_a38_preempted_by_a_full_pool(method: Method) -> None:
    """A38, D06: a pool too small for all slots preempts the youngest; text as undisturbed, no page lost."""
    batch = requests(PROMPTS[:4], WARM)
    pages = 5 + max(-(-(r.length + 24 + method.speculation.longest) // 4) for r in batch)
    engine = engine_for("llama", method, 4, pages=pages)
    engine.generate(batch)
    assert engine.preemptions > 0
    assert ids(batch) == plain(24, True)[:4]
    assert engine.pool.allocator.free_pages == pages


@pytest.mark.parametrize("method", [ASPIRE, VEGAS, METHODS[0]], ids=lambda m: m.name)
def test_a40_a_discarded_step_leaves_no_trace(method: Method) -> None:
    """A40: a step launched ahead and thrown away, every third time, changes neither text nor rounds at T = 0.7."""
    undisturbed = run("llama", method, requests(PROMPTS[:4], WARM), slots=3)
    engine, batch = engine_for("llama", method, 3), requests(PROMPTS[:4], WARM)

    def launch_ahead(step: int) -> None:
        engine.fill_slots()
        if step % 3 == 0 and any(engine.seats):
            engine._reserve()
            state = copy.deepcopy(engine.state)
            engine.stepper.step(state, engine.stepper.look(state).shape)

    step_through(engine, batch, launch_ahead)
    assert ids(batch) == ids(undisturbed)
    assert [r.rounds for r in batch] == [r.rounds for r in undisturbed]


# -- lockstep ----------------------------------------------------------------------------------------------------------

LOCKSTEP = [m for m in METHODS[1:] if m.speculation.lockstep]


@pytest.mark.parametrize("method", LOCKSTEP, ids=lambda m: m.name)
def test_a34_lockstep_stays_in_step_when_slots_are_refilled(method: Method) -> None:
    """A34: with equal fixed draft lengths no pass is mixed, though requests leave and enter."""
    engine, batch = engine_for("llama", method, 3), mixed_batch()
    engine.generate(batch)
    assert {p.kind for p in engine.passes} == {"draft", "verify"}


@pytest.mark.parametrize("method", LOCKSTEP, ids=lambda m: m.name)
def test_a34_lockstep_holds_a_late_joiner_back(method: Method) -> None:
    """A34: a request submitted in mid-round waits for the barrier, so that no later pass is mixed."""
    engine, (early, late) = engine_for("llama", method, 2), requests(PROMPTS[:2])
    engine.submit(early)
    engine.step()
    engine.generate([late])
    assert {p.kind for p in engine.passes[method.speculation.longest + 1 :]} == {"draft", "verify"}
