"""Is what comes out distributed as the target says? Filters, and the verifiers of single and many tokens."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from aspire import verify
from aspire.attention import Plan
from aspire.kernels.noise import DRAFT_OR_TARGET
from aspire.policies import Method
from aspire.sampling import Filtered, filter_logits, pick
from aspire.state import SlotState
from aspire.step import Stepper
from aspire.verify import Drafts, Emulation, Verdict, Verification, judge, target_picks

DRAWS = 200_000
SEEDS = torch.arange(DRAWS)
REJECTION, COUPLED = Verification("rejection"), Verification("coupled")


# -- filters --------------------------------------------------------------------------------------------------------


def filter_row(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, top-k, top-p of one row in plain float64."""
    best_first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [float(i == best_first[0]) for i in range(len(logits))]
    weight = [2.718281828459045 ** ((x - max(logits)) / temperature) for x in logits]
    kept = best_first[: top_k or len(logits)]
    total, mass, nucleus = sum(weight[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(i)
        mass += weight[i]
    return [weight[i] / mass if i in nucleus else 0.0 for i in range(len(logits))]


def dense(dist: Filtered, vocab: int) -> Tensor:
    return torch.zeros(len(dist.ids), vocab).scatter_add(1, dist.ids, dist.probs)


SETTINGS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 50, 0.9), (0.6, 20, 0.95), (1.5, 5, 1.0), (2.0, 0, 0.3), (0.3, 1, 0.5)]


@pytest.mark.parametrize("vocab", [17, 63, 257])
def test_filter_equals_the_plain_rule_row_by_row(vocab: int) -> None:
    """Rows with different settings in one batch; ids ascending; lookup finds kept ids and gives 0 to others."""
    logits = torch.randn(8 * len(SETTINGS), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    temperature, top_k, top_p = (torch.tensor(x).repeat(8) for x in zip(*SETTINGS))
    dist = filter_logits(logits, temperature, top_k, top_p, vocab)
    expected = torch.tensor([filter_row(x.tolist(), *s) for x, s in zip(logits, SETTINGS * 8)])
    torch.testing.assert_close(dense(dist, vocab), expected, rtol=1e-4, atol=1e-6)  # fp32 softmax of |x| up to 40
    assert (dist.ids.diff(dim=1) > 0).all()
    ids = torch.arange(vocab).flip(0).repeat(len(logits), 1)
    assert torch.equal(dist.lookup(ids), dense(dist, vocab).flip(1))


@pytest.mark.parametrize("vocab", [17, 63, 257])
@pytest.mark.parametrize("temperature, top_k, top_p", [(0.7, 13, 0.9), (0.6, 5, 0.95), (1.3, 16, 1.0), (1.0, 1, 0.4)])
def test_filter_equals_hugging_face(vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    """The compact form, no wider than top-k, holds the distribution of the three warpers of transformers."""
    logits = torch.randn(33, vocab, generator=torch.Generator().manual_seed(vocab))
    warp = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)])
    rows = [torch.full((33,), x) for x in (temperature, top_k, top_p)]
    dist = filter_logits(logits, *rows, candidates=top_k)
    assert dist.ids.shape == (33, top_k)
    expected = warp(torch.zeros(33, 1, dtype=torch.int64), logits).softmax(-1)
    torch.testing.assert_close(dense(dist, vocab), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("candidates", [1, 2, 63])
def test_greedy_takes_the_first_of_equal_logits(candidates: int) -> None:
    """Temperature 0 is argmax, ties to the lowest id, at every width and whatever top-k and top-p say."""
    logits = torch.randint(0, 2, (257, 63), generator=torch.Generator().manual_seed(0)).float()
    zeros = torch.zeros(257)
    dist = filter_logits(logits, zeros, zeros.long() + 2, zeros + 0.5, candidates)
    first = logits.argmax(1)
    assert torch.equal(pick(dist, SEEDS[:257], SEEDS[:257], DRAFT_OR_TARGET), first)
    assert torch.equal(dist.lookup(first[:, None])[:, 0], torch.ones(257))
    assert torch.equal(first, torch.tensor([row.index(max(row)) for row in logits.tolist()]))


# -- one token ------------------------------------------------------------------------------------------------------


def rows_of(raw: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Filtered:
    """The filtered distribution of raw probabilities, once for each draw."""
    logits = torch.tensor(raw).log().expand(DRAWS, -1)
    rows = [torch.full((DRAWS,), x) for x in (temperature, top_k, top_p)]
    return filter_logits(logits, *rows, candidates=top_k or len(raw))


def joined(*parts: Filtered) -> Filtered:
    """Distributions of consecutive positions, [R, W, K]."""
    return Filtered(torch.stack([p.ids for p in parts], 1), torch.stack([p.probs for p in parts], 1))


def flat(dist: Filtered) -> Filtered:
    return Filtered(dist.ids.flatten(0, 1), dist.probs.flatten(0, 1))


def one_hot(tokens: Tensor, vocab: int) -> Filtered:
    return Filtered(torch.arange(vocab).expand(len(tokens), -1), torch.eye(vocab)[tokens])


def first_token(how: Verification, p: Filtered, tokens: Tensor, q: Filtered) -> Verdict:
    """Judge one draft a row; p stands for the bonus position as well."""
    zero = torch.zeros(DRAWS, dtype=torch.int64)
    drafts = Drafts(tokens[:, None], zero + 1, SEEDS, zero + 9, zero, joined(q))
    return judge(how, flat(joined(p, p)), drafts)


def drawn(q: Filtered, seed: Tensor = SEEDS) -> Tensor:
    """A draft a row, as the step draws it."""
    return pick(q, seed, torch.full_like(seed, 9), DRAFT_OR_TARGET)


def follows(tokens: Tensor, expected: list[float]) -> bool:
    """Whether every frequency lies within 4 standard deviations; impossible tokens must not occur at all."""
    p = torch.tensor(expected, dtype=torch.float64)
    seen = torch.bincount(tokens, minlength=len(p)) / len(tokens)
    return bool(((seen - p).abs() <= 4 * (p * (1 - p) / len(tokens)).sqrt()).all())


A09 = {
    "top_k": ([0.45, 0.45, 0.1], {"top_k": 2}),
    "top_p": ([0.45, 0.45, 0.1], {"top_p": 0.85}),
    "thinking": ([0.5, 0.3, 0.2], {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    "thinking-narrow": ([0.2, 0.78, 0.02], {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
}


@pytest.mark.parametrize("how", [REJECTION, COUPLED], ids=lambda how: how.mode)
@pytest.mark.parametrize("case", A09)
def test_filtered_sampling_is_unbiased(case: str, how: Verification) -> None:
    """A09: draft [.6, .3, .1] and a target under the same filters; 200k draws within 4 sigma of the filtered target."""
    raw, settings = A09[case]
    settings = {**settings, "top_k": min(settings.get("top_k", 0), 3)}
    p, q = rows_of(raw, **settings), rows_of([0.6, 0.3, 0.1], **settings)
    expected = filter_row(torch.tensor(raw).log().tolist(), **{"temperature": 1.0, "top_p": 1.0, **settings})
    if case == "top_k":
        assert expected == pytest.approx([0.5, 0.5, 0]) and q.probs[0].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert follows(first_token(how, p, drawn(q), q).tokens[:, 0], expected)


def test_judging_by_the_raw_draft_distribution_is_biased() -> None:
    """A09: the fault gives [.556, .444, 0], so the check above can fail."""
    p, q = rows_of([0.45, 0.45, 0.1], top_k=2), rows_of([0.6, 0.3, 0.1], top_k=2)
    tokens = first_token(REJECTION, p, drawn(q), rows_of([0.6, 0.3, 0.1])).tokens[:, 0]
    assert not follows(tokens, [0.5, 0.5, 0])
    assert follows(tokens, [5 / 9, 4 / 9, 0])


P, Q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]


def test_the_correction_comes_from_the_normalised_residual() -> None:
    """A10: [.50, .30, .20]."""
    q = rows_of(Q)
    assert follows(first_token(REJECTION, rows_of(P), drawn(q), q).tokens[:, 0], P)


FAULTS: dict[str, tuple[Callable[[Filtered], Filtered], list[float]]] = {
    "softmax": (lambda rest: Filtered(rest.ids, rest.probs.softmax(-1)), [0.3209, 0.3896, 0.2896]),
    "target": (lambda rest: rows_of(P), [0.35, 0.39, 0.26]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_residual_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: the softmax residual gives [.321, .390, .290], sampling again from p [.350, .390, .260]."""
    wrong, numbers = FAULTS[fault]
    monkeypatch.setattr(verify, "pick", lambda rest, *key: pick(wrong(rest), *key))
    q = rows_of(Q)
    verdict = first_token(REJECTION, rows_of(P), drawn(q), q)
    assert not follows(verdict.tokens[:, 0], P)
    assert follows(verdict.tokens[:, 0], numbers)


def test_three_verifiers_are_exact_and_accept_as_they_should() -> None:
    """A14: strict match .29, one-hot q .29, full q .70; matching under shared noise lies between, .6308."""
    p, q = rows_of(P), rows_of(Q)
    cases = [
        (0.29, COUPLED, drawn(q, SEEDS + DRAWS), q),  # noise of its own: matches by chance alone
        (0.29, REJECTION, drawn(q), one_hot(drawn(q), 3)),
        (0.70, REJECTION, drawn(q), q),
        # sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x): two Gumbel argmaxes with the same noise
        (0.2 + 3 / 13 + 0.2, COUPLED, drawn(q), q),
    ]
    for acceptance, how, tokens, judged_by in cases:
        verdict = first_token(how, p, tokens, judged_by)
        assert follows(verdict.tokens[:, 0], P)
        assert follows(verdict.accepted, [1 - acceptance, acceptance])


# -- rounds of the real step, with scripted logits ------------------------------------------------------------------

VOCAB, DRAFTED, ROLLS = 4, 2, 80_000
Q_OF = Callable[[SlotState, Tensor], Tensor]  # (state, last token [B]) -> draft logits [B, V]


def table(seed: int, flat: float = 1.0) -> Tensor:
    """Random next-token logits for each last token.  # [V, V]"""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) / flat


def fresh(slots: int, vocab: int = VOCAB, drafted: int = DRAFTED, top_k: int = 0) -> SlotState:
    """Slots that all stand after token 0, with different seeds."""
    state = SlotState.empty(slots, 1, drafted, 1, 1, 1, top_k or vocab, "cpu")
    state.active[:], state.length[:], state.room[:] = True, 1, 99
    state.seed[:], state.temperature[:], state.top_k[:], state.top_p[:] = torch.arange(slots), 1.0, top_k, 1.0
    return state


def stepper_for(how: Verification, candidates: int = VOCAB) -> Stepper:
    model = SimpleNamespace(spec=SimpleNamespace(layers=1))
    return Stepper(model, None, Method(), how, candidates)  # type: ignore[arg-type]


def append(stepper: Stepper, plan: Plan, state: SlotState, dist: Filtered, picks: Tensor) -> None:
    """Draft as a step does: the token goes into the next column, and there is one draft more."""
    stepper._append_drafts(plan, state, state.drafted, dist, picks)
    state.drafted.add_(plan.draft)


def play_round(stepper: Stepper, state: SlotState, draft: Q_OF, target: Tensor) -> Verdict:
    """Draft, verify and commit by the step's own functions; the logits are scripted instead of computed."""
    token = state.last_token
    for column in range(state.longest_draft):
        plan = Plan.of(state, torch.zeros_like(state.active), 64, fresh=stepper.fresh)
        append(stepper, plan, state, *stepper._filter(plan, state, draft(state, token)))
        token = state.draft_tokens[:, column]
    plan = Plan.of(state, state.active, 64)
    fed = torch.cat([state.last_token[:, None], state.draft_tokens], 1).flatten()
    verdict = stepper._verify(plan, state, state.drafted, *stepper._filter(plan, state, target[fed]))
    stepper._commit(plan, state, verdict)
    return verdict


def two_tokens(stepper: Stepper, state: SlotState, draft: Q_OF, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first two emitted tokens as one number, and how many drafts the first round kept.  # [B], [B]"""
    one = play_round(stepper, state, draft, target)
    kept = one.accepted.clone()
    two = play_round(stepper, state, draft, target)
    second = torch.where(kept > 0, one.tokens[:, 1], two.tokens[:, 0])
    return one.tokens[:, 0] * VOCAB + second, kept


def joint(target: Tensor) -> Tensor:
    """Probabilities of the first two tokens after token 0.  # [V * V]"""
    p = target.double().softmax(-1)
    return (p[0][:, None] * p).flatten()


def fits(pairs: Tensor, expected: Tensor) -> bool:
    """Chi-square; impossible pairs must not occur."""
    counts, possible = torch.bincount(pairs, minlength=len(expected)), expected > 0
    if counts[~possible].any():
        return False
    return stats.chisquare(counts[possible].numpy(), (expected[possible] * len(pairs)).numpy()).pvalue > 1e-3


EXACT = {"rejection": REJECTION, "coupled": COUPLED, "greedy-draft": Verification("rejection", "greedy")}


@pytest.mark.parametrize("name", EXACT)
def test_two_tokens_have_the_joint_distribution_of_the_target(name: str) -> None:
    """A10: drafts from another chain; also where the second token is drafted anew after a rejection of the first."""
    target, other = table(1), table(2)
    pairs, kept = two_tokens(stepper_for(EXACT[name]), fresh(ROLLS), lambda _, token: other[token], target)
    assert (kept == 0).sum() > ROLLS // 10 and (kept == DRAFTED).sum() > ROLLS // 20
    assert fits(pairs, joint(target))


@pytest.mark.parametrize("how", [REJECTION, COUPLED], ids=lambda how: how.mode)
def test_two_tokens_under_top_k(how: Verification) -> None:
    """A09: draft and target keep different tokens, so the compact ids of p and q differ."""
    target, other = table(3), table(4)
    state = fresh(ROLLS, top_k=2)
    pairs, _ = two_tokens(stepper_for(how, candidates=2), state, lambda _, token: other[token], target)
    cut = target.masked_fill(target < target.topk(2).values[:, 1:], float("-inf"))
    assert fits(pairs, joint(cut))


def test_two_tokens_where_new_drafts_depend_on_refused_ones() -> None:
    """A40: the last verify query, a refused draft, scores the next selection; the new q must not know its own noise."""
    target, sharp, blunt = table(5, flat=4), table(6), table(7, flat=9)

    def draft(state: SlotState, token: Tensor) -> Tensor:
        refused = state.draft_tokens[:, -1]  # in the first column of a round, the last draft of the round before
        return torch.where(((state.rounds > 0) & (refused == 0))[:, None], sharp[token], blunt[token])

    pairs, _ = two_tokens(stepper_for(REJECTION), fresh(ROLLS), draft, target)
    assert fits(pairs, joint(target))


def softmax_residual(rest: Filtered, *key: Tensor) -> Tensor:
    return pick(Filtered(rest.ids, rest.probs.softmax(-1)), *key)  # type: ignore[arg-type]


def test_the_joint_check_catches_a_softmax_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: the same chi-square fails for a verifier that is wrong only after a refusal."""
    monkeypatch.setattr(verify, "pick", softmax_residual)
    target, other = table(1), table(2)
    pairs, _ = two_tokens(stepper_for(REJECTION), fresh(ROLLS), lambda _, token: other[token], target)
    assert not fits(pairs, joint(target))


def test_the_joint_check_catches_a_raw_draft_distribution() -> None:
    """A09: the same chi-square fails when drafts are judged by another q than they were sampled from."""
    stepper, target, other = stepper_for(REJECTION), table(1), table(2)
    healthy = stepper._append_drafts

    def append_raw(plan: Plan, state: SlotState, column: Tensor, dist: Filtered, picks: Tensor) -> None:
        healthy(plan, state, column, dist, picks)
        state.q_probs[:] = (state.q_probs.log() / 2).softmax(-1)  # as if the temperature had been forgotten

    stepper._append_drafts = append_raw  # type: ignore[method-assign]
    pairs, _ = two_tokens(stepper, fresh(ROLLS), lambda _, token: other[token], target)
    assert not fits(pairs, joint(target))


@pytest.mark.parametrize("soft, expected", [(False, [0.6, 0.4]), (True, [0.75, 0.25])])
def test_a_greedy_draft_is_judged_as_one_hot(soft: bool, expected: list[float]) -> None:
    """A11: p [.6, .4], draft [.8, .2] taken at its argmax; with the soft q the result would be [.75, .25]."""
    stepper = stepper_for(Verification("rejection", "greedy"), candidates=2)
    state = fresh(DRAWS, vocab=2, drafted=1)
    plan = Plan.of(state, ~state.active, 64)
    append(stepper, plan, state, rows_of([0.8, 0.2]), torch.ones(DRAWS, dtype=torch.int64))  # no argmax
    assert state.draft_tokens.eq(0).all()
    assert torch.equal(state.q_probs, torch.tensor([1.0, 0.0]).expand(DRAWS, 1, 2))
    if soft:
        state.q_probs[:] = torch.tensor([0.8, 0.2])
    p = rows_of([0.6, 0.4])
    target = flat(joined(p, p))
    picks = torch.zeros(2 * DRAWS, dtype=torch.int64)  # rejection has no use for them
    verdict = stepper._verify(Plan.of(state, state.active, 64), state, state.drafted, target, picks)
    assert follows(verdict.tokens[:, 0], expected)


# -- ragged rows ----------------------------------------------------------------------------------------------------

RAGGED = [Verification("greedy"), COUPLED, REJECTION, Verification(emulation=Emulation("iid", 0.7)),
          Verification(emulation=Emulation())]  # fmt: skip


@pytest.mark.parametrize("padding", ["poison", "tempting"])
@pytest.mark.parametrize("how", RAGGED, ids=lambda how: how.emulation.profile if how.emulation else how.mode)
def test_a_row_is_judged_by_its_own_drafts_alone(how: Verification, padding: str) -> None:
    """A31: rows of 5, 3, 1, 0 drafts in one verify equal the row judged at its own width.

    Padding is either unreadable (NaN, id -1) or just what would be accepted if it were read.
    """
    rows, widest, vocab = 64, 5, 7
    rng = torch.Generator().manual_seed(0)
    count = torch.tensor([5, 3, 1, 0]).repeat(rows // 4)
    p = torch.rand(rows, widest + 1, vocab, generator=rng).pow(4)
    q = (p[:, :-1] + torch.rand(rows, widest, vocab, generator=rng).pow(9)).clone()
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens, seed, position, rounds = p[:, :-1].argmax(-1), torch.arange(rows) + 3, count + 40, count + 1
    past = torch.arange(widest + 1) > count[:, None]
    ids = torch.arange(vocab).expand(rows, widest + 1, -1).contiguous()
    if padding == "poison":
        p[past], q[past[:, 1:]], tokens[past[:, 1:]] = float("nan"), float("nan"), -1
    else:
        picks = target_picks(flat(Filtered(ids, p)), Drafts(tokens, count, seed, position, rounds))[:, :-1]
        tokens = torch.where(past[:, 1:], picks, tokens)
        q = torch.where(past[:, 1:, None], torch.eye(vocab)[p[:, :-1].argmax(-1)], q)
    drafts = Drafts(tokens, count, seed, position, rounds, Filtered(ids[:, :-1], q))
    verdict = judge(how, flat(Filtered(ids, p)), drafts)
    assert (verdict.accepted <= count).all() and (verdict.accepted > 0).any() and (verdict.accepted < count).any()
    for r, own in enumerate(count.tolist()):
        row = slice(r, r + 1)
        alone = Drafts(
            tokens[row, :own], count[row], seed[row], position[row], rounds[row],
            Filtered(ids[row, :own], q[row, :own]),
        )  # fmt: skip
        solo = judge(how, flat(Filtered(ids[row, : own + 1], p[row, : own + 1])), alone)
        emitted = int(verdict.accepted[r]) + 1
        assert emitted == int(solo.accepted) + 1 <= own + 1
        assert torch.equal(verdict.tokens[r, :emitted], solo.tokens[0, :emitted])
        assert verdict.tokens[r, :emitted].min() >= 0
