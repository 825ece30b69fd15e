"""Which drafts stand? Greedy and coupled matching, rejection sampling, and emulated acceptance for shapes runs.

`greedy` and `coupled` are one rule: draft and target pick with the same noise, accept while the picks agree, emit the
target's picks; the text is that of autoregressive decoding with the same seed at any temperature. `rejection` is
Leviathan et al. (2211.17192) and Chen et al. (2302.01318) with q the distribution the draft was sampled from.

`match`, `reject` and `emulate` define the rules in torch; on a GPU `judge` gives the work to their kernel.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from aspire.kernels.jit import wanted
from aspire.kernels.judge import verdict_fits, verdict_triton
from aspire.kernels.noise import ACCEPT, DRAFT_OR_TARGET, EMULATE, RESIDUAL, gumbel, uniform
from aspire.sampling import Filtered, pick

MODES = ("greedy", "coupled", "rejection")


@dataclass(frozen=True)
class Emulation:
    """Acceptance drawn from a profile instead of compared: for random weights, marked in every record.

    profile "iid": every draft stands with probability alpha. "hetero": alpha differs between requests so that the mean
    accepted length of 20 drafts runs from 2.56 to 20.00 with mean 11.51 (the motivation study of ASPIRE), and walks
    within a request from round to round with correlation rho and standard deviation sigma in log-odds.
    """

    profile: str = "hetero"
    alpha: float = 0.9
    rho: float = 0.8
    sigma: float = 0.3

    def __post_init__(self) -> None:
        if self.profile not in ("iid", "hetero"):
            raise ValueError(f"emulation profile must be iid or hetero, got {self.profile}")

    @property
    def mark(self) -> str:
        return f"emulated:iid({self.alpha})" if self.profile == "iid" else f"emulated:hetero({self.rho},{self.sigma})"

    def alphas(self, seed: Tensor, rounds: Tensor) -> Tensor:
        """Chance of each draft of this round.  # [R] fp32"""
        if self.profile == "iid":
            return torch.full(seed.shape, self.alpha, device=seed.device)
        zero = torch.zeros_like(seed)[:, None]
        rank = uniform(seed, torch.full_like(seed, -1), EMULATE, zero)[:, 0]
        base = hetero_table(seed.device)[(rank * 1024).long()]
        # A first-order autoregressive walk written as its moving average, so that it needs no state of its own.
        lags = torch.arange(16, device=seed.device)
        steps = gumbel_pair(seed, rounds[:, None] - lags)  # [R, 16], unit variance
        walk = (steps * self.rho**lags).sum(1) * self.sigma * (1 - self.rho**2) ** 0.5
        return torch.where(base >= 1, base, torch.sigmoid(torch.logit(base.clamp(max=1 - 1e-6)) + walk))


def gumbel_pair(seed: Tensor, index: Tensor) -> Tensor:
    """Symmetric noise of unit variance: a difference of two Gumbel numbers is logistic, of variance pi^2 / 3."""
    at = torch.full_like(seed, -2)
    first, second = (gumbel(seed, at - i, EMULATE, index) for i in (0, 1))
    return (first - second) * (3**0.5 / torch.pi)


@lru_cache
def hetero_table(device: torch.device) -> Tensor:
    """alpha of 1,024 equally likely requests: accepted length 2.56 + 17.44 u^0.9486 has mean 11.51 over u in (0, 1).

    A device's first call copies from the host, which no captured graph may do: make it before.
    """
    rank = (torch.arange(1024, dtype=torch.float64) + 0.5) / 1024
    length = 2.56 + 17.44 * rank**0.9486
    powers = torch.arange(1, 21)
    low, high = torch.zeros_like(length), torch.ones_like(length)
    for _ in range(50):  # bisection of alpha + ... + alpha^20 = wanted
        middle = (low + high) / 2
        short = (middle[:, None] ** powers).sum(1) < length
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    return high.float().to(device)


@dataclass(frozen=True)
class Verification:
    """How drafts are judged. draft_sampling "greedy" drafts the argmax and then takes q as one-hot (rejection only).

    Raises ValueError for an unknown mode or a draft_sampling that the mode would ignore.
    """

    mode: str = "coupled"
    draft_sampling: str = "sampled"
    emulation: Emulation | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"verification must be one of {MODES}, got {self.mode}")
        if self.draft_sampling not in ("sampled", "greedy"):
            raise ValueError(f"draft_sampling must be sampled or greedy, got {self.draft_sampling}")
        if self.draft_sampling == "greedy" and self.mode != "rejection":
            raise ValueError(f"draft_sampling=greedy has no effect on verification {self.mode}: leave it at sampled")

    @property
    def acceptance_mark(self) -> str:
        return "measured" if self.emulation is None else self.emulation.mark


@dataclass(frozen=True)
class Verdict:
    """accepted [R] int64; tokens [R, W] int64, of which the first accepted + 1 are committed."""

    accepted: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Drafts:
    """What is judged: the R rows of a verify.

    tokens [R, W-1] and count [R] drafts; q: the distributions they came from, ids and probs [R, W-1, K] (rejection
    only); seed [R]; position [R] of the token that the row's first query predicts; rounds [R] verified so far.
    """

    tokens: Tensor
    count: Tensor
    seed: Tensor
    position: Tensor
    rounds: Tensor
    q: Filtered | None = None


def judge(how: Verification, target: Filtered, drafts: Drafts, picks: Tensor | None = None) -> Verdict:
    """target: distributions of the R * W positions, row after row; positions past a row's width are ignored.

    picks [R, W]: the target's picks where the caller has them (key = position, purpose DRAFT_OR_TARGET).
    """
    kernel_takes = verdict_fits(target.ids.shape[1], 1 if drafts.q is None else drafts.q.ids.shape[-1])
    if wanted(target.ids) and kernel_takes:
        return judge_triton(how, target, drafts, picks)
    if how.emulation is not None:
        return emulate(how.emulation, target, drafts, picks)
    return reject(target, drafts) if how.mode == "rejection" else match(target, drafts, picks)


def judge_triton(how: Verification, target: Filtered, drafts: Drafts, picks: Tensor | None = None) -> Verdict:
    """`judge` by the kernel alone."""
    rule: tuple = ("match",)
    q = table = None
    if (emulation := how.emulation) is not None:
        rule = ("iid", emulation.alpha)
        if emulation.profile == "hetero":
            rule, table = ("hetero", emulation.rho, emulation.sigma), hetero_table(drafts.seed.device)
    elif how.mode == "rejection":
        assert drafts.q is not None, "rejection needs the draft distributions"
        rule, q = ("reject",), (drafts.q.ids, drafts.q.probs)
    own = (drafts.tokens, drafts.count, drafts.seed, drafts.position, drafts.rounds)
    return Verdict(*verdict_triton(rule, *own, (target.ids, target.probs), q, picks, table))


def leading(stands: Tensor) -> Tensor:
    """Drafts before the first one that falls.  # [R, W-1] bool -> [R]"""
    return stands.long().cumprod(1).sum(1)


def target_picks(target: Filtered, drafts: Drafts) -> Tensor:
    """What autoregressive decoding would say at each position, given the drafts before it.  # [R, W]"""
    width = drafts.tokens.shape[1] + 1
    positions = drafts.position[:, None] + torch.arange(width, device=drafts.position.device)
    picks = pick(target, drafts.seed.repeat_interleave(width), positions.flatten(), DRAFT_OR_TARGET)
    return picks.view(-1, width)


def counted(drafts: Drafts) -> Tensor:
    """Which draft columns a row has.  # [R, W-1] bool"""
    return torch.arange(drafts.tokens.shape[1], device=drafts.tokens.device) < drafts.count[:, None]


def match(target: Filtered, drafts: Drafts, picks: Tensor | None = None) -> Verdict:
    """Accept while draft and target agree; every committed token is the target's pick."""
    picks = target_picks(target, drafts) if picks is None else picks
    return Verdict(leading((drafts.tokens == picks[:, :-1]) & counted(drafts)), picks)


def reject(target: Filtered, drafts: Drafts) -> Verdict:
    """Accept draft x with chance min(1, p(x) / q(x)); at the first refusal draw from max(p - q, 0), normalised."""
    assert drafts.q is not None, "rejection needs the draft distributions"
    rows, columns = drafts.tokens.shape
    k = target.ids.shape[1]
    p = Filtered(target.ids.view(rows, columns + 1, k), target.probs.view(rows, columns + 1, k))
    stands = counted(drafts)
    for j in range(columns):
        x = drafts.tokens[:, j : j + 1]
        p_x = Filtered(p.ids[:, j], p.probs[:, j]).lookup(x)[:, 0]
        q_x = Filtered(drafts.q.ids[:, j], drafts.q.probs[:, j]).lookup(x)[:, 0]
        u = uniform(drafts.seed, drafts.position + j, ACCEPT, torch.zeros_like(x))[:, 0]
        stands[:, j] &= u * q_x < p_x
    accepted = leading(stands)
    row = torch.arange(rows, device=accepted.device)
    last = Filtered(p.ids[row, accepted], p.probs[row, accepted])
    residual = last.probs
    if columns:
        at = accepted.clamp(max=columns - 1)
        q = Filtered(drafts.q.ids[row, at], drafts.q.probs[row, at]).lookup(last.ids)
        refused = (accepted < drafts.count)[:, None]
        rest = (last.probs - q).clamp(min=0)
        # p == q up to rounding leaves nothing over; then p itself is the right distribution.
        residual = torch.where(refused & (rest.sum(1, keepdim=True) > 0), rest, last.probs)
    extra = pick(Filtered(last.ids, residual), drafts.seed, drafts.position + accepted, RESIDUAL)
    tokens = torch.cat([drafts.tokens, extra[:, None]], 1)
    tokens[row, accepted] = extra
    return Verdict(accepted, tokens)


def emulate(how: Emulation, target: Filtered, drafts: Drafts, picks: Tensor | None = None) -> Verdict:
    """Let drafts stand by the profile's chances; the correction is still the target's pick."""
    columns = torch.arange(drafts.tokens.shape[1], device=drafts.tokens.device).expand_as(drafts.tokens)
    u = uniform(drafts.seed, drafts.position, EMULATE, columns)
    accepted = leading((u < how.alphas(drafts.seed, drafts.rounds)[:, None]) & counted(drafts))
    picks = target_picks(target, drafts) if picks is None else picks
    tokens = torch.cat([drafts.tokens, picks[:, -1:]], 1)
    row = torch.arange(accepted.shape[0], device=accepted.device)
    tokens[row, accepted] = picks[row, accepted]
    return Verdict(accepted, tokens)
