"""How does a row attend to its keys in the paged pool? Dense rows read all, selected rows some blocks and a tail.

Contract of `mixed_attention`. q [T, Hq, D], k_cache and v_cache [M, Hkv, D] of one layer, `Rows` says which queries
belong to which row and which keys each may read; Hq is a multiple of Hkv. Query w of row r stands at position
rows.position[r] + w and sees keys up to its own position: all of them in a dense row; in a selected row those in
the row's blocks and those from tail_start on. out [T, Hq, D] is written at the queries of the rows and nowhere else.
Entries past a row's last position are never read: they may be NaN.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class BlockSet:
    """What selected rows may read: blocks [R, K] or [Hkv, R, K] ascending, count [R] or [Hkv, R], tail_start [R]."""

    blocks: Tensor
    count: Tensor
    tail_start: Tensor
    block_size: int


@dataclass(frozen=True)
class Rows:
    """The rows of one attention call.

    start, width, position [R] int64: first query in q, number of queries, position of the first.
    page_table [R, P] int64. selection None = dense.
    """

    start: Tensor
    width: Tensor
    position: Tensor
    page_table: Tensor
    page_size: int
    selection: BlockSet | None = None

    @cached_property
    def queries(self) -> Tensor:
        """Index of each query in q; short rows repeat their last one.  # [R, W]"""
        w = torch.arange(int(self.width.max()), device=self.start.device)
        return self.start[:, None] + torch.minimum(w, self.width[:, None] - 1)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Positions of the keys and which are real, [R, L] or [Hkv, R, L]. Padding stands at position 0."""
        last = self.position + self.width - 1  # [R]
        chosen = self.selection
        start = torch.zeros_like(last) if chosen is None else chosen.tail_start
        length = last + 1 - start
        tail = start[:, None] + torch.arange(int(length.max()), device=last.device)
        real = tail <= last[:, None]
        if chosen is not None:
            used = int(chosen.count.max())
            blocks = chosen.blocks[..., :used]
            inside = torch.arange(chosen.block_size, device=last.device)
            head = (blocks[..., None] * chosen.block_size + inside).flatten(-2)
            rank = torch.arange(used, device=last.device).repeat_interleave(chosen.block_size)
            head_real = rank < chosen.count[..., None]
            shape = (*head.shape[:-1], tail.shape[-1])
            tail = torch.cat([head, tail.expand(shape)], -1)
            real = torch.cat([head_real, real.expand(shape)], -1)
        return torch.where(real, tail, 0), real

    @cached_property
    def entries(self) -> Tensor:
        """Pool entries of `keys`, the same shape."""
        positions, _ = self.keys
        table = self.page_table.expand(*positions.shape[:-1], -1)
        return table.gather(-1, positions // self.page_size) * self.page_size + positions % self.page_size

    @cached_property
    def bias(self) -> Tensor | None:
        """Additive mask [R, 1 or Hkv, W, L], None where every key is real and every row one query wide."""
        positions, real = self.keys
        width = self.queries.shape[1]
        if width == 1 and bool(real.all()):
            return None
        at = self.position[:, None] + torch.minimum(
            torch.arange(width, device=self.position.device), self.width[:, None] - 1
        )  # [R, W]
        seen = real[..., None, :] & (positions[..., None, :] <= at[..., None])  # [(Hkv,) R, W, L]
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
        return bias.transpose(0, 1) if bias.dim() == 4 else bias[:, None]


_workspace: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}


def workspace(name: str, like: Tensor, elements: int) -> Tensor:
    """A flat buffer that is kept: fresh memory of megabytes a layer costs more in page faults than the copy itself."""
    key = (name, like.device, like.dtype)
    if key not in _workspace or _workspace[key].numel() < elements:
        _workspace[key] = torch.empty(elements, dtype=like.dtype, device=like.device)
    return _workspace[key][:elements]


def gather_keys(cache: Tensor, entries: Tensor, name: str) -> Tensor:
    """Cache entries [R, L] or [Hkv, R, L] of a layer, valid until the next gather of that name.  # [R, Hkv, L, D]"""
    m, heads, dim = cache.shape
    if entries.dim() == 2:
        picked = workspace(name, cache, entries.numel() * heads * dim).view(-1, heads * dim)
        torch.index_select(cache.view(m, heads * dim), 0, entries.flatten(), out=picked)
        return picked.view(*entries.shape, heads, dim).transpose(1, 2)
    head = torch.arange(heads, device=entries.device)[:, None, None]
    picked = workspace(name, cache, entries.numel() * dim).view(-1, dim)
    torch.index_select(cache.view(m * heads, dim), 0, (entries * heads + head).flatten(), out=picked)
    return picked.view(*entries.shape, dim).transpose(0, 1)


def mixed_attention_torch(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, out: Tensor) -> None:
    """The twin: gather the keys of each row, pad to the longest, one scaled-dot-product call."""
    kv_heads, dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    index = rows.queries  # [R, W]
    r, w = index.shape
    folded = q[index].view(r, w, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(r, kv_heads, group * w, dim)
    keys, values = gather_keys(k_cache, rows.entries, "k"), gather_keys(v_cache, rows.entries, "v")
    bias = None if rows.bias is None else rows.bias.to(q.dtype).repeat(1, 1, group, 1)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias)
    unfolded = mixed.view(r, kv_heads, group, w, dim).permute(0, 3, 1, 2, 4).reshape(r, w, -1, dim)
    out[index] = unfolded  # short rows write their last query again, with the same value


def mixed_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, out: Tensor) -> None:
    """Attention of `rows`; see the contract at the head of this file."""
    mixed_attention_torch(q, k_cache, v_cache, rows, out)
