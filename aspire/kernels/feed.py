"""What does each row feed? Token ids, positions, pool entries and noise keys of a pass, from the state of its slots.

Contract of `feed`. verify, draft [B] bool (never both), drafted, length, last_token [B] int64, draft_tokens [B, G]
int64, page_table [B, P] int64, chosen [B] tokens of the selected blocks (on average over scopes), tail_start [B]
int64, dense_share of the layers that draft rows read in full; T tokens and W the widest row, static. A draft row has
one token, at position length - 1 + drafted: its newest draft, or the last committed token. A verify row has drafted +
1, from position length - 1 on. A row that does neither has width 0. Result: start, width, position [B]; index [B, W]
the token of each query, the last one repeated (0 for a row of width 0 that comes first); of each token [T]: row (a
padding token: some row or other), real, ids and positions (0 for padding), entries and key (-1 for padding), key =
position + 1, or for the tokens of draft rows, where `fresh`, (position + 1) * G + drafted. kv [B] fp32: KV tokens each
row reads, on average over layers. All int64 but `real` and kv.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, triton, wanted


@dataclass(frozen=True)
class Feed:
    """See the contract at the head of this file."""

    start: Tensor
    width: Tensor
    position: Tensor
    index: Tensor
    row: Tensor
    real: Tensor
    ids: Tensor
    positions: Tensor
    entries: Tensor
    key: Tensor
    kv: Tensor


def feed_torch(
    verify: Tensor, draft: Tensor, drafted: Tensor, length: Tensor, last_token: Tensor, draft_tokens: Tensor,
    page_table: Tensor, chosen: Tensor, tail_start: Tensor, page_size: int, tokens: int, widest: int, fresh: bool,
    dense_share: float,
) -> Feed:  # fmt: skip
    """The twin."""
    longest, device = draft_tokens.shape[1], length.device
    width = torch.where(verify, drafted + 1, draft.long())
    position = (length - 1 + torch.where(verify, 0, drafted)).clamp(min=0)
    start = width.cumsum(0) - width
    last = (start + width - 1).clamp(min=0)
    index = torch.minimum(start[:, None] + torch.arange(widest, device=device), last[:, None])
    t = torch.arange(tokens, device=device)
    row = torch.searchsorted(start + width, t, right=True).clamp(max=len(start) - 1)
    real = t < start[-1] + width[-1]
    positions = torch.where(real, (position - start)[row] + t, 0)
    offset = positions - (length[row] - 1)  # 0 = the last committed token, j = draft j
    ids = last_token[row]
    if longest:
        ids = torch.where(offset == 0, ids, draft_tokens[row, (offset - 1).clamp(0, longest - 1)])
    entries = page_table[row, positions // page_size] * page_size + positions % page_size
    key = positions + 1
    if fresh:
        key = torch.where(draft[row], key * longest + drafted[row], key)
    key = torch.where(real, key, -1)
    context = position + width
    drafting = (1 - dense_share) * (chosen + (context - tail_start)) + dense_share * context
    kv = torch.where(verify, context, torch.where(draft, drafting, 0.0)).float()
    return Feed(
        start, width, position, index, row, real, torch.where(real, ids, 0), positions, torch.where(real, entries, -1),
        key, kv,
    )  # fmt: skip


@jit
def _feed_kernel(
    verify, draft, drafted, length, last_token, draft_tokens, page_table, chosen, tail_start, lines, index, row_of,
    real_of, ids_of, positions_of, entries_of, key_of, kv_of, rows, pages, tokens, dense_share,
    G: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr,
    FRESH: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, R)
    there = r < rows
    verifies = tl.load(verify + r, mask=there, other=0) != 0
    drafts = tl.load(draft + r, mask=there, other=0) != 0
    count = tl.load(drafted + r, mask=there, other=0)
    width = tl.where(verifies, count + 1, drafts.to(tl.int64))
    start = tl.cumsum(width, 0) - width
    position = tl.load(length + r, mask=there, other=1) - 1 + tl.where(verifies, 0, count)
    position = tl.maximum(position, 0)
    program = tl.program_id(0)
    if program == 0:
        tl.store(lines + r, start, mask=there)
        tl.store(lines + rows + r, width, mask=there)
        tl.store(lines + 2 * rows + r, position, mask=there)
        w = tl.arange(0, WP)
        each = tl.minimum(start[:, None] + w[None, :], tl.maximum(start + width - 1, 0)[:, None])
        tl.store(index + r[:, None] * W + w[None, :], each, mask=there[:, None] & (w < W)[None, :])
        context = (position + width).to(tl.float32)
        selected = tl.load(chosen + r, mask=there, other=0).to(tl.float32)
        selected += context - tl.load(tail_start + r, mask=there, other=0).to(tl.float32)
        drafting = (1 - dense_share) * selected + dense_share * context
        tl.store(kv_of + r, tl.where(verifies, context, tl.where(drafts, drafting, 0.0)), mask=there)
    t = program * T + tl.arange(0, T)
    end = start + width
    row = tl.sum(((end[None, :] <= t[:, None]) & there[None, :]).to(tl.int32), 1)
    row = tl.minimum(row, rows - 1)
    inside = t < tokens
    real = inside & (t < tl.sum(width, 0))
    mine = r[None, :] == row[:, None]
    at = t + tl.sum(tl.where(mine, (position - start)[None, :], 0), 1)
    at = tl.where(real, at, 0)
    offset = at - (tl.load(length + row, mask=inside, other=1) - 1)
    token = tl.load(last_token + row, mask=inside, other=0)
    if G > 0:
        column = tl.minimum(tl.maximum(offset - 1, 0), G - 1)
        drafted_token = tl.load(draft_tokens + row.to(tl.int64) * G + column, mask=real & (offset > 0), other=0)
        token = tl.where(offset == 0, token, drafted_token)
    page = tl.load(page_table + row.to(tl.int64) * pages + at // PAGE, mask=real, other=0)
    key = at + 1
    if FRESH:
        of_draft = tl.load(draft + row, mask=inside, other=0) != 0
        key = tl.where(of_draft, key * G + tl.load(drafted + row, mask=inside, other=0), key)
    tl.store(row_of + t, row.to(tl.int64), mask=inside)
    tl.store(real_of + t, real, mask=inside)
    tl.store(ids_of + t, tl.where(real, token, 0), mask=inside)
    tl.store(positions_of + t, at, mask=inside)
    tl.store(entries_of + t, tl.where(real, page * PAGE + at % PAGE, -1), mask=inside)
    tl.store(key_of + t, tl.where(real, key, -1), mask=inside)


def feed_triton(
    verify: Tensor, draft: Tensor, drafted: Tensor, length: Tensor, last_token: Tensor, draft_tokens: Tensor,
    page_table: Tensor, chosen: Tensor, tail_start: Tensor, page_size: int, tokens: int, widest: int, fresh: bool,
    dense_share: float,
) -> Feed:  # fmt: skip
    """The launcher; see the contract at the head of this file."""
    rows, longest = draft_tokens.shape
    assert draft_tokens.is_contiguous() and page_table.is_contiguous()
    lines = torch.empty(3, rows, dtype=torch.int64, device=length.device)
    index = torch.empty(rows, widest, dtype=torch.int64, device=length.device)
    each = torch.empty(5, tokens, dtype=torch.int64, device=length.device)
    real = torch.empty(tokens, dtype=torch.bool, device=length.device)
    kv = torch.empty(rows, dtype=torch.float32, device=length.device)
    block = 32
    _feed_kernel[(triton.cdiv(tokens, block),)](
        verify.view(torch.uint8), draft.view(torch.uint8), drafted, length, last_token, draft_tokens, page_table,
        chosen, tail_start, lines, index, each[0], real.view(torch.uint8), each[1], each[2], each[3], each[4], kv, rows,
        page_table.shape[1], tokens, dense_share, G=longest, W=widest, WP=power_of_2(widest),
        R=power_of_2(max(rows, 2)), T=block, PAGE=page_size, FRESH=fresh,
    )  # fmt: skip
    row, ids, positions, entries, key = each
    return Feed(lines[0], lines[1], lines[2], index, row, real, ids, positions, entries, key, kv)


def feed(
    verify: Tensor, draft: Tensor, drafted: Tensor, length: Tensor, last_token: Tensor, draft_tokens: Tensor,
    page_table: Tensor, chosen: Tensor, tail_start: Tensor, page_size: int, tokens: int, widest: int, fresh: bool,
    dense_share: float,
) -> Feed:  # fmt: skip
    """What each row feeds; see the contract at the head of this file."""
    run = feed_triton if wanted(length) else feed_torch
    return run(
        verify, draft, drafted, length, last_token, draft_tokens, page_table, chosen, tail_start, page_size, tokens,
        widest, fresh, dense_share,
    )  # fmt: skip


CASES = [  # (verify, draft, drafted, length, longest draft, tokens, fresh)
    ([True], [False], [0], [1], 0, 1, False),
    ([True, False, False], [False, True, False], [3, 2, 0], [17, 63, 5], 4, 5, True),
    (
        [False, True, True, False, False],
        [True, False, False, False, True],
        [0, 2, 0, 3, 5],
        [1, 257, 64, 9, 30],
        5,
        9,
        False,
    ),
    ([False, False], [False, False], [0, 0], [0, 0], 3, 2, True),
]
