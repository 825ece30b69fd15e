"""Do the policies decide by the published rules? Hand-written batches, published numbers, and no look at the device."""

import copy
from dataclasses import fields, replace
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aspire.kernels.attention import BlockSet, Rows
from aspire.policies import (
    ClosedForm,
    CostModel,
    Everything,
    Fixed,
    Probe,
    Selected,
    Selection,
    Speculation,
    Stepped,
    TopBlocks,
)
from aspire.policies.speculation import expected_tokens
from aspire.state import SlotState
from baselines.magicdec import SnapKV, Window
from baselines.sparsespec import Staggered

ASPIRE = TopBlocks(Probe("first_last", (-2,), "max"))
VEGAS = TopBlocks(
    Probe("first_last", None, "mean"), block=1, scope="layer", floor=256, recent=0, tail_in_budget=False
)  # fmt: skip
SPARSESPEC = TopBlocks(Probe("all", None, "group_mean"), block=1, scope="kv_head", recent=0)
UNIT = CostModel(0, 0, 1)  # time = KV tokens read


def batch(longest: int = 16, device: str = "cpu", **given_fields: Any) -> SlotState:
    """Active slots with room; fields are given as lists, one value a slot."""
    slots = max((len(x) for x in given_fields.values()), default=1)
    state = SlotState.empty(slots, 1, longest, 1, 1, 1, 1, device)
    values = {"active": [True], "room": [1000], "length": [100], **given_fields}
    filled = {}
    for name, value in values.items():
        old = getattr(state, name)
        filled[name] = torch.tensor(value, dtype=old.dtype, device=device).expand(old.shape).clone()
    return replace(state, **filled)


def verdict(policy: Speculation, state: SlotState, drafted: list[int], accepted: list[int]) -> SlotState:
    """All slots verify."""
    return policy.observe(state, state.active, torch.tensor(drafted), torch.tensor(accepted))


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


# -- draft length ---------------------------------------------------------------------------------------------------

BEST = {
    (0.05, 0.7): (6, 2.35), (0.05, 0.8): (8, 3.09), (0.05, 0.9): (13, 4.67),
    (0.1, 0.7): (4, 1.98), (0.1, 0.8): (6, 2.47), (0.1, 0.9): (10, 3.43), (0.1, 0.95): (15, 4.48),
    (0.2, 0.8): (4, 1.87), (0.2, 0.9): (7, 2.37), (0.2, 0.95): (10, 2.87),
    (0.3, 0.8): (3, 1.55), (0.3, 0.9): (5, 1.87), (0.5, 0.7): (1, 1.13), (0.5, 0.9): (3, 1.38),
}  # fmt: skip


def test_closed_form_reproduces_the_table_of_best_lengths() -> None:
    """METHODS 1.7: (c, alpha) -> gamma (speed-up); c is set by how little a draft reads."""
    context = 10_000
    read = [round(c * context) for c, _ in BEST]
    state = batch(length=[context] * len(BEST), alpha=[a for _, a in BEST], block_count=[read], tail_start=[context])
    best = ClosedForm(cost=UNIT).best_length(state)
    assert best.tolist() == [gamma for gamma, _ in BEST.values()]
    tokens = expected_tokens(state.alpha, 16)
    for row, ((c, _), (gamma, speed_up)) in enumerate(BEST.items()):
        assert float(tokens[row, gamma]) / (1 + c * gamma) == pytest.approx(speed_up, abs=0.005)


def test_closed_form_follows_the_cost_model() -> None:
    """ASPIRE 4.2: T_draft and T_verify of a batch of copies, with the drafts so far, against the formula in Python."""
    cost = CostModel(model=2.0, mlp=0.05, attn=1e-4, layers=36, dense_layers=1)
    state = batch(
        active=[True, True, False, True], length=[900, 16_000, 5, 90_000], drafted=[0, 4, 0, 9],
        alpha=[0.9, 0.8, 0.5, 0.97], block_count=[[24, 62, 0, 370]], tail_start=[768, 15_872, 0, 89_872],
    )  # fmt: skip
    state = replace(state, block_tokens=16)
    for slot, best in enumerate(ClosedForm(cost=cost).best_length(state).tolist()):
        length, drafted, alpha = int(state.length[slot]), int(state.drafted[slot]), float(state.alpha[slot])
        context = length + drafted
        chosen = int(state.block_count[0, slot]) * 16 + context - int(state.tail_start[slot])
        t_draft = 2 + 0.05 * 3 + 1e-4 * 3 * (chosen * 35 / 36 + context / 36)
        t_verify = 2 + 0.05 * 3 * (drafted + 1) + 1e-4 * 3 * context
        rates = [sum(alpha**j for j in range(g + 1)) / (1 + t_draft / t_verify * g) for g in range(17)]
        assert best == rates.index(max(rates))


@pytest.mark.parametrize("layers, fraction", [(28, 0.103), (36, 0.096), (32, 0.099)])
def test_draft_reads_include_the_dense_layer(layers: int, fraction: float) -> None:
    """Rho (N-1)/N + 1/N of the context."""
    kv = CostModel(0, 0, 1, layers, 1).draft_kv(torch.tensor(7000.0), torch.tensor(100_000.0))
    assert float(kv) / 100_000 == pytest.approx(fraction, abs=5e-4)


def test_acceptance_estimate_moves_by_a_fifth() -> None:
    """ASPIRE 4.2: alpha_0 .9, omega .8 on the old value, alpha_hat = a / min(a + 1, d); no drafts, no news."""
    policy = ClosedForm()
    state = batch(active=[True] * 5 + [False], alpha=[0.0] * 6)
    for slot in range(6):
        state = policy.start(state, slot)
    assert state.alpha.tolist() == pytest.approx([0.9] * 6)
    after = verdict(policy, state, [5, 5, 1, 4, 0, 5], [2, 5, 0, 3, 0, 0])
    assert after.alpha.tolist() == pytest.approx([0.72 + 0.2 * 2 / 3, 0.92, 0.72, 0.72 + 0.15, 0.9, 0.9])


def test_start_sets_one_slot_only() -> None:
    """A request that enters a slot starts from alpha_0; its neighbours keep what they learnt."""
    assert ClosedForm().start(batch(alpha=[0.3, 0.4]), 1).alpha.tolist() == pytest.approx([0.3, 0.9])
    assert Stepped().start(batch(target=[7, 9]), 0).target.tolist() == [3, 9]
    assert Stepped(longest=2).start(batch(), 0).target.tolist() == [2]


def test_certain_acceptance_needs_no_guard() -> None:
    """At alpha = 1 the expectation is gamma + 1, and the longest draft is best; at 0 none is."""
    assert expected_tokens(torch.tensor([1.0, 0.0]), 4).tolist() == [[1, 2, 3, 4, 5], [1, 1, 1, 1, 1]]
    state = batch(alpha=[1.0, 0.0], length=[1000], block_count=[[100, 100]], tail_start=[1000])
    assert ClosedForm(cost=UNIT).best_length(state).tolist() == [16, 0]


def test_closed_form_drafts_three_before_it_has_seen_a_verification() -> None:
    """ASPIRE Algorithm 1: gamma_init = 3 before the first verification, then even none; d_max = 16 always."""
    policy = ClosedForm(cost=UNIT)
    hopeless = {"alpha": [0.0], "tail_start": [0]}
    assert policy.decide(batch(drafted=[0, 1, 2, 3], rounds=[0], **hopeless)).tolist() == [False, False, False, True]
    assert policy.decide(batch(drafted=[0, 1], rounds=[1], **hopeless)).tolist() == [True, True]
    sure = batch(drafted=[3, 15, 16], rounds=[0], alpha=[1.0], tail_start=[99])
    assert policy.decide(sure).tolist() == [False, False, True]


def test_closed_form_verifies_when_the_best_length_is_reached() -> None:
    """ASPIRE Algorithm 1 (4): verify iff d >= gamma; inactive slots never."""
    drafted = [9, 10, 11, 11]
    state = batch(
        active=[True, True, True, False], drafted=drafted, length=[10_000 - d for d in drafted], rounds=[4],
        alpha=[0.9], block_count=[[1000] * 4], tail_start=[10_000],
    )  # fmt: skip
    assert ClosedForm(cost=UNIT).best_length(state).tolist() == [10] * 4
    assert ClosedForm(cost=UNIT).decide(state).tolist() == [False, True, True, False]


def test_stepped_rule() -> None:
    """Gamma + 1 after full acceptance, else max(1, accepted + 1), within 1 .. longest; only who verified."""
    policy = Stepped(longest=8)
    state = batch(target=[3, 8, 5, 5, 5], active=[True] * 4 + [False])
    assert verdict(policy, state, [3, 8, 5, 5, 5], [3, 8, 0, 3, 5]).target.tolist() == [4, 8, 1, 4, 5]
    assert policy.decide(batch(drafted=[2, 3, 4], target=[3])).tolist() == [False, True, True]


def test_fixed_lengths_and_the_room_left() -> None:
    """Lockstep never leaves the rhythm; the others stop where one more token would not be committed."""
    state = batch(drafted=[0, 4, 5, 1, 0], room=[1000, 1000, 1000, 2, 1])
    assert Fixed(5).decide(state).tolist() == [False, False, True, False, False]
    assert Fixed(5, lockstep=False).decide(state).tolist() == [False, False, True, True, True]
    for policy in (Stepped(), ClosedForm(cost=UNIT), Staggered()):
        assert policy.decide(replace(state, target=state.target + 5))[3:].tolist() == [True, True]
    assert Fixed(0).decide(batch(active=[True, False])).tolist() == [True, False]


def test_staggered_fills_the_emptiest_phase_then_keeps_its_stride() -> None:
    """SparseSpec: requests that enter one by one spread over all phases; afterwards every round has the same length."""
    policy = Staggered(longest=4)
    state = batch(active=[False] * 8, longest=4)
    for slot in range(8):
        state.active[slot] = True
        state = policy.start(state, slot)
    assert sorted(state.target.tolist()) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert policy.decide(replace(state, drafted=state.target - 1)).tolist() == [False] * 8
    assert policy.decide(replace(state, drafted=state.target)).tolist() == [True] * 8
    after = policy.observe(state, ints(1, 1, 0, 0, 0, 0, 0, 0).bool(), state.target, state.target * 0)
    assert after.target.tolist() == [4, 4, *state.target.tolist()[2:]]


# -- selection ------------------------------------------------------------------------------------------------------


def keys_read(chosen: Selected, block: int, length: int, scope: int = 0) -> list[int]:
    """Positions that a draft row of one slot reads, as attention counts them."""
    sets = BlockSet(chosen.blocks[scope], chosen.count[scope], chosen.tail_start, block)
    rows = Rows(ints(0), ints(1), ints(length - 1), torch.zeros(1, length, dtype=torch.int64), 1, sets)
    positions, real = rows.keys
    return positions[real].tolist()


def scores_for(selection: Selection, length: int, seed: int = 0) -> Tensor:
    """Random scores for two layers of two KV heads.  # [S, 1, L]"""
    return torch.rand(selection.scopes(2, 2), 1, length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("context, pages", [(16_000, 70), (80_000, 350), (100_000, 438), (512, 32), (100, 32), (1, 32)])
def test_aspire_budget(context: int, pages: int) -> None:
    """16k -> 1000 pages -> 70 pages; 80-100k -> 350-438; never below 32 pages."""
    assert ASPIRE.budget(ints(context)).tolist() == [pages]
    assert ASPIRE.capacity(context) == pages


def test_aspire_reads_seventy_pages_with_the_last_eight() -> None:
    """At 16,000 tokens 62 chosen pages and the last 8, 1120 tokens; the chosen ones score highest."""
    scores = scores_for(ASPIRE, 16_000)
    chosen = ASPIRE.select(scores, ints(16_000), ints(16_000))
    assert chosen.tail_start.tolist() == [992 * 16] and chosen.count.tolist() == [[62]]
    pages = scores.view(1000, 16).sum(1)[:992]
    assert chosen.blocks[0, 0, :62].tolist() == sorted(pages.topk(62).indices.tolist())
    assert len(set(keys_read(chosen, 16, 16_000))) == 1120


@pytest.mark.parametrize("length, left_out", [(63, 0), (64, 0), (65, 1), (80, 1), (81, 2)])
def test_first_page_past_the_budget_is_left_out_whole(length: int, left_out: int) -> None:
    """C04: budget 64, page 16; at 65 exactly one page is left out, and never a sink."""
    selection = TopBlocks(Probe(heads="max"), ratio=0.0, floor=64, recent=16, sinks=16)
    chosen = selection.select(scores_for(selection, length), ints(length), ints(length))
    read = keys_read(chosen, 16, length)
    assert sorted(set(range(length)) - set(read))[::16] == sorted(set(range(length)) - set(read))[: 16 * left_out : 16]
    assert len(read) == len(set(read)) == length - 16 * left_out
    assert set(range(16)) <= set(read)


def test_vegas_budget_is_in_tokens_and_leaves_the_verify_window_out() -> None:
    """7 % of the context, at least 256 tokens, from up to the first verify query; later ones on top."""
    assert VEGAS.budget(ints(10_000, 1000, 100)).tolist() == [700, 256, 256]
    chosen = VEGAS.select(scores_for(VEGAS, 10_004), ints(9_997), ints(10_000))
    assert chosen.blocks.shape[0] == 2 and chosen.count.tolist() == [[700], [700]]
    assert chosen.tail_start.tolist() == [9_997]
    assert len(keys_read(chosen, 1, 10_000, scope=1)) == 703


def test_sparsespec_budget_holds_the_recent_tokens() -> None:
    """The last accepted + 1 tokens count inside the budget; a set a KV head and layer."""
    chosen = SPARSESPEC.select(scores_for(SPARSESPEC, 20_003), ints(19_995), ints(20_000))
    assert SPARSESPEC.budget(ints(20_000)).tolist() == [1400]
    assert chosen.count.tolist() == [[1395]] * 4 and chosen.tail_start.tolist() == [19_995]
    assert all(len(set(keys_read(chosen, 1, 20_000, s))) == 1400 for s in range(4))


@given(
    st.integers(2, 3000),
    st.integers(1, 17),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0.0, 0.05, 0.07, 0.25, 1.0]),
    st.sampled_from([0, 17, 128]),
    st.sampled_from([0, 16]),
    st.booleans(),
)
def test_any_budget_is_kept(
    length: int, unseen: int, block: int, ratio: float, recent: int, sinks: int, in_budget: bool
) -> None:
    """C04, C06: no key twice, none past the context, the newest and the sinks read, the budget met and not exceeded.

    The probed query never saw the newest token: the next row feeds it.
    """
    selection = TopBlocks(Probe(heads="max"), block, "request", ratio, 160, recent, sinks, in_budget)
    seen = max(1, length - unseen)
    chosen = selection.select(scores_for(selection, length), ints(seen), ints(length))
    read = keys_read(chosen, block, length)
    assert read == sorted(set(read)) and read[-1] == length - 1
    newest = -(-length // block) - -(-recent // block)  # the last page counts whole, however full it is
    must = set(range(max(0, newest * block), length)) | set(range(seen, length)) | set(range(min(sinks, length)))
    assert must <= set(read)
    blocks, budget = len({p // block for p in read}), int(selection.budget(ints(length)))
    whole = ceil(length / block)
    if in_budget:
        assert blocks == min(whole, max(budget, whole - int(chosen.tail_start) // block))
    else:
        assert int(chosen.count) == min(budget, int(chosen.tail_start) // block)
    assert int(chosen.count) <= selection.capacity(length)


@pytest.mark.parametrize("ratio", ["0.05", "0.07", "0.1"])
def test_budget_is_the_exact_ceiling(ratio: str) -> None:
    """Ceil(rho * pages) of the decimal ratio, not of its rounded product."""
    pages = torch.arange(1, 8193)
    got = replace(ASPIRE, ratio=float(ratio)).budget(pages * 16)
    assert got.tolist() == [max(32, ceil(Fraction(ratio) * p)) for p in pages.tolist()]


@pytest.mark.parametrize("ratio", [0.0, 0.07])
@pytest.mark.parametrize("sinks", [0, 1, 4, 16])
def test_window_reads_exactly_its_width(sinks: int, ratio: float) -> None:
    """C06: w keys, itself included, sinks counted once, for every length below and past w."""
    window = Window(ratio=ratio, floor=20, sinks=sinks)
    for length in [*range(1, 60), 1000]:
        read = keys_read(window.select(None, ints(length), ints(length)), 1, length)
        width = max(20, ceil(Fraction("0.07") * length) if ratio else 0)
        assert len(read) == len(set(read)) == min(length, width)
        assert set(range(min(sinks, length))) | set(range(max(0, length - width + sinks), length)) == set(read)


@pytest.mark.parametrize("length", [5, 32, 33, 60, 64, 65, 257, 3000])
def test_snapkv_takes_the_best_pooled_tokens_of_each_head(length: int) -> None:
    """Budget - 32 tokens by the mean of 5 neighbours, and the last 32; what is generated later on top."""
    snap = SnapKV(ratio=0.07, floor=64)
    scores = scores_for(snap, length)
    chosen = snap.select(scores, ints(length), ints(length + 1))
    budget, tail = max(64, ceil(Fraction("0.07") * length)), max(0, length - 32)
    padded = torch.nn.functional.pad(scores[:, 0, :tail], (2, 2))  # the window is cut off before pooling
    for head in range(snap.scopes(2, 2)):
        pooled = [float(padded[head, i : i + 5].mean()) for i in range(tail)]
        best = sorted(range(tail), key=lambda i: -pooled[i])[: budget - 32]
        assert keys_read(chosen, 1, length + 1, head) == [*sorted(best), *range(tail, length + 1)]


def test_everything_reads_everything() -> None:
    """The default of autoregressive decoding."""
    assert keys_read(Everything().select(None, ints(9), ints(9)), 1, 9) == list(range(9))


# -- purity ---------------------------------------------------------------------------------------------------------

SPECULATIONS = [Fixed(0), Fixed(5), Fixed(5, lockstep=False), Stepped(), ClosedForm(cost=UNIT), Staggered()]
SELECTIONS = [ASPIRE, VEGAS, SPARSESPEC, replace(ASPIRE, sinks=16), Everything(), Window(), SnapKV()]


def unchanged(state: SlotState, before: SlotState) -> bool:
    tensors = (f.name for f in fields(state) if isinstance(getattr(state, f.name), Tensor))
    return all(torch.equal(getattr(state, name), getattr(before, name)) for name in tensors)


@pytest.mark.parametrize("policy", SPECULATIONS, ids=repr)
def test_speculation_leaves_the_state_alone(policy: Speculation) -> None:
    """decide, observe and start return what is new and write nothing in place."""
    state = batch(drafted=[0, 2, 5], target=[3, 3, 8], alpha=[0.2, 0.5, 0.9], rounds=[0, 1, 2])
    before = copy.deepcopy(state)
    assert policy.decide(state).dtype == torch.bool
    verdict(policy, state, [0, 2, 5], [0, 1, 5])
    policy.start(state, 1)
    assert unchanged(state, before)


@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_selection_leaves_its_arguments_alone_and_fits_its_capacity(selection: Selection) -> None:
    """Rows of very different lengths in one call; seen and length stay as they were."""
    seen, length = ints(3, 700, 3000), ints(4, 705, 3001)
    scores = torch.rand(selection.scopes(2, 2), 3, 3001)
    kept = seen.clone(), length.clone(), scores.clone()
    chosen = selection.select(scores, seen, length)
    assert all(torch.equal(a, b) for a, b in zip((seen, length, scores), kept))
    assert chosen.blocks.shape[2] <= selection.capacity(4000) and (chosen.count <= chosen.blocks.shape[2]).all()
    for row in range(3):
        alone = selection.select(scores[:, row : row + 1], seen[row : row + 1], length[row : row + 1])
        one = Selected(
            chosen.blocks[:, row : row + 1], chosen.count[:, row : row + 1], chosen.tail_start[row : row + 1]
        )
        for scope in range(chosen.blocks.shape[0]):
            block, n = selection.block, int(length[row])
            assert keys_read(one, block, n, scope) == keys_read(alone, block, n, scope)


@pytest.mark.parametrize("policy", SPECULATIONS, ids=repr)
def test_speculation_never_looks_at_the_device(policy: Speculation) -> None:
    """On the meta device there are no values: any host sync raises, so decide and observe can be captured."""
    state = batch(device="meta", drafted=[0, 2, 5])
    state = policy.observe(state, state.active, state.drafted, state.drafted)
    assert policy.decide(state).is_meta


@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_selection_never_looks_at_the_device(selection: Selection) -> None:
    """The same for select; host-side arithmetic on sizes is free."""
    scores = torch.empty(selection.scopes(2, 2), 3, 3001, device="meta")
    length = torch.empty(3, dtype=torch.int64, device="meta")
    assert all(x.is_meta for x in vars(selection.select(scores, length, length)).values())


def test_the_meta_device_catches_a_host_sync() -> None:
    """So the two tests above can fail."""

    class Peeking(Stepped):
        def wants_verify(self, state: SlotState) -> Tensor:
            return state.drafted >= (1 if bool(state.alpha.max() > 0) else 2)

    with pytest.raises(RuntimeError):
        Peeking().decide(batch(device="meta"))
