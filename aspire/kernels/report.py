"""What does the host read of a step? One small tensor: what each row did, and what the next pass will be.

Contract of `report`. Of the pass just run: width [B] int64 (0 = empty slot), verify [B] bool, drafted [B] int64 as it
was before the pass, accepted [B] int64 and tokens [B, W] int64 of the rows that verify (None where none can), kv [B]
fp32 the KV tokens each row has read. Of the next pass: active, ahead [B] bool (verifies) and pending [B] int64 (drafts
so far). Result [B + 1, 3 + max(W, 2)] int64. Line b: 1 verified, 0 drafted, -1 empty; drafted; accepted (0 unless
verified); then tokens, of which the first accepted + 1 are committed (0 where there are none). Last line: tokens that
the next pass feeds, its widest row, verifying and active slots, 64 times the sum of kv.
"""

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted

VERIFIED, DRAFTED, ACCEPTED, TOKENS = 0, 1, 2, 3  # columns of a line


def report_torch(
    width: Tensor, verify: Tensor, drafted: Tensor, accepted: Tensor | None, tokens: Tensor | None, kv: Tensor,
    active: Tensor, ahead: Tensor, pending: Tensor,
) -> Tensor:  # fmt: skip
    """The twin."""
    slots, widest = len(width), 0 if tokens is None else tokens.shape[1]
    lines = torch.zeros(slots + 1, TOKENS + max(widest, 2), dtype=torch.int64, device=width.device)
    lines[:slots, VERIFIED] = torch.where(width > 0, verify.long(), -1)
    lines[:slots, DRAFTED] = drafted
    if accepted is not None and tokens is not None:
        lines[:slots, ACCEPTED] = torch.where(verify, accepted, 0)
        lines[:slots, TOKENS : TOKENS + widest] = tokens
    coming = torch.where(active, torch.where(ahead, pending + 1, 1), 0)
    lines[slots, 0], lines[slots, 1] = coming.sum(), coming.max()
    lines[slots, 2], lines[slots, 3] = ahead.sum(), active.sum()
    lines[slots, 4] = (64 * kv.double().sum()).long()
    return lines


@jit
def _report_kernel(
    width, verify, drafted, accepted, tokens, kv, active, ahead, pending, lines, rows,
    R: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.arange(0, CP)
    if row < rows:
        verified = tl.load(verify + row).to(tl.int64)
        first = tl.where(tl.load(width + row) > 0, verified, -1)
        line = tl.where(c == 0, first, tl.where(c == 1, tl.load(drafted + row), 0))
        if W > 0:
            line = tl.where(c == 2, tl.load(accepted + row) * verified, line)
            said = (c >= 3) & (c < 3 + W)
            line = tl.where(said, tl.load(tokens + row * W + c - 3, mask=said, other=0), line)
    else:
        r = tl.arange(0, R)
        there = r < rows
        lives = tl.load(active + r, mask=there, other=0).to(tl.int64)
        verifies = tl.load(ahead + r, mask=there, other=0).to(tl.int64)
        coming = lives * (1 + verifies * tl.load(pending + r, mask=there, other=0))
        read = tl.sum(tl.load(kv + r, mask=there, other=0.0).to(tl.float64) * 64, 0).to(tl.int64)
        line = tl.where(c == 0, tl.sum(coming, 0), tl.where(c == 1, tl.max(coming, 0), 0))
        line = tl.where(c == 2, tl.sum(verifies, 0), tl.where(c == 3, tl.sum(lives, 0), line))
        line = tl.where(c == 4, read, line)
    tl.store(lines + row * C + c, line, mask=c < C)


def report_triton(
    width: Tensor, verify: Tensor, drafted: Tensor, accepted: Tensor | None, tokens: Tensor | None, kv: Tensor,
    active: Tensor, ahead: Tensor, pending: Tensor,
) -> Tensor:  # fmt: skip
    """The launcher; see the contract at the head of this file."""
    slots, widest = len(width), 0 if tokens is None else tokens.shape[1]
    columns = TOKENS + max(widest, 2)
    lines = torch.empty(slots + 1, columns, dtype=torch.int64, device=width.device)
    assert tokens is None or tokens.is_contiguous()
    flags = [x.view(torch.uint8) for x in (verify, active, ahead)]
    _report_kernel[(slots + 1,)](
        width, flags[0], drafted, width if accepted is None else accepted, width if tokens is None else tokens, kv,
        flags[1], flags[2], pending, lines, slots, R=power_of_2(max(slots, 2)), W=widest, C=columns,
        CP=power_of_2(columns),
    )  # fmt: skip
    return lines


def report(
    width: Tensor, verify: Tensor, drafted: Tensor, accepted: Tensor | None, tokens: Tensor | None, kv: Tensor,
    active: Tensor, ahead: Tensor, pending: Tensor,
) -> Tensor:  # fmt: skip
    """What the host reads of a step; see the contract at the head of this file."""
    run = report_triton if wanted(width) else report_torch
    return run(width, verify, drafted, accepted, tokens, kv, active, ahead, pending)


CASES = [(1, 0), (1, 1), (5, 3), (17, 17)]  # (B, W), W 0 = nothing verified
