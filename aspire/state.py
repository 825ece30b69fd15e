"""What does the device know of the running batch? `SlotState`: one entry a slot, all of it tensors.

Shape legend of the project
    B slots · R rows of a pass · T tokens of a pass · W widest row · L keys of the longest row · V vocabulary
    Hq query heads · Hkv KV heads · D head size · E hidden size · N layers · K entries of a selection or of a
    filtered distribution · G longest draft · S scopes of a selection: 1, N, or N * Hkv

Positions. A slot with `length` n has committed tokens x[0] .. x[n-1]; the KV of x[0] .. x[n-2] is final. A draft
row with d drafts feeds one token at position n-1+d; a verify row feeds x[n-1] and its d drafts at n-1 .. n-1+d.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from aspire.request import Request


@dataclass
class SlotState:
    """The running batch on the device. `dataclasses.replace` makes a changed one; step.py alone writes in place."""

    active: Tensor  # [B] bool, holds a request
    verify: Tensor  # [B] bool, verifies in the next pass; the other active slots draft
    length: Tensor  # [B] int64, committed tokens
    last_token: Tensor  # [B] int64, x[length - 1]
    drafted: Tensor  # [B] int64, drafts of the round under way
    draft_tokens: Tensor  # [B, G] int64
    room: Tensor  # [B] int64, tokens the request may still commit
    page_table: Tensor  # [B, P] int64, page of each logical page
    blocks: Tensor  # [S, B, K] int64, selected blocks in ascending order
    block_count: Tensor  # [S, B] int64, valid entries of `blocks`
    tail_start: Tensor  # [B] int64, every position from here on is read as well
    alpha: Tensor  # [B] fp32, acceptance estimate
    target: Tensor  # [B] int64, draft length aimed at, for the policies that step it
    rounds: Tensor  # [B] int64, verifications seen
    seed: Tensor  # [B] int64, of the request
    temperature: Tensor  # [B] fp32
    top_k: Tensor  # [B] int64, 0 = off
    top_p: Tensor  # [B] fp32
    q_ids: Tensor  # [B, G, K] int64, ids the drafts were sampled from, ascending (rejection only)
    q_probs: Tensor  # [B, G, K] fp32, their probabilities
    block_tokens: int = 1  # tokens of a block of `blocks`

    @classmethod
    def empty(
        cls, slots: int, pages: int, longest_draft: int, scopes: int, capacity: int, block_tokens: int,
        candidates: int, device: str,
    ) -> "SlotState":  # fmt: skip
        """No requests yet. pages, capacity, candidates: widths of page table, selection, draft distribution."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        b, g = slots, longest_draft
        return cls(
            active=torch.zeros(b, dtype=torch.bool, device=device),
            verify=torch.zeros(b, dtype=torch.bool, device=device),
            length=ints(b), last_token=ints(b), drafted=ints(b), draft_tokens=ints(b, g), room=ints(b),
            page_table=ints(b, pages), blocks=ints(scopes, b, capacity), block_count=ints(scopes, b),
            tail_start=ints(b),
            alpha=floats(b), target=ints(b), rounds=ints(b), seed=ints(b),
            temperature=floats(b), top_k=ints(b), top_p=floats(b),
            q_ids=ints(b, g, candidates), q_probs=floats(b, g, candidates), block_tokens=block_tokens,
        )  # fmt: skip

    @property
    def longest_draft(self) -> int:
        return self.draft_tokens.shape[1]

    def slot_dim(self, name: str) -> int:
        """Which dimension of a field counts slots."""
        return 1 if name in ("blocks", "block_count") else 0

    def adopt(self, other: "SlotState") -> None:
        """Take over what a policy changed, in place: a captured pass reads and writes these very tensors."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine is not theirs and isinstance(mine, Tensor):
                mine.copy_(theirs)

    def vacate(self, slot: int) -> None:
        """The slot has no request and no row in a pass. What else it holds is cleared when it is taken again."""
        for flag_or_count in (self.active, self.verify, self.length, self.drafted):
            flag_or_count[slot] = 0

    def occupy(self, slot: int, request: Request) -> None:
        """The slot has a new request; no draft, no selection, no estimate of another may outlive it."""
        for f in fields(self):
            if isinstance(value := getattr(self, f.name), Tensor):
                value.select(self.slot_dim(f.name), slot).zero_()
        s = request.sampling
        self.active[slot] = True
        self.length[slot], self.last_token[slot] = request.length, request.output_ids[-1]
        self.room[slot] = request.max_new_tokens - len(request.output_ids)
        self.seed[slot], self.temperature[slot] = s.seed, s.temperature
        self.top_k[slot], self.top_p[slot] = s.top_k, s.top_p
