"""How does a draft row keep the token it has just drawn? In the next free column of its slot, with its distribution.

Contract of `keep_drafts`. draft [B] bool; at [B] int64 the token of each row in the pass; picks [T] int64, ids [T, K]
int64 and probs [T, K] fp32 of the pass's tokens. In place, for the rows b of `draft` and for nothing else: with c =
column[b] < G, draft_tokens [B, G] gets picks[at[b]] at (b, c), q_ids and q_probs [B, G, K] get ids and probs of at[b]
(only with `keep_q`).
"""

import torch
from torch import Tensor

from aspire.kernels.jit import jit, power_of_2, tl, wanted


def keep_drafts_torch(
    draft: Tensor, at: Tensor, picks: Tensor, ids: Tensor, probs: Tensor, column: Tensor, draft_tokens: Tensor,
    q_ids: Tensor, q_probs: Tensor, keep_q: bool,
) -> None:  # fmt: skip
    """The twin."""
    rows = torch.arange(len(draft), device=draft.device)
    column = column.clamp(max=draft_tokens.shape[1] - 1)
    draft_tokens[rows, column] = torch.where(draft, picks[at], draft_tokens[rows, column])
    if keep_q:
        q_ids[rows, column] = torch.where(draft[:, None], ids[at], q_ids[rows, column])
        q_probs[rows, column] = torch.where(draft[:, None], probs[at], q_probs[rows, column])


@jit
def _keep_kernel(
    draft, at, picks, ids, probs, columns, draft_tokens, q_ids, q_probs,
    G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KEEP_Q: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(draft + row) == 0:
        return
    column, token = tl.load(columns + row), tl.load(at + row)
    tl.store(draft_tokens + row * G + column, tl.load(picks + token))
    if KEEP_Q:
        for base in range(0, K, KP):
            k = base + tl.arange(0, KP)
            to = (row * G + column) * K + k
            tl.store(q_ids + to, tl.load(ids + token * K + k, mask=k < K, other=0), mask=k < K)
            tl.store(q_probs + to, tl.load(probs + token * K + k, mask=k < K, other=0.0), mask=k < K)


def keep_drafts_triton(
    draft: Tensor, at: Tensor, picks: Tensor, ids: Tensor, probs: Tensor, column: Tensor, draft_tokens: Tensor,
    q_ids: Tensor, q_probs: Tensor, keep_q: bool,
) -> None:  # fmt: skip
    """The launcher; see the contract at the head of this file."""
    kept = (draft, at.contiguous(), picks, ids, probs, column, draft_tokens, q_ids, q_probs)
    assert all(x.is_contiguous() for x in kept) and (not keep_q or q_ids.shape[2] == ids.shape[1])
    k = ids.shape[1]
    _keep_kernel[(len(draft),)](
        draft.view(torch.uint8), *kept[1:], G=draft_tokens.shape[1], K=k, KP=min(power_of_2(k), 1024), KEEP_Q=keep_q
    )


def keep_drafts(
    draft: Tensor, at: Tensor, picks: Tensor, ids: Tensor, probs: Tensor, column: Tensor, draft_tokens: Tensor,
    q_ids: Tensor, q_probs: Tensor, keep_q: bool,
) -> None:  # fmt: skip
    """Keep what the draft rows have drawn; see the contract at the head of this file."""
    run = keep_drafts_triton if wanted(draft) else keep_drafts_torch
    run(draft, at, picks, ids, probs, column, draft_tokens, q_ids, q_probs, keep_q)


CASES = [(1, 1, 1, True), (5, 4, 50, True), (17, 16, 1, True), (3, 2, 3, False)]  # (B, G, K, keep_q)
