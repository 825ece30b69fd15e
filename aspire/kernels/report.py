"""What does the host read of a step? What each row did, and, as soon as it is decided, what the next pass will be.

Contract of `report`: width [B] int64 (0 = empty slot), verify [B] bool, drafted [B] int64 as it was before the pass,
accepted [B] int64 and tokens [B, W] int64 of the rows that verify (None where none can), kv [B] fp32 the KV tokens each
row has read. Result [B + 1, 3 + W] int64. Line b: 1 verified, 0 drafted, -1 empty; drafted; accepted (0 unless
verified); then tokens, of which the first accepted + 1 are committed. Last line: 64 times the sum of kv, then zeros.

Contract of `coming`: active, verify [B] bool (who verifies in the next pass) and drafted [B] int64 (drafts so far).
Result [4] int64: tokens that the next pass feeds, its widest row, verifying and active slots.
"""

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted

VERIFIED, DRAFTED, ACCEPTED, TOKENS = 0, 1, 2, 3  # columns of a line


def report_torch(
    width: Tensor, verify: Tensor, drafted: Tensor, accepted: Tensor | None, tokens: Tensor | None, kv: Tensor
) -> Tensor:
    slots, widest = len(width), 0 if tokens is None else tokens.shape[1]
    lines = torch.zeros(slots + 1, TOKENS + widest, dtype=torch.int64, device=width.device)
    lines[:slots, VERIFIED] = torch.where(width > 0, verify.long(), -1)
    lines[:slots, DRAFTED] = drafted
    if accepted is not None and tokens is not None:
        lines[:slots, ACCEPTED] = torch.where(verify, accepted, 0)
        lines[:slots, TOKENS : TOKENS + widest] = tokens
    lines[slots, 0] = (64 * kv.double().sum()).long()
    return lines


def coming_torch(active: Tensor, verify: Tensor, drafted: Tensor) -> Tensor:
    width = torch.where(active, torch.where(verify, drafted + 1, 1), 0)
    return torch.stack([width.sum(), width.max(), verify.sum(), active.sum()])


@jit
def _report_kernel(
    width, verify, drafted, accepted, tokens, kv, lines, rows,
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
        read = tl.sum(tl.load(kv + r, mask=r < rows, other=0.0).to(tl.float64) * 64, 0).to(tl.int64)
        line = tl.where(c == 0, read, 0)
    tl.store(lines + row * C + c, line, mask=c < C)


@jit
def _coming_kernel(active, verify, drafted, out, rows, R: tl.constexpr):
    r = tl.arange(0, R)
    there = r < rows
    lives = tl.load(active + r, mask=there, other=0).to(tl.int64)
    verifies = tl.load(verify + r, mask=there, other=0).to(tl.int64)
    width = lives * (1 + verifies * tl.load(drafted + r, mask=there, other=0))
    tl.store(out, tl.sum(width, 0))
    tl.store(out + 1, tl.max(width, 0))
    tl.store(out + 2, tl.sum(verifies, 0))
    tl.store(out + 3, tl.sum(lives, 0))


def report_triton(
    width: Tensor, verify: Tensor, drafted: Tensor, accepted: Tensor | None, tokens: Tensor | None, kv: Tensor
) -> Tensor:
    slots, widest = len(width), 0 if tokens is None else tokens.shape[1]
    columns = TOKENS + widest
    lines = torch.empty(slots + 1, columns, dtype=torch.int64, device=width.device)
    assert tokens is None or tokens.is_contiguous()
    _report_kernel[(slots + 1,)](
        width, verify.view(torch.uint8), drafted, width if accepted is None else accepted,
        width if tokens is None else tokens, kv, lines, slots, R=power_of_2(max(slots, 2)), W=widest, C=columns,
        CP=power_of_2(columns),
    )  # fmt: skip
    return lines


def coming_triton(active: Tensor, verify: Tensor, drafted: Tensor) -> Tensor:
    out = torch.empty(4, dtype=torch.int64, device=active.device)
    flags = active.view(torch.uint8), verify.view(torch.uint8)
    _coming_kernel[(1,)](*flags, drafted, out, len(active), R=power_of_2(max(len(active), 2)))
    return out


def report(
    width: Tensor, verify: Tensor, drafted: Tensor, accepted: Tensor | None, tokens: Tensor | None, kv: Tensor
) -> Tensor:
    """What each row of a pass did; see the contract at the head of this file."""
    return (report_triton if wanted(width) else report_torch)(width, verify, drafted, accepted, tokens, kv)


def coming(active: Tensor, verify: Tensor, drafted: Tensor) -> Tensor:
    """The size of the next pass; see the contract at the head of this file."""
    return (coming_triton if wanted(active) else coming_torch)(active, verify, drafted)


CASES = [(1, 0), (1, 1), (5, 3), (17, 17)]  # (B, W), W 0 = nothing verified
