"""How many drafts of each row stand, and which token follows them, in one launch?

Contract of `verdict_triton`. R rows of W = columns + 1 positions. tokens [R, W-1] int64 and count [R] int64 in 0 ..
W-1: the drafts and how many of them are the row's own; seed, position, rounds [R] int64, position >= 0; p_ids int64 and
p_probs fp32 [R * W, K]: the target's distributions, row after row, ids ascending; q_ids, q_probs [R, W-1, Kq]: those
the drafts came from (rejection only); picks [R, W] int64 or None: the target's picks, which None leaves to the kernel.
tokens and q may be strided in all but their last dimension, all else is contiguous. What lies in a column past a row's
count is not read. Written, both new: accepted [R] int64, out [R, W] int64, whose first accepted + 1 tokens are
committed and whose rest is unspecified. Rows are independent; a row of garbage harms no other, and its accepted lies
within 0 .. W-1 all the same.

A rule names the test and its numbers:
    ("match",)             a draft stands while it is the target's pick; out is the target's picks
    ("reject",)            a draft x stands with chance min(1, p(x) / q(x)); the first that falls is replaced by a draw
                           from max(p - q, 0), or from p where that is 0, all standing are followed by a draw from p
    ("iid", alpha)         a draft stands with chance alpha; the target's pick follows
    ("hetero", rho, sigma) likewise, with the chance of `Emulation.alphas`; table [1024] fp32 as of `hetero_table`
The torch twins are `match`, `reject` and `emulate` of aspire/verify.py, where they read as the definition of the rules.
"""

import torch
from torch import Tensor

from aspire.kernels.filter import WIDEST, pick_of
from aspire.kernels.jit import jit, power_of_2, tl
from aspire.kernels.noise import ACCEPT, DRAFT_OR_TARGET, EMULATE, RESIDUAL, gumbel_of, uniform_of


@jit
def _lookup(ids_ptr, probs_ptr, wanted, inside, K: tl.constexpr, STEPS: tl.constexpr):
    """Probability of each id wanted, 0 where it is not kept: a bisection of ascending ids, for blocks of any shape."""
    low = tl.zeros_like(wanted)
    high = low + (K - 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high) >> 1
        less = tl.load(ids_ptr + middle, mask=inside, other=0) < wanted
        low = tl.where(less, tl.minimum(middle + 1, high), low)
        high = tl.where(less, high, middle)
    inside = inside & (tl.load(ids_ptr + low, mask=inside, other=0) == wanted)
    return tl.load(probs_ptr + low, mask=inside, other=0.0)


@jit
def _target_pick(ids_ptr, probs_ptr, at, seed, key, PURPOSE: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr):
    """A draw from distribution number `at`."""
    k = tl.arange(0, K_PAD)
    ids = tl.load(ids_ptr + at * K + k, mask=k < K, other=0)
    probs = tl.load(probs_ptr + at * K + k, mask=k < K, other=0.0)
    return pick_of(ids, probs, k < K, seed, key, PURPOSE)


@jit
def _hetero_alpha(table_ptr, seed, rounds, rho, sigma, EMULATE: tl.constexpr):
    """`Emulation.alphas` of one row."""
    lag = tl.arange(0, 16)
    rank = uniform_of(seed, tl.full((), -1, tl.int64), EMULATE, tl.full((), 0, tl.int64))
    base = tl.load(table_ptr + (rank * 1024).to(tl.int32))
    first = gumbel_of(seed, tl.full((), -2, tl.int64), EMULATE, rounds - lag)
    second = gumbel_of(seed, tl.full((), -3, tl.int64), EMULATE, rounds - lag)
    decay, square = tl.full((16,), 1.0, tl.float32), rho
    for bit in tl.static_range(4):  # rho^lag; rho may be 0
        decay = tl.where(((lag >> bit) & 1) == 1, decay * square, decay)
        square = square * square
    steps = (first - second) * 0.5513288954217921  # sqrt(3) / pi: unit variance
    walk = tl.sum(steps * decay, 0) * sigma * tl.sqrt(1.0 - rho * rho)
    odds = tl.minimum(base, 1.0 - 1e-6)
    odds = tl.log(tl.div_rn(odds, 1.0 - odds)) + walk
    return tl.where(base >= 1.0, base, tl.div_rn(1.0, 1.0 + tl.exp(-odds)))


@jit
def _judge_kernel(
    tokens_ptr, count_ptr, seed_ptr, position_ptr, rounds_ptr, p_ids_ptr, p_probs_ptr,
    q_ids_ptr, q_probs_ptr, picks_ptr, table_ptr, accepted_ptr, out_ptr,
    tokens_stride, q_row_stride, q_column_stride, first_number, second_number,
    RULE: tl.constexpr, HAS_PICKS: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, STEPS: tl.constexpr, KQ: tl.constexpr, Q_STEPS: tl.constexpr,
    PICK: tl.constexpr, ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """One program a row. PICK, ACCEPT, RESIDUAL and EMULATE are the purposes of noise."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, W_PAD)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    count = tl.minimum(tl.maximum(tl.load(count_ptr + row), 0), W - 1)
    own = column < count  # never the last column
    token = tl.load(tokens_ptr + row * tokens_stride + column, mask=own, other=0)

    if RULE == "match":
        if HAS_PICKS:
            picks = tl.load(picks_ptr + row * W + column, mask=column < W, other=0)
        else:
            picks = tl.zeros((W_PAD,), tl.int64)
            at, going = tl.full((), 0, tl.int64), count >= 0
            while going:
                pick = _target_pick(p_ids_ptr, p_probs_ptr, row * W + at, seed, position + at, PICK, K, K_PAD)
                picks = tl.where(column == at, pick, picks)
                going = (at < count) & (tl.sum(tl.where(column == at, token, 0), 0) == pick)
                at += 1
        stands = own & (token == picks)
    elif RULE == "reject":
        p_at = (row * W + column) * K
        q_at = row * q_row_stride + column * q_column_stride
        p = _lookup(p_ids_ptr + p_at, p_probs_ptr + p_at, token, own, K, STEPS)
        q = _lookup(q_ids_ptr + q_at, q_probs_ptr + q_at, token, own, KQ, Q_STEPS)
        u = uniform_of(seed, position + column, ACCEPT, tl.full((), 0, tl.int64))
        stands = own & (u * q < p)
    else:
        u = uniform_of(seed, position, EMULATE, column)
        alpha = first_number
        if RULE == "hetero":
            alpha = _hetero_alpha(table_ptr, seed, tl.load(rounds_ptr + row), first_number, second_number, EMULATE)
        stands = own & (u < alpha)
    accepted = tl.min(tl.where(stands, W - 1, column), 0).to(tl.int64)

    at = row * W + accepted
    if RULE == "match":
        result = picks
    elif RULE == "reject":
        k = tl.arange(0, K_PAD)
        ids = tl.load(p_ids_ptr + at * K + k, mask=k < K, other=0)
        probs = tl.load(p_probs_ptr + at * K + k, mask=k < K, other=0.0)
        q_at = row * q_row_stride + accepted * q_column_stride
        q = _lookup(q_ids_ptr + q_at, q_probs_ptr + q_at, ids, (k < K) & (accepted < count), KQ, Q_STEPS)
        rest = tl.maximum(probs - q, 0.0)
        # p == q up to rounding leaves nothing over; then p itself is the right distribution.
        rest = tl.where((accepted < count) & (tl.sum(rest, 0) > 0.0), rest, probs)
        extra = pick_of(ids, rest, k < K, seed, position + accepted, RESIDUAL)
        result = tl.where(column < accepted, token, extra)
    else:
        if HAS_PICKS:
            extra = tl.load(picks_ptr + at)
        else:
            extra = _target_pick(p_ids_ptr, p_probs_ptr, at, seed, position + accepted, PICK, K, K_PAD)
        result = tl.where(column < accepted, token, extra)
    tl.store(accepted_ptr + row, accepted)
    tl.store(out_ptr + row * W + column, result, mask=column < W)


def verdict_fits(k: int, kq: int) -> bool:
    """Whether the kernel takes distributions of so many entries."""
    return max(k, kq) <= WIDEST


def verdict_triton(
    rule: tuple, tokens: Tensor, count: Tensor, seed: Tensor, position: Tensor, rounds: Tensor,
    p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor] | None = None,
    picks: Tensor | None = None, table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(accepted, tokens); see the contract at the head of this file."""
    name, *numbers = rule
    rows, width, k = tokens.shape[0], tokens.shape[1] + 1, p[0].shape[1]
    assert name in ("match", "reject", "iid", "hetero") and len(numbers) == {"iid": 1, "hetero": 2}.get(name, 0), rule
    assert all(x.shape == (rows * width, k) and x.is_contiguous() for x in p) and p[1].dtype == torch.float32
    assert (name == "reject") == (q is not None) and (name == "hetero") == (table is not None), name
    assert table is None or (table.shape == (1024,) and table.dtype == torch.float32)
    assert picks is None or (picks.shape == (rows, width) and picks.is_contiguous())
    for x in (count, seed, position, rounds):
        assert x.shape == (rows,) and x.dtype == torch.int64, (x.shape, x.dtype)
    q_ids, q_probs = q or p
    kq, q_row, q_column = q_ids.shape[-1], 0, 0
    if q is not None:
        q_row, q_column, _ = q_ids.stride()
        assert q_ids.shape == q_probs.shape == (rows, width - 1, kq) and q_ids.stride() == q_probs.stride()
        assert width == 1 or q_ids.stride(2) == 1
    assert verdict_fits(k, kq) and (width <= 2 or tokens.stride(1) == 1), (k, kq, tokens.stride())
    accepted = torch.empty(rows, dtype=torch.int64, device=tokens.device)
    out = torch.empty((rows, width), dtype=torch.int64, device=tokens.device)
    first, second = (*map(float, numbers), 0.0, 0.0)[:2]
    if rows:
        k_pad = max(16, power_of_2(k))
        _judge_kernel[(rows,)](
            tokens, count.contiguous(), seed.contiguous(), position.contiguous(), rounds.contiguous(), *p,
            q_ids, q_probs, out if picks is None else picks, p[1] if table is None else table, accepted, out,
            tokens.stride(0), q_row, q_column, first, second,
            RULE=name, HAS_PICKS=picks is not None, W=width, W_PAD=max(2, power_of_2(width)),
            K=k, K_PAD=k_pad, STEPS=(k - 1).bit_length(), KQ=kq, Q_STEPS=(kq - 1).bit_length(),
            PICK=DRAFT_OR_TARGET, ACCEPT=ACCEPT, RESIDUAL=RESIDUAL, EMULATE=EMULATE,
            num_warps=1 if k_pad <= 128 else 4,
        )  # fmt: skip
    return accepted, out


CASES = [(9, w, k) for w in (1, 2, 3, 4, 5, 6) for k in (1, 3, 17)]  # (R, W, K)
BENCHMARK = [(12, 11, 50), (64, 21, 50), (64, 21, 1024)]
