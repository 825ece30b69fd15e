"""Do the kernels of noise, filter and verdict say what their torch twins say?

On a GPU where there is one, else in Triton's interpreter: fp32 and small blocks, so that a row has many chunks.
"""

import pytest
import torch
from torch import Tensor

from aspire.kernels import filter as kernels
from aspire.kernels import judge as judging
from aspire.kernels.jit import jit, tl, triton
from aspire.kernels.noise import DRAFT_OR_TARGET, gumbel, gumbel_of, uniform, uniform_of
from aspire.sampling import Filtered, filter_and_pick, filter_logits, pick
from aspire.verify import Drafts, Emulation, Verdict, Verification, hetero_table, judge, judge_triton, target_picks

pytestmark = pytest.mark.skipif(triton is None, reason="needs Triton")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BLOCK = 64
# The kernel divides by the temperature and takes exp2 of x log2(e): |x| up to 60 carries 60 * 2^-23 into the exponent.
RTOL, ATOL = (2e-5, 1e-7) if CUDA else (1e-6, 1e-7)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(rows: int, seed: int, high: int = 2**40) -> Tensor:
    return torch.randint(0, high, (rows,), generator=generator(seed)).to(DEVICE)


# -- noise ----------------------------------------------------------------------------------------------------------


@jit
def _noise_kernel(seed_ptr, position_ptr, index_ptr, u_ptr, g_ptr, PURPOSE: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    seed, position = tl.load(seed_ptr + tl.program_id(0)), tl.load(position_ptr + tl.program_id(0))
    tl.store(u_ptr + at, uniform_of(seed, position, PURPOSE, tl.load(index_ptr + at)))
    tl.store(g_ptr + at, gumbel_of(seed, position, PURPOSE, tl.load(index_ptr + at)))


@pytest.mark.parametrize("purpose", range(4))
def test_noise_in_kernels_is_the_noise_of_torch(purpose: int) -> None:
    """Uniform numbers to the last bit, for all of int64."""
    rows, n = 17, 64
    low, high = -(2**63), 2**63 - 1
    rng = generator(purpose)
    seed, position = (torch.randint(low, high, (rows,), generator=rng).to(DEVICE) for _ in range(2))
    index = torch.randint(low, high, (rows, n), generator=rng).to(DEVICE)
    seed[:3], position[:3] = torch.tensor([low, -1, 0]), torch.tensor([high, 0, -2])
    u, g = (torch.full((rows, n), float("nan"), device=DEVICE) for _ in range(2))
    _noise_kernel[(rows,)](seed, position, index, u, g, PURPOSE=purpose, N=n)
    assert torch.equal(u, uniform(seed, position, purpose, index))
    # Two logarithms of an ulp each; near u = 1/e the result is near 0, hence the absolute part.
    torch.testing.assert_close(g, gumbel(seed, position, purpose, index), rtol=1e-5, atol=1e-6)


# -- filter ---------------------------------------------------------------------------------------------------------


def settings(rows: int, candidates: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures with 0, top-k off, within and at the candidates, top-p below and at 1; `first` shifts the mix."""
    row = torch.arange(rows) + first
    temperature = torch.tensor([1.0, 0.0, 0.6, 2.5])[row % 4]
    top_k = torch.tensor([0, 1, max(1, candidates // 2), candidates, 0])[row % 5]
    top_p = torch.tensor([1.0, 0.5, 0.95])[row % 3]
    return temperature.to(DEVICE), top_k.to(DEVICE), top_p.to(DEVICE)


def distinct(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Logits without ties, in rows of a wider matrix, NaN where they must not be read."""
    rng = generator(seed)
    order = torch.stack([torch.randperm(vocab, generator=rng) for _ in range(rows)])
    steps = torch.rand(vocab, generator=rng).cumsum(0) / vocab * 16 - 4
    wide = torch.full((rows, vocab + 3), float("nan"))
    wide[:, :vocab] = (steps + torch.arange(vocab) * 1e-3)[order]
    return wide.to(DEVICE)[:, :vocab]


def run(logits: Tensor, options: tuple, candidates: int, cap: int | None = None) -> tuple[tuple, tuple]:
    """Kernel's and twin's (ids, probs, picks)."""
    rows = len(logits)
    arguments = (logits, *options, candidates, ints(rows, 1), ints(rows, 2), DRAFT_OR_TARGET)
    got = kernels.filter_and_pick_triton(*arguments, block=BLOCK, cap=cap)
    return got, kernels.filter_and_pick_torch(*arguments)


def check(got: tuple, expected: tuple, rtol: float = RTOL) -> None:
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=rtol, atol=ATOL)
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("rows, vocab, candidates", kernels.CASES)
def test_filter_equals_its_twin(rows: int, vocab: int, candidates: int) -> None:
    """Mixed settings in one batch, strided rows, a small scratch."""
    logits, options = distinct(rows, vocab), settings(rows, min(candidates, vocab), vocab)
    got, expected = run(logits, options, candidates, cap=128 if candidates == 50 else 32)
    check(got, expected)
    assert got[0].shape == (rows, min(candidates, vocab)) and (got[0].diff(dim=1) > 0).all()


def test_filter_without_a_pick_is_the_same() -> None:
    logits, options = distinct(9, 257), settings(9, 17)
    got, expected = run(logits, options, 17)
    check(got, expected)
    ids, probs = kernels.filter_logits_triton(logits, *options, 17, block=BLOCK)
    assert torch.equal(ids, got[0]) and torch.equal(probs, got[1])


@pytest.mark.skipif(not CUDA, reason="the interpreter computes bf16 wrongly")
@pytest.mark.parametrize("vocab, candidates", [(257, 17), (151_936, 50), (151_643, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filter_equals_its_twin_on_whole_vocabularies(vocab: int, candidates: int, dtype: torch.dtype) -> None:
    """The block of the engine, and bf16; where logits tie, the kernel prefers the lower id."""
    logits = (torch.randn(12, vocab, generator=generator(3)) * 3).to(DEVICE, dtype)
    options = (torch.full((12,), 0.8, device=DEVICE), torch.zeros(12, dtype=torch.int64, device=DEVICE))
    ids, probs, picks = kernels.filter_and_pick_triton(
        logits, *options, torch.ones(12, device=DEVICE), candidates, ints(12, 1), ints(12, 2), 0
    )
    best = logits.float().sort(stable=True, descending=True, dim=1)
    expected = best.indices[:, :candidates].sort(1).values
    assert torch.equal(ids, expected)
    weights = (logits.float().gather(1, expected) / 0.8).softmax(1)
    torch.testing.assert_close(probs, weights, rtol=RTOL, atol=ATOL)
    assert (ids == picks[:, None]).any(1).all()


def brute_force(logits: Tensor, candidates: int) -> Tensor:
    """Ids of the best: higher logit, then lower id."""
    return logits.sort(stable=True, descending=True, dim=1).indices[:, :candidates].sort(1).values


PLATEAUS = {
    "constant": lambda v: torch.zeros(2, v),
    "two levels": lambda v: torch.randint(0, 2, (2, v), generator=generator(4)).float(),
    "one lane": lambda v: (torch.arange(v) % BLOCK == 5).float().expand(2, -1) * 9 + torch.arange(v) * 1e-3,
    "two lanes": lambda v: (torch.arange(v) % BLOCK < 2).float().expand(2, -1) * 9 - torch.arange(v) * 1e-3,
    "both zeros": lambda v: torch.where(torch.arange(v) % 3 == 0, -0.0, 0.0).expand(2, -1),
}


@pytest.mark.parametrize("name", PLATEAUS)
@pytest.mark.parametrize("candidates", [3, 17])
def test_ties_go_to_the_lower_id_and_overflow_is_found(name: str, candidates: int) -> None:
    """Scratch of the smallest size: more tokens are as good as the K-th best lane than it can take."""
    logits = PLATEAUS[name](257).to(DEVICE).contiguous()
    options = (torch.ones(2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE))
    (ids, probs, picks), _ = run(logits, (*options, torch.ones(2, device=DEVICE)), candidates, cap=32)
    assert torch.equal(ids, brute_force(logits, candidates))
    torch.testing.assert_close(probs, logits.gather(1, ids).softmax(1), rtol=RTOL, atol=ATOL)
    assert torch.equal(picks, pick(Filtered(ids, probs), ints(2, 1), ints(2, 2), DRAFT_OR_TARGET))


def test_top_k_and_temperature_zero_prefer_the_lower_id() -> None:
    """Equal logits at the edge of top-k, and an argmax that occurs often."""
    logits = torch.randint(0, 3, (4, 257), generator=generator(5)).float().to(DEVICE)
    temperature, top_k = torch.tensor([1.0, 0.0, 1.0, 0.0]).to(DEVICE), torch.tensor([5, 5, 1, 0]).to(DEVICE)
    (ids, probs, picks), _ = run(logits, (temperature, top_k, torch.ones(4, device=DEVICE)), 17, cap=32)
    for r, kept in enumerate([5, 1, 1, 1]):
        assert torch.equal(ids[r][probs[r] > 0], brute_force(logits[r : r + 1], kept)[0])
    assert torch.equal(picks[1:], logits[1:].argmax(1))


@pytest.mark.parametrize("vocab", [1, 17, 257])
def test_no_logit_leads_out_of_the_vocabulary(vocab: int) -> None:
    """Rows of NaN, with some NaN, of infinities: ids and pick are tokens, neighbours are untouched."""
    logits = distinct(6, vocab).clone()
    nan, inf = float("nan"), float("inf")
    logits[1], logits[2, : vocab // 2 + 1], logits[3], logits[4, -1] = nan, nan, -inf, inf
    options = (torch.full((6,), 0.7, device=DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE))
    (ids, probs, picks), expected = run(logits, (*options, torch.full((6,), 0.9, device=DEVICE)), 17, cap=32)
    assert (ids >= 0).all() and (ids < vocab).all() and (ids.diff(dim=1) > 0).all()
    assert (ids == picks[:, None]).any(1).all() and probs.isfinite().all()
    for r in (0, 5):
        check((ids[r], probs[r], picks[r]), tuple(x[r] for x in expected))


def test_sampling_goes_through_the_same_operation() -> None:
    """`filter_and_pick` is `filter_logits` and `pick`."""
    logits, options = distinct(9, 63), settings(9, 17)
    dist, picks = filter_and_pick(logits, *options, 17, ints(9, 1), ints(9, 2), DRAFT_OR_TARGET)
    alone = filter_logits(logits, *options, 17)
    assert torch.equal(dist.ids, alone.ids) and torch.equal(dist.probs, alone.probs)
    assert torch.equal(picks, pick(dist, ints(9, 1), ints(9, 2), DRAFT_OR_TARGET))


# -- verdict --------------------------------------------------------------------------------------------------------

RULES = [Verification("greedy"), Verification("coupled"), Verification("rejection"),
         Verification(emulation=Emulation("iid", 0.7)), Verification(emulation=Emulation())]  # fmt: skip


def twin(how: Verification, target: Filtered, drafts: Drafts, picks: Tensor | None) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aspire.verify.wanted", lambda _: False)
        return judge(how, target, drafts, picks)


def ragged(rows: int, width: int, k: int) -> tuple[Filtered, Drafts]:
    """Drafts that stand now and then; p and q over other ids, equal in some rows; padding is unreadable."""
    rng = generator(width * 100 + k)

    def dist(*shape: int) -> Filtered:
        ids = torch.rand(*shape, 2 * k, generator=rng).argsort(-1)[..., :k].sort(-1).values * 3
        probs = torch.rand(*shape, k, generator=rng).pow(3) * (torch.rand(*shape, k, generator=rng) > 0.3)
        probs[..., 0] += 0.01
        return Filtered(ids.to(DEVICE), (probs / probs.sum(-1, keepdim=True)).to(DEVICE))

    p, q = dist(rows, width), dist(rows, width + 1)  # q: a slice of a wider state
    q.ids[::3, : width - 1], q.probs[::3, : width - 1] = p.ids[::3, :-1], p.probs[::3, :-1]
    count = torch.randint(0, width, (rows,), generator=rng).to(DEVICE)
    count[:2] = width - 1
    seed, position, rounds = ints(rows, 7), ints(rows, 8, 4000), ints(rows, 9, 50)
    empty = torch.zeros(rows, width + 2, dtype=torch.int64, device=DEVICE)[:, : width - 1]
    drafts = Drafts(empty, count, seed, position, rounds)
    picks = target_picks(Filtered(p.ids.flatten(0, 1), p.probs.flatten(0, 1)), drafts)
    any_of_q = q.ids[..., int(torch.randint(k, (1,), generator=rng))]
    drafts.tokens.copy_(torch.where((torch.rand(rows, width, generator=rng) < 0.7).to(DEVICE), picks,
                                    any_of_q[:, :width])[:, :-1])  # fmt: skip
    past = torch.arange(width, device=DEVICE) > count[:, None]
    p.probs[past], q.probs[:, : width - 1][past[:, 1:]], drafts.tokens[past[:, 1:]] = float("nan"), float("nan"), -1
    q = Filtered(q.ids[:, : width - 1], q.probs[:, : width - 1])
    target = Filtered(p.ids.flatten(0, 1), p.probs.flatten(0, 1))
    return target, Drafts(drafts.tokens, count, seed, position, rounds, q)


@pytest.mark.parametrize("given", [False, True], ids=["own picks", "given picks"])
@pytest.mark.parametrize("how", RULES, ids=lambda how: how.emulation.profile if how.emulation else how.mode)
@pytest.mark.parametrize("rows, width, k", judging.CASES)
def test_verdict_equals_its_twin(rows: int, width: int, k: int, how: Verification, given: bool) -> None:
    """Ragged rows of every width: how many stand, and the tokens up to the one that follows."""
    target, drafts = ragged(rows, width, k)
    picks = target_picks(target, drafts) if given else None
    got, expected = judge_triton(how, target, drafts, picks), twin(how, target, drafts, picks)
    assert torch.equal(got.accepted, expected.accepted)
    emitted = torch.arange(width, device=DEVICE) <= got.accepted[:, None]
    assert torch.equal(got.tokens[emitted], expected.tokens[emitted])


def test_verdicts_of_the_cases_differ() -> None:
    """The drafts above are accepted, refused and replaced by a residual, so that equality says something."""
    target, drafts = ragged(63, 6, 17)
    for how in RULES:
        accepted = twin(how, target, drafts, None).accepted
        assert (accepted == drafts.count).any() and (accepted < drafts.count).any() and accepted.unique().numel() > 3


def test_a_verdict_of_garbage_does_not_fault() -> None:
    """Rows whose result nobody uses: no distribution, any ids, counts out of range."""
    target, drafts = ragged(9, 5, 17)
    assert drafts.q is not None
    drafts.q.ids.zero_(), drafts.q.probs.fill_(float("nan")), target.probs.fill_(float("nan"))
    drafts.count.copy_(torch.arange(9) - 2)
    for how in RULES:
        verdict = judge_triton(how, target, drafts)
        assert (verdict.accepted >= 0).all() and (verdict.accepted < 5).all()


def test_hetero_chances_stay_on_their_device() -> None:
    assert hetero_table(DEVICE) is hetero_table(DEVICE) and hetero_table(DEVICE).device.type == DEVICE.type
