"""Which memory does each Triton kernel touch? Small launches of all of them, for compute-sanitizer and nothing else.

python tests/sanitize_cases.py [part=I/N] [list]     part: every N-th case, from the I-th on
Sizes are odd, so that masks have work; whether results are right is the tests' business. With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, and one step past its end is seen.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from aspire.kernels import feed as feeding  # noqa: E402
from aspire.kernels import norm, scores, select, skinny  # noqa: E402
from aspire.kernels.activation import silu_mul_triton  # noqa: E402
from aspire.kernels.attention import BlockSet, Rows, Taps, mixed_attention_triton  # noqa: E402
from aspire.kernels.blocks import count_below_triton, resolve_triton  # noqa: E402
from aspire.kernels.filter import filter_and_pick_triton  # noqa: E402
from aspire.kernels.heads import Angles, Heads, store_heads_triton  # noqa: E402
from aspire.kernels.judge import verdict_triton  # noqa: E402
from aspire.kernels.work import plan_work_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter computes bf16 wrongly
PAGE = 16


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Drawn on the CPU: the sanitizer looks at our kernels, not at torch's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def bools(*values: bool) -> Tensor:
    return torch.tensor(values, device=DEVICE)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(
    contexts: list[int], widths: list[int], group: int, dim: int, dtype: torch.dtype,
    block: int = 0, per_head: bool = False, taps: str = "",
) -> None:  # fmt: skip
    """Ragged rows over exactly the pages they need; with `block` the rows one query wide read a selection."""
    kv_heads = 2
    pages = [-(-n // PAGE) for n in contexts]
    table = torch.zeros(len(contexts), max(pages), dtype=torch.int64)
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1))
    for row, n in enumerate(pages):
        table[row, :n] = order[sum(pages[:row]) : sum(pages[: row + 1])]
    k, v = (random(sum(pages) * PAGE, kv_heads, dim, dtype=dtype) for _ in "kv")
    width = ints(*widths)
    start, position = width.cpu().cumsum(0).to(DEVICE) - width, ints(*contexts) - width
    rows = Rows(start, width, position.clamp(min=0), table.to(DEVICE), PAGE, widest=max(widths))
    q = random(sum(widths), kv_heads * group, dim, dtype=dtype)
    if block:
        limits = [max(0, n - 20) // block for n in contexts]
        most = max(max(limits), 1)
        blocks = torch.arange(most).expand(kv_heads if per_head else 1, len(contexts), -1).contiguous()
        count = torch.tensor(limits).expand(kv_heads if per_head else 1, -1).contiguous()
        tails = ints(*(n * block for n in limits))
        one = (lambda x: x) if per_head else (lambda x: x[0])
        chosen = BlockSet(one(blocks).to(DEVICE), one(count).to(DEVICE), tails, block)
        rows = Rows(start, width, rows.position, rows.page_table, PAGE, chosen, width == 1, rows.widest)
    tap = None
    if taps:
        queries = max(widths) if taps == "all" else min(2, max(widths))
        kind = torch.float32 if dtype == torch.float32 else torch.float16
        logits = torch.empty(len(contexts), queries, len(q[0]), max(pages) * PAGE, dtype=kind, device=DEVICE)
        lse = torch.empty(len(q), len(q[0]), device=DEVICE)
        tap = Taps(bools(*(i % 2 == 0 for i in range(len(contexts)))), taps == "all", logits, lse)
    mixed_attention_triton(q, k, v, rows, torch.empty_like(q), tap)


RAGGED, WIDE = [257, 63, 1, 600], [1, 5, 1, 3]
ATTENTION = {
    "dense": partial(attention, RAGGED, [1] * 4, 2, 64, BF16),
    "dense fp32 D 24 taps": partial(attention, RAGGED, WIDE, 3, 24, torch.float32, taps="first_last"),
    "draft blocks": partial(attention, RAGGED, [1] * 4, 2, 64, BF16, 16),
    "draft tokens per head": partial(attention, RAGGED, [1] * 4, 3, 64, BF16, 1, True),
    "mixed blocks taps": partial(attention, RAGGED, WIDE, 2, 64, BF16, 16, taps="first_last"),
    "mixed tokens taps all": partial(attention, RAGGED, WIDE, 2, 64, BF16, 1, True, taps="all"),
    "verify 17 wide": partial(attention, [300, 17], [17, 9], 2, 64, BF16),
    "verify 17 wide group 4": partial(attention, [300, 40], [17, 0], 4, 64, BF16),
}


# -- the rest ----------------------------------------------------------------------------------------------------------


def fed() -> None:
    for verify, draft, drafted, length, longest, tokens, fresh in feeding.CASES:
        rows = len(verify)
        last, drafts, table = (torch.ones(rows, n, dtype=torch.int64, device=DEVICE) for n in (1, longest, 17))
        state = (bools(*verify), bools(*draft), ints(*drafted), ints(*length), last[:, 0].contiguous(), drafts, table)
        none = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        feeding.feed_triton(*state, none, none, PAGE, tokens + 3, 1 + longest, fresh, 0.5)


def planned() -> None:
    width, position = ints(1, 0, 5, 1, 17), ints(300, 0, 62, 17, 257)
    plan_work_triton(width, position, 64, 7)
    sparse, tail = bools(True, False, False, True, False), ints(260, 0, 0, 16, 0)
    plan_work_triton(width, position, 64, 7, sparse, ints(*range(20)).view(4, 5), tail, 16, 2)


def blocks_made(block: int) -> None:
    blocks = ints(*range(17)).expand(3, 2, -1).contiguous()
    table = ints(*range(2 * 17)).view(2, 17)
    count = ints(17, 3, 0, 1, 16, 17).view(3, 2)
    resolve_triton(blocks, count, table, bools(True, True), block, PAGE)
    count_below_triton(blocks, count, ints(9, 40))


def filtered(vocab: int, candidates: int, dtype: torch.dtype, flat: bool = False) -> None:
    """flat: more tokens tie than the scratch takes."""
    logits = torch.zeros(3, vocab, dtype=dtype, device=DEVICE) if flat else random(3, vocab, dtype=dtype)
    temperature, top_p = (torch.tensor(x, device=DEVICE) for x in ([0.7, 0.0, 1.3], [0.9, 1.0, 0.5]))
    cap = 32 if flat else None
    filter_and_pick_triton(logits, temperature, ints(0, 1, 7), top_p, candidates, ints(1, 2, 3), ints(4, 5, 6), 0,
                           block=64 if flat else 1024, cap=cap)  # fmt: skip


def judged(rule: tuple, given: bool) -> None:
    rows, width, k = 5, 6, 17
    ids = (torch.arange(k) * 3).expand(rows, width, -1).contiguous().to(DEVICE)
    probs = random(rows, width, k).abs()
    tokens = ids[:, :-1, 4].contiguous()
    own = (tokens, ints(5, 0, 3, 1, 5), ints(*range(5)), ints(*range(7, 12)), ints(*range(5)))
    q = (ids[:, :-1], probs[:, :-1]) if rule == ("reject",) else None
    table = torch.full((1024,), 0.7, device=DEVICE) if rule[0] == "hetero" else None
    picks = ids[:, :, 4].contiguous() if given else None
    verdict_triton(rule, *own, (ids.flatten(0, 1), probs.flatten(0, 1)), q, picks, table)


def selected(case: int, widest: int) -> None:
    scopes, m, capacity, rows = select.CASES[case]
    take, limit = (ints(*x) for x in zip(*rows))
    select.top_blocks_triton(random(scopes, len(rows), m), take, limit, capacity, widest)


def reduced(heads: str) -> None:
    q_heads, kv_heads, length, positions = scores.CASES[2]
    counts = torch.tensor([[x is not None for x in row] for row in positions], device=DEVICE)
    at = torch.tensor([[x or 0 for x in row] for row in positions], device=DEVICE)
    queries = torch.arange(at.numel()).view(at.shape).to(DEVICE)
    logits, lse = random(*at.shape, q_heads, length), random(at.numel(), q_heads)
    out = torch.empty(kv_heads if heads == "group_mean" else 1, len(at), length, device=DEVICE)
    scores.reduce_scores_triton(logits, lse, queries, at, counts, kv_heads, heads, out)


def decoded(dtype: torch.dtype) -> None:
    """Norms, activation and heads, with padding among the tokens."""
    x, delta, weight = (random(*shape, dtype=dtype) for shape in ((17, 257), (17, 257), (257,)))
    norm.rms_norm_triton(x, weight, 1e-6)
    norm.add_rms_norm_triton(x, delta, weight, 1e-6)
    silu_mul_triton(random(17, 2 * 1025, dtype=dtype))
    tokens, hq, hkv, dim = 17, 6, 2, 64
    angles = Angles(random(tokens, dim // 2), random(tokens, dim // 2), dtype)
    heads = Heads(random(tokens, (hq + 2 * hkv) * dim, dtype=dtype), angles, random(dim, dtype=dtype),
                  random(dim, dtype=dtype), 1e-6, hq, hkv)  # fmt: skip
    caches = [torch.empty(32, hkv, dim, dtype=dtype, device=DEVICE) for _ in "kv"]
    store_heads_triton(heads, *caches, ints(*(-1 if t % 3 == 1 else t + 15 for t in range(tokens))))


def multiplied(m: int, n: int, k: int) -> None:
    """Products of few rows: columns and K that fill no tile."""
    x, weight, scale = (random(*shape, dtype=BF16) for shape in ((m, k), (n, k), (k,)))
    skinny.norm_linear_triton(x, scale, 1e-6, weight, random(n, dtype=BF16))
    skinny.norm_gated_triton(x, scale, 1e-6, random(2 * n, k, dtype=BF16))
    skinny.linear_add_triton(x, weight, random(m, n, dtype=BF16))


CASES: dict[str, Callable[[], None]] = {
    **{f"attention, {name}": case for name, case in ATTENTION.items()},
    "feed": fed,
    "plan": planned,
    "blocks of 16": partial(blocks_made, 16),
    "blocks of 6": partial(blocks_made, 6),
    "filter, 50 candidates": partial(filtered, 1000, 50, BF16),
    "filter, greedy": partial(filtered, 63, 1, BF16),
    "filter, plateau": partial(filtered, 257, 17, torch.float32, True),
    **{
        f"judge, {rule[0]}{', given picks' if given else ''}": partial(judged, rule, given)
        for rule, given in (
            (("match",), False),
            (("match",), True),
            (("reject",), False),
            (("iid", 0.7), True),
            (("hetero", 0.8, 0.3), False),
        )
    },  # fmt: skip
    "top blocks": partial(selected, 3, 8192),
    "top blocks, in chunks": partial(selected, 4, 256),
    **{f"scores, {heads}": partial(reduced, heads) for heads in scores.HEAD_REDUCTIONS},
    "decoder": partial(decoded, BF16),
    "skinny, 12 rows": partial(multiplied, 12, 63, 257),
    "skinny, 5 rows": partial(multiplied, 5, 60, 144),
}


def main(words: list[str]) -> None:
    """Raises ValueError for an unknown word."""
    first, step = 0, 1
    for word in words:
        if word == "list":
            print(*CASES, sep="\n")
            return
        if not word.startswith("part="):
            raise ValueError(f"unknown argument {word!r}; there are part=I/N and list")
        first, step = map(int, word.removeprefix("part=").split("/"))
    for name, case in [*CASES.items()][first::step]:
        case()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(f"ran {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
