"""Which few tokens can a row of logits still become, with what probabilities, and which one is drawn?

Contract of `filter_logits` and `filter_and_pick`. logits [R, V] fp32 or bf16 (read as fp32), rows strided, last
dimension contiguous; temperature fp32, top_k int64 (0 = all candidates), top_p fp32, seed and key int64, all [R].
Written, all new and contiguous: ids [R, K] int64 ascending, probs [R, K] fp32 summing to 1 with 0 where nothing is
kept, picks [R] int64: argmax(log p + Gumbel noise keyed by (seed, key, purpose, id)). K = min(candidates, V).

The better of two tokens has the higher logit, then the lower id. Order of operations: temperature, top-k, top-p over
the K best, so K bounds every top_k. Temperature 0 puts everything on the best token. The twins keep to that order but
may choose either way between equal logits at the edge of the K candidates or of top-k and top-p, as `topk` does. A NaN
logit is worse than any other: ids and picks are tokens of [0, V) whatever the row holds, but what a row with NaN or
without a finite logit says is unspecified. A row whose key is negative is padding: its results are unspecified.

The kernel reads a row once. A lane keeps the best logit of every BLOCK-th token; the K best tokens are no worse than
the K-th best lane, and few others are as good, so only the lanes at least that good are read again. A scratch of CAP
keys takes what is found there; where a row has more (plateaus, rows made for it), a bisection over the keys, which are
unique, finds a threshold that fits.
"""

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted
from aspire.kernels.noise import DRAFT_OR_TARGET, gumbel, gumbel_of

WIDEST = 1024  # candidates the kernel holds at once; more of them go to the twin


def filter_logits_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """(ids, probs)."""
    logits, greedy = logits.float(), temperature == 0
    values, ids = logits.topk(min(candidates, logits.shape[1]), dim=-1)  # descending
    rank = torch.arange(values.shape[1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    scaled = (values / torch.where(greedy, 1.0, temperature)[:, None]).masked_fill(~keep, float("-inf"))
    probs = scaled.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the better tokens; the first token is always kept
    keep = keep & (before < top_p[:, None]) | (rank == 0)
    probs = scaled.masked_fill(~keep, float("-inf")).softmax(-1)
    # topk breaks ties in no fixed order, argmax takes the first: greedy decoding must not depend on topk.
    first = rank == 0
    ids = torch.where(greedy[:, None] & first, logits.argmax(-1, keepdim=True), ids)
    probs = torch.where(greedy[:, None], first.float(), probs)
    order = ids.sort(stable=True, dim=-1)
    return order.values, probs.gather(1, order.indices)


def pick_torch(ids: Tensor, probs: Tensor, seed: Tensor, key: Tensor, purpose: int) -> Tensor:
    """One of ids [R, K] a row: argmax(log p + Gumbel noise).  # [R]"""
    noisy = probs.log() + gumbel(seed, key, purpose, ids)
    return ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]


def filter_and_pick_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int,
    seed: Tensor, key: Tensor, purpose: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids, probs, picks)."""
    ids, probs = filter_logits_torch(logits, temperature, top_k, top_p, candidates)
    return ids, probs, pick_torch(ids, probs, seed, key, purpose)


# Order of floats as int32, -inf and NaN in it, and the bounds of int64 keys; spelt out, for kernels read no globals.
#   -2139095041 = _order(-inf)    -2147483648 = _order(NaN)    +-2^63 = bounds of keys


@jit
def _order(x):
    """fp32 -> int32 of the same order, NaN below everything, both zeros equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@jit
def _key(x, token):
    """Unique int64 key of a token: a better token has a greater key."""
    return (_order(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@jit
def _token_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@jit
def _logit_of(key):
    order = (key >> 32).to(tl.int32)
    x = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(x == x, x, float("-inf"))


@jit
def pick_of(ids, probs, inside, seed, key, PURPOSE: tl.constexpr):
    """argmax(log p + Gumbel noise) over the block's entries `inside`, the first of equals: one of their ids."""
    possible = inside & (probs > 0)
    noisy = tl.log(tl.where(possible, probs, 1.0)) + gumbel_of(seed, key, PURPOSE, ids)
    noisy = tl.where(possible & (noisy == noisy), noisy, float("-inf"))
    best = tl.argmax(noisy, 0)  # entry 0 if none is possible
    return tl.sum(tl.where(tl.arange(0, ids.shape[0]) == best, ids, 0), 0)


@jit
def _append(scratch_ptr, found, entry, hit, CAP: tl.constexpr):
    """Write the entries that hit behind those found so far, up to CAP; how many there are now."""
    at = found + tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(scratch_ptr + at, entry, mask=hit & (at < CAP))
    return found + tl.sum(hit.to(tl.int32), 0)


@jit
def _collect(
    logits_ptr, scratch_ptr, vocab,
    K: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys of between K and CAP tokens, the K best among them, in the second half of scratch; how many."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        x = tl.load(logits_ptr + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        best = tl.where(x > best, x, best)  # NaN never is

    # At least K lanes are >= low all along; any low that leaves few enough will do.
    order = _order(best)
    low, high = tl.min(order, 0).to(tl.int64), tl.max(order, 0).to(tl.int64) + 1
    lanes = tl.full((), BLOCK, tl.int32)
    while (lanes > K + (CAP - K) // 4) & (high - low > 1):
        middle = (low + high) >> 1
        above = tl.sum((order >= middle).to(tl.int32), 0)
        enough = above >= K
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        lanes = tl.where(enough, above, lanes)
    # Lanes of -inf may hide NaN, which has to be found where there is nothing better.
    bound = tl.where(low > -2139095041, low << 32, -9223372036854775808)

    keys_ptr = scratch_ptr + CAP
    found = lanes  # as many tokens at least: too many if the lanes are
    if lanes <= CAP:
        _append(scratch_ptr, 0, lane.to(tl.int64), order >= low, CAP)
        tl.debug_barrier()
        found = 0 * lanes
        slot, chunk = tl.arange(0, BLOCK) // CHUNKS, tl.arange(0, BLOCK) % CHUNKS
        for first in tl.range(0, lanes, BLOCK // CHUNKS):
            listed = first + slot < lanes
            token = tl.load(scratch_ptr + first + slot, mask=listed, other=0).to(tl.int32) + chunk * BLOCK
            listed = listed & (token < vocab)
            key = _key(tl.load(logits_ptr + token, mask=listed, other=0.0).to(tl.float32), token)
            found = _append(keys_ptr, found, key, listed & (key >= bound), CAP)

    if found > CAP:
        # More than CAP keys are >= under, fewer than K are >= over; since keys are unique, a bound between fits.
        under, over = bound, tl.full((), 9223372036854775807, tl.int64)
        while (found > CAP) | (found < K):
            bound = (under >> 1) + (over >> 1) + (under & over & 1)
            count = tl.zeros((BLOCK,), tl.int32)
            for start in tl.range(0, vocab, BLOCK):
                inside = start + lane < vocab
                x = tl.load(logits_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
                count += (inside & (_key(x, start + lane) >= bound)).to(tl.int32)
            found = tl.sum(count, 0)
            under, over = tl.where(found > CAP, bound, under), tl.where(found < K, bound, over)
        found = 0 * found
        tl.debug_barrier()  # what overflowed above is overwritten, by other threads
        for start in tl.range(0, vocab, BLOCK):
            inside = start + lane < vocab
            key = _key(tl.load(logits_ptr + start + lane, mask=inside, other=0.0).to(tl.float32), start + lane)
            found = _append(keys_ptr, found, key, inside & (key >= bound), CAP)
    tl.debug_barrier()  # keys are read by other threads than wrote them
    return found


@jit
def _filter_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, key_ptr,
    ids_ptr, probs_ptr, picks_ptr, scratch_ptr,
    logits_stride, vocab,
    PICK: tl.constexpr, PURPOSE: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a row, which owns scratch [2, CAP] of its row; picks is written only with PICK."""
    row = tl.program_id(0).to(tl.int64)
    if PICK:
        if tl.load(key_ptr + row) < 0:  # padding: its logits may be anything, and NaN takes the longest of all ways
            return
    scratch_ptr += row * 2 * CAP
    found = _collect(logits_ptr + row * logits_stride, scratch_ptr, vocab, K, CAP, BLOCK, CHUNKS, STAGES)
    entry = tl.arange(0, CAP)
    keys = tl.load(scratch_ptr + CAP + entry, mask=entry < found, other=-9223372036854775808)
    keys = tl.topk(keys, K_PAD)  # descending

    rank = tl.arange(0, K_PAD)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    greedy = temperature == 0.0
    keep = (rank < K) & ((rank < top_k) | (top_k == 0))
    scaled = tl.div_rn(_logit_of(keys), tl.zeros((K_PAD,), tl.float32) + tl.where(greedy, 1.0, temperature))
    highest = tl.max(tl.where(rank == 0, scaled, float("-inf")), 0)
    equal = scaled == highest  # and may be infinite, so must not be subtracted
    weight = tl.where(keep, tl.exp(tl.where(equal, 0.0, scaled) - tl.where(equal, 0.0, highest)), 0.0)
    probs = weight / tl.sum(weight, 0)
    before = tl.cumsum(probs, 0) - probs
    weight = tl.where((before < tl.load(top_p_ptr + row)) | (rank == 0), weight, 0.0)
    probs = tl.where(greedy, (rank == 0).to(tl.float32), weight / tl.sum(weight, 0))

    # Sorted by id with the probability's bits, never negative, along for the ride.
    token = tl.where(rank < K, _token_of(keys), 0x7FFFFFFF)
    packed = tl.sort((token << 32) | probs.to(tl.int32, bitcast=True).to(tl.int64))
    ids, probs = packed >> 32, (packed & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(ids_ptr + row * K + rank, ids, mask=rank < K)
    tl.store(probs_ptr + row * K + rank, probs, mask=rank < K)
    if PICK:
        choice = pick_of(ids, probs, rank < K, tl.load(seed_ptr + row), tl.load(key_ptr + row), PURPOSE)
        tl.store(picks_ptr + row, choice)


def _launch(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int,
    seed: Tensor | None, key: Tensor | None, purpose: int, block: int, cap: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids, probs, picks), picks unwritten without seed and key. block and cap are powers of two."""
    rows, vocab = logits.shape
    k = min(candidates, vocab)
    k_pad = max(16, power_of_2(k))
    cap = cap or max(256, 2 * k_pad)
    assert 1 <= k <= min(WIDEST, block) and cap >= k_pad and block >= power_of_2(-(-vocab // block)), (k, cap, block)
    assert logits.stride(1) == 1 and logits.dtype in (torch.float32, torch.bfloat16), (logits.stride(), logits.dtype)
    options = [(temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float32)]
    options += [(x, torch.int64) for x in (seed, key) if x is not None]
    for x, dtype in options:
        assert x.shape == (rows,) and x.dtype == dtype and x.device == logits.device, (x.shape, x.dtype)
    temperature, top_k, top_p = (x.contiguous() for x in (temperature, top_k, top_p))
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    probs = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    picks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty((rows, 2, cap), dtype=torch.int64, device=logits.device)
    picking = seed is not None and key is not None
    if rows:
        _filter_kernel[(rows,)](
            logits, temperature, top_k, top_p,
            picks if seed is None else seed.contiguous(), picks if key is None else key.contiguous(),
            ids, probs, picks, scratch, logits.stride(0), vocab,
            PICK=picking, PURPOSE=purpose, K=k, K_PAD=k_pad, CAP=cap,
            BLOCK=block, CHUNKS=power_of_2(-(-vocab // block)), STAGES=6, num_warps=min(16, max(1, block // 128)),
        )  # fmt: skip
    return ids, probs, picks


def filter_logits_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int,
    block: int = 4096, cap: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _launch(logits, temperature, top_k, top_p, candidates, None, None, DRAFT_OR_TARGET, block, cap)[:2]


def filter_and_pick_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int,
    seed: Tensor, key: Tensor, purpose: int, block: int = 4096, cap: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _launch(logits, temperature, top_k, top_p, candidates, seed, key, purpose, block, cap)


def _fits(logits: Tensor, candidates: int) -> bool:
    return wanted(logits) and min(candidates, logits.shape[1]) <= WIDEST


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """(ids, probs); see the contract at the head of this file."""
    run = filter_logits_triton if _fits(logits, candidates) else filter_logits_torch
    return run(logits, temperature, top_k, top_p, candidates)


def filter_and_pick(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int,
    seed: Tensor, key: Tensor, purpose: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(ids, probs, picks); see the contract at the head of this file."""
    run = filter_and_pick_triton if _fits(logits, candidates) else filter_and_pick_torch
    return run(logits, temperature, top_k, top_p, candidates, seed, key, purpose)


CASES = [(4, v, k) for v in (1, 17, 63, 257, 1000) for k in (1, 3, 17, 50)]  # (R, V, candidates)
BENCHMARK = [(12, 151_936, 50), (64, 151_936, 50), (64, 151_936, 1024)]
