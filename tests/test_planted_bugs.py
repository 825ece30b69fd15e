"""Would the gates notice? Each bug is planted by replacing one function; the named check must fail on it.

Every check is first run on the healthy engine, where it must hold.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from methods import ASPIRE, IDENTITY, METHODS, ids, prompts, requests, run
from torch import Tensor

import aspire.verify
from aspire.attention import PassRows, Plan
from aspire.kernels.attention import Rows
from aspire.model.decoder import Decoder
from aspire.policies import Fixed, Method, Probe, Refresh, TopBlocks
from aspire.sampling import Filtered
from aspire.state import SlotState
from aspire.step import Stepper
from aspire.verify import Drafts, Verdict

PROMPTS = prompts(3, seed=21)
# Chosen anew while drafting and never after a verify, without a recent tail: only the trim at rollback keeps it honest.
# The budget exceeds the short contexts, so that some selections are padded.
STALE = Method(
    "stale",
    TopBlocks(Probe("first_last", (0,), "max"), block=2, ratio=0.1, floor=40, recent=0),
    Fixed(6),
    Refresh(on=("prefill", "draft"), dense=(0,)),
)


# -- checks: True where the engine is sound ----------------------------------------------------------------------------


def text_is_autoregressive() -> bool:
    """Gate 1."""
    method = replace(ASPIRE, speculation=Fixed(5))
    return ids(run("llama", method, requests(PROMPTS))) == ids(run("llama", METHODS[0], requests(PROMPTS)))


def identity_drafts_are_accepted() -> bool:
    """Gate 2."""
    rounds = [pair for r in run("llama", IDENTITY, requests(PROMPTS)) for pair in r.rounds]
    return all(drafted == accepted for drafted, accepted in rounds)


def no_stale_entry_is_read() -> bool:
    """A22: rejected entries are NaN, and the model of `run` fails at one; a tail past a row's end is an error."""
    try:
        run("llama", STALE, requests(PROMPTS))
    except (AssertionError, RuntimeError) as error:
        assert "NaN reached a logit" in str(error) or "inconsistent with step sign" in str(error)
        return False
    return True


# -- bugs --------------------------------------------------------------------------------------------------------------


def accept_one_too_many(patch: pytest.MonkeyPatch) -> None:
    healthy = aspire.verify.match

    def match(target: Filtered, drafts: Drafts, picks: Tensor | None) -> Verdict:
        verdict = healthy(target, drafts, picks)
        return replace(verdict, accepted=torch.minimum(verdict.accepted + 1, drafts.count))

    patch.setattr(aspire.verify, "match", match)


def emit_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    healthy = aspire.verify.match

    def match(target: Filtered, drafts: Drafts, picks: Tensor | None) -> Verdict:
        verdict = healthy(target, drafts, picks)
        return replace(verdict, tokens=verdict.tokens.roll(-1, 1))

    patch.setattr(aspire.verify, "match", match)


def compare_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    healthy = aspire.verify.match

    def match(target: Filtered, drafts: Drafts, picks: Tensor | None) -> Verdict:
        return healthy(target, replace(drafts, tokens=drafts.tokens.roll(-1, 1)), picks)

    patch.setattr(aspire.verify, "match", match)


def draft_misses_its_last_token(patch: pytest.MonkeyPatch) -> None:
    healthy = PassRows.chosen

    def chosen(self: PassRows, layer: int) -> Rows:
        rows = healthy(self, layer)  # attention only: rotary angles and entries stay
        return replace(rows, position=torch.where(self.plan.draft, rows.position - 1, rows.position))

    patch.setattr(PassRows, "chosen", chosen)


def draft_position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    healthy_init, healthy_forward = PassRows.__init__, Decoder.forward

    def remember(self: PassRows, plan: Plan, *args: object, **kw: object) -> None:
        plans.append(plan)
        healthy_init(self, plan, *args, **kw)  # type: ignore[arg-type]

    def forward(self: Decoder, tokens: Tensor, positions: Tensor, attend: object) -> Tensor:
        if plans and plans[-1].tokens == len(tokens):
            positions = positions + plans[-1].draft[plans[-1].feed.row].long()
            plans.clear()
        return healthy_forward(self, tokens, positions, attend)  # type: ignore[arg-type]

    patch.setattr(PassRows, "__init__", remember)
    patch.setattr(Decoder, "forward", forward)


def selection_not_trimmed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stepper, "_trim_selection", lambda self, state, verified: None)


def only_the_tail_trimmed(patch: pytest.MonkeyPatch) -> None:
    def trim(self: Stepper, state: SlotState, verified: Tensor) -> None:
        tail = torch.minimum(state.tail_start, state.length - 1)
        state.tail_start.copy_(torch.where(verified, tail, state.tail_start))

    patch.setattr(Stepper, "_trim_selection", trim)


PLANTED = [
    (accept_one_too_many, text_is_autoregressive),
    (emit_shifted_by_one, text_is_autoregressive),
    (compare_shifted_by_one, identity_drafts_are_accepted),
    (draft_misses_its_last_token, identity_drafts_are_accepted),
    (draft_position_off_by_one, identity_drafts_are_accepted),
    (selection_not_trimmed, no_stale_entry_is_read),
    (only_the_tail_trimmed, no_stale_entry_is_read),
]


@pytest.mark.parametrize(("plant", "check"), PLANTED, ids=lambda f: f.__name__)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check holds on the healthy engine and fails on the planted one."""
    assert check(), f"{check.__name__} fails on the healthy engine"
    plant(monkeypatch)
    assert not check(), f"{check.__name__} did not notice {plant.__name__}"


@pytest.mark.parametrize("plant", [draft_misses_its_last_token, draft_position_off_by_one])
def test_bugs_of_the_draft_side_leave_the_text_alone(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why gate 2 exists: the text stays autoregressive, so gate 1 sees none of these."""
    plant(monkeypatch)
    assert text_is_autoregressive()


# -- the trim itself ---------------------------------------------------------------------------------------------------


def selected_state(blocks: list[int], count: int, tail_start: int, length: int, block: int) -> SlotState:
    """One slot whose next row writes position length - 1."""
    state = SlotState.empty(1, 16, 8, 1, len(blocks), block, 1, "cpu")
    state.active[0], state.length[0], state.tail_start[0], state.block_count[0, 0] = True, length, tail_start, count
    state.blocks[0, 0] = torch.tensor(blocks)
    return state


@pytest.mark.parametrize(
    ("blocks", "count", "tail_start", "length", "kept", "tail"),
    [
        ([1, 5, 9], 3, 12, 30, 3, 12),  # nothing was taken back
        ([1, 5, 9], 3, 12, 6, 1, 5),  # blocks 5 and 9 went
        ([1, 5, 9], 3, 12, 8, 2, 7),
        ([1, 5, 9, 0, 0], 3, 12, 6, 1, 5),  # entries past the count are no blocks
        ([1, 5, 9, 20, 20], 3, 12, 6, 1, 5),
    ],
)
def test_trim_drops_what_was_taken_back(
    blocks: list[int], count: int, tail_start: int, length: int, kept: int, tail: int
) -> None:
    """A22: after a rollback to `length`, no selected block and no tail may begin past what is final."""
    state = selected_state(blocks, count, tail_start, length, block=1)
    Stepper._trim_selection(None, state, torch.tensor([True]))  # type: ignore[arg-type]
    assert (int(state.block_count[0, 0]), int(state.tail_start[0])) == (kept, tail)


def test_trim_never_drops_the_last_committed_token() -> None:
    """A22: the next row's own position stays readable, whatever the block size."""
    for block in (1, 3, 16):
        for length in range(1, 40):
            state = selected_state([0, 1, 2], 3, 48, length, block)
            Stepper._trim_selection(None, state, torch.tensor([True]))  # type: ignore[arg-type]
            tail, count = int(state.tail_start[0]), int(state.block_count[0, 0])
            assert tail <= length - 1
            assert all(b * block + block <= tail for b in state.blocks[0, 0, :count].tolist())
