"""Do the small kernels of a step do what their twins do: what rows feed, kept drafts, what the host reads?"""

import pytest
import torch
from torch import Tensor

from aspire.kernels import drafts as keeping
from aspire.kernels import feed as feeding
from aspire.kernels import report as reporting
from aspire.kernels.drafts import keep_drafts_torch, keep_drafts_triton
from aspire.kernels.feed import feed_torch, feed_triton
from aspire.kernels.jit import triton
from aspire.kernels.report import coming_torch, coming_triton, report_torch, report_triton

DEVICE, NAN = "cuda" if torch.cuda.is_available() else "cpu", float("nan")
needs_triton = pytest.mark.skipif(triton is None, reason="no Triton here")


@needs_triton
@pytest.mark.parametrize(("rows", "longest", "k", "keep_q"), keeping.CASES)
def test_keep_drafts(rows: int, longest: int, k: int, keep_q: bool) -> None:
    """Kernel against twin: the column of each draft row, and nothing of the others."""
    rng = torch.Generator().manual_seed(rows)
    draft, at = torch.rand(rows, generator=rng) < 0.6, torch.randint(0, 2 * rows, (rows,), generator=rng)
    picks, ids = (torch.randint(0, 97, (2 * rows, *n), generator=rng) for n in ((), (k,)))
    probs, drafted = torch.rand(2 * rows, k, generator=rng), torch.randint(0, longest, (rows,), generator=rng)
    state = [drafted, torch.full((rows, longest), -7), torch.full((rows, longest, k), -7)]
    state.append(torch.full((rows, longest, k), NAN))
    ours, twin = ([x.clone().to(DEVICE) for x in state] for _ in range(2))
    new = [x.to(DEVICE) for x in (draft, at, picks, ids, probs)]
    keep_drafts_triton(*new, *ours, keep_q)  # type: ignore[arg-type]
    keep_drafts_torch(*new, *twin, keep_q)  # type: ignore[arg-type]
    for mine, theirs in zip(ours, twin):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours[0].cpu(), drafted)
    for r in range(rows):
        kept = [int(picks[at[r]]) if draft[r] and c == drafted[r] else -7 for c in range(longest)]
        assert ours[1][r].tolist() == kept and (keep_q or (ours[2] == -7).all())


@needs_triton
@pytest.mark.parametrize(("rows", "wide"), reporting.CASES)
def test_report(rows: int, wide: int) -> None:
    rng = torch.Generator().manual_seed(rows + wide)

    def flags() -> Tensor:
        return (torch.rand(rows, generator=rng) < 0.5).to(DEVICE)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=rng).to(DEVICE)

    width = ints(3, rows)
    verdict = (ints(wide, rows), ints(97, rows, wide)) if wide else (None, None)
    kv = torch.rand(rows, generator=rng).to(DEVICE) * 1e5
    fields = (width, flags() & (width > 0), ints(9, rows), *verdict, kv)
    ours, twin = report_triton(*fields), report_torch(*fields)
    assert ours.shape == (rows + 1, 3 + wide) and torch.equal(ours, twin)
    active = flags()
    fields = (active, flags() & active, ints(9, rows))
    assert torch.equal(coming_triton(*fields), coming_torch(*fields))


def test_coming_counts_the_tokens_of_the_next_pass() -> None:
    """Slots: one drafts, one verifies 3 drafts, one is empty whatever its number of drafts says."""
    active, verify = torch.tensor([[1, 1, 0], [0, 1, 0]]).bool()
    assert coming_torch(active, verify, torch.tensor([2, 3, 9])).tolist() == [5, 4, 1, 2]


def fed_by_hand(
    verify: list[bool], draft: list[bool], drafted: list[int], length: list[int], last: list[int],
    drafts: list[list[int]], table: list[list[int]], page: int, fresh: bool,
) -> list[tuple[int, int, int, int, int]]:  # fmt: skip
    """(row, id, position, entry, key) of each token, straight from the contract."""
    tokens = []
    for r in range(len(verify)):
        for j in range(drafted[r] + 1) if verify[r] else [drafted[r]] if draft[r] else []:
            at = length[r] - 1 + j
            key = (at + 1) * len(drafts[r]) + drafted[r] if fresh and draft[r] else at + 1
            entry = table[r][at // page] * page + at % page
            tokens.append((r, last[r] if j == 0 else drafts[r][j - 1], at, entry, key))
    return tokens


@needs_triton
@pytest.mark.parametrize("padding", [0, 3, 40])
@pytest.mark.parametrize("case", range(len(feeding.CASES)))
def test_feed(case: int, padding: int) -> None:
    """Kernel against twin and a loop; ids, positions and entries of padding are 0, 0 and -1, and its row exists."""
    verify, draft, drafted, length, longest, tokens, fresh = feeding.CASES[case]
    rows, page, widest = len(verify), 4, 1 + longest
    rng = torch.Generator().manual_seed(case)
    last, drafts, table = (torch.randint(1, 97, (rows, n), generator=rng) for n in (1, longest, 70))
    state = (verify, draft, drafted, length, last[:, 0].tolist(), drafts, table)
    moved = [x.to(DEVICE) if isinstance(x, Tensor) else torch.tensor(x, device=DEVICE) for x in state]
    chosen = 3 * torch.arange(rows, device=DEVICE)
    how = (chosen, torch.zeros_like(chosen), page, tokens + padding, widest, fresh, 0.25)
    ours, twin = feed_triton(*moved, *how), feed_torch(*moved, *how)  # type: ignore[arg-type]
    for name, mine in vars(ours).items():
        theirs = getattr(twin, name)
        if name in ("row", "key"):
            mine, theirs = mine * ours.real, theirs * ours.real
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), name
    read = [(n - 1 if v else n - 1 + d) + w for v, d, n, w in zip(verify, drafted, length, ours.width.tolist())]
    kv = [n if v else 0.75 * (3 * r + n) + 0.25 * n if d else 0 for r, (v, d, n) in enumerate(zip(verify, draft, read))]
    assert ours.kv.tolist() == kv
    expected = fed_by_hand(*state[:5], drafts.tolist(), table.tolist(), page, fresh)  # type: ignore[arg-type]
    fed = list(zip(*(x.tolist() for x in (ours.row, ours.ids, ours.positions, ours.entries, ours.key))))
    assert fed[: len(expected)] == expected and ours.real.tolist() == [t < len(expected) for t in range(len(fed))]
    assert all(token[1:4] == (0, 0, -1) and 0 <= token[0] < rows for token in fed[len(expected) :])
    for r, (start, width) in enumerate(zip(ours.start.tolist(), ours.width.tolist())):
        assert [t for t, token in enumerate(expected) if token[0] == r] == list(range(start, start + width))
        if width:
            assert ours.index[r].tolist() == [start + min(w, width - 1) for w in range(widest)]
