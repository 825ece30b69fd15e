"""Gate 2: with a budget that covers the context, is every draft accepted, at every position and draft length?

Gate 1 cannot see a fault of the draft side: verify corrects it. Here the draft is the target: one rejection is a
fault.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from methods import ALWAYS, ASPIRE, WARM, AtRandom, by_position, prompts, requests, run

from aspire.kernels.attention import BlockSet, Rows, mixed_attention
from aspire.policies import Everything, Fixed, Method, Probe, Refresh, Selected, Selection, TopBlocks
from baselines.magicdec import SnapKV, Window

FIRST_LAST, ALL = Probe("first_last", None, "mean"), Probe("all", None, "group_mean")
WHOLE: dict[str, Any] = {"floor": 200}  # tokens; no sequence here is longer
VERIFY = Refresh(on=("prefill", "verify"))
KINDS = {
    "everything": Method("everything", Everything()),
    "one_set_refreshed_always": replace(ASPIRE, selection=replace(ASPIRE.selection, **WHOLE)),
    "one_set_no_recent": replace(ASPIRE, selection=replace(ASPIRE.selection, recent=0, **WHOLE)),
    "set_a_layer": Method("l", TopBlocks(FIRST_LAST, block=1, scope="layer", recent=0, **WHOLE), refresh=VERIFY),
    "set_a_kv_head": Method(
        "h", TopBlocks(ALL, block=5, scope="kv_head", recent=0, **WHOLE), refresh=Refresh(on=("verify",))
    ),
    "window": Method("w", Window(sinks=2, **WHOLE), refresh=ALWAYS),
    "snapkv": Method("s", SnapKV(window=4, kernel=3, **WHOLE), refresh=Refresh(on=("prefill",))),
}
PROMPTS = prompts(4, seed=11)


def assert_all_accepted(kind: str, method: Method, longest: int, **kw: Any) -> None:
    """Acceptance is exactly 1 at each of the positions 1 .. longest, and each of them was drafted."""
    done = run(kind, method, requests(PROMPTS, new=2 * longest + 6, **kw))
    for position, (drafted, accepted) in enumerate(by_position(done, longest), 1):
        assert drafted > 0, f"position {position} was never drafted"
        assert accepted == drafted, f"position {position}: {accepted} of {drafted} accepted"


@pytest.mark.parametrize("longest", range(1, 17))
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_reading_everything_accepts_everything(kind: str, longest: int) -> None:
    """Gate 2, A23, A24: draft lengths 1 to 16, ragged batch, shuffled pages."""
    assert_all_accepted(kind, replace(KINDS["everything"], speculation=Fixed(longest)), longest)


@pytest.mark.parametrize("longest", [1, 4, 16])
@pytest.mark.parametrize("name", list(KINDS)[1:])
def test_full_budget_accepts_everything(name: str, longest: int) -> None:
    """Gate 2, A23, A24, C04: the same for every kind of selection."""
    assert_all_accepted("qwen3", replace(KINDS[name], speculation=Fixed(longest)), longest)


@pytest.mark.parametrize("name", KINDS)
def test_full_budget_accepts_everything_out_of_phase(name: str) -> None:
    """Gate 2 with mixed passes and at temperature 0.7: rounds of random lengths, coupled."""
    method = replace(KINDS[name], speculation=AtRandom(longest=6, chance=0.1))
    assert_all_accepted("llama", method, 6, sampling=WARM)


# -- C04: the edge of the budget --------------------------------------------------------------------------------------


def left_out(selected: Selected, block: int, length: int) -> set[int]:
    """Positions below `length` that the first scope of a selection of one row does not name."""
    read = set(range(int(selected.tail_start[0]), length))
    for index in selected.blocks[0, 0, : int(selected.count[0, 0])].tolist():
        named = set(range(index * block, (index + 1) * block))
        assert not read & named, "a position is read twice"
        read |= named
    return set(range(length)) - read


def choose(selection: Selection, seen: int, length: int) -> Selected:
    """Scores fall towards the end, so that the newest tokens would be left out first."""
    scopes = selection.scopes(1, 1)
    scores = torch.linspace(1, 0.1, seen).expand(scopes, 1, seen).contiguous()
    return selection.select(scores, torch.tensor([seen]), torch.tensor([length]))


BUDGET_64 = {
    # selection, tokens left out of a context of 65
    "blocks_of_16": (TopBlocks(Probe(layers=(-2,)), block=16, floor=64, recent=16, sinks=16, ratio=0.07), 16),
    "blocks_of_16_no_recent": (TopBlocks(Probe(layers=(-2,)), block=16, floor=64, recent=0, sinks=16, ratio=0.07), 16),
    "tokens": (TopBlocks(FIRST_LAST, block=1, scope="layer", floor=64, recent=0, sinks=4, ratio=0.07), 1),
    "window": (Window(floor=64, sinks=4, ratio=0.07), 1),
    "snapkv": (SnapKV(floor=64, window=32, ratio=0.07), 1),
}


@pytest.mark.parametrize("name", BUDGET_64)
@pytest.mark.parametrize("context", [1, 15, 16, 17, 50, 63, 64])
def test_a_context_within_the_budget_is_read_whole(name: str, context: int) -> None:
    """C04: budget 64 and context 50, 63, 64: nothing is left out, nothing is read twice."""
    selection, _ = BUDGET_64[name]
    assert left_out(choose(selection, context, context), selection.block, context) == set()
    for seen in range(max(1, context - 17), context):  # after a verify the probe has seen less than the context
        assert left_out(choose(selection, seen, context), selection.block, context) == set()


@pytest.mark.parametrize("name", BUDGET_64)
def test_one_token_too_many_leaves_out_one_block_and_no_sink(name: str) -> None:
    """C04: at 65 exactly one block (one token where blocks are tokens) is left out, never a sink."""
    selection, missing = BUDGET_64[name]
    out = left_out(choose(selection, 65, 65), selection.block, 65)
    assert len(out) == missing
    if hasattr(selection, "sinks"):
        assert min(out) >= selection.sinks


@pytest.mark.parametrize("context", [50, 63, 64])
def test_a_full_selection_is_bit_equal_to_dense(context: int) -> None:
    """C04: the selected row's attention over a whole context is the dense row's, to the bit."""
    g = torch.Generator().manual_seed(context)
    q, k, v = torch.randn(1, 4, 16, generator=g), *torch.randn(2, 64, 2, 16, generator=g)
    one = torch.tensor([1])
    dense = Rows(one - 1, one, one * (context - 1), torch.randperm(16, generator=g)[None], 4)
    chosen = choose(BUDGET_64["blocks_of_16"][0], context - 1, context)
    blocks = BlockSet(chosen.blocks[0], chosen.count[0], chosen.tail_start, 16)
    outs = torch.full((2, 1, 4, 16), float("nan"))
    mixed_attention(q, k, v, dense, outs[0])
    mixed_attention(q, k, v, replace(dense, selection=blocks), outs[1])
    assert outs.isfinite().all()
    assert torch.equal(outs[0], outs[1])
