"""Do the small kernels of a step do what their twins do: keeping drafts, and the report that the host reads?"""

import pytest
import torch
from torch import Tensor

from aspire.kernels import drafts as keeping
from aspire.kernels import report as reporting
from aspire.kernels.drafts import keep_drafts_torch, keep_drafts_triton
from aspire.kernels.jit import triton
from aspire.kernels.report import report_torch, report_triton

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
    assert torch.equal(ours[0].cpu(), drafted + draft)
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

    width, active = ints(3, rows), flags()
    verdict = (ints(wide, rows), ints(97, rows, wide)) if wide else (None, None)
    kv = torch.rand(rows, generator=rng).to(DEVICE) * 1e5
    fields = (width, flags() & (width > 0), ints(9, rows), *verdict, kv, active, flags() & active, ints(9, rows))
    ours, twin = report_triton(*fields), report_torch(*fields)
    ours[-1, 5:] = twin[-1, 5:] = 0  # of no meaning
    assert ours.shape == (rows + 1, 3 + max(wide, 2)) and torch.equal(ours, twin)
