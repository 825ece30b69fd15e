"""Which queries belong to a row, and which keys may it read? The rows of one attention call, dense or selected.

The lazily made index tensors serve the torch twins, which gather keys; a GPU kernel walks the pages in place.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aspire.kernels.work import Work


@dataclass(frozen=True)
class BlockSet:
    """What selected rows may read: blocks [R, K] or [Hkv, R, K] ascending, count [R] or [Hkv, R], tail_start [R].

    units: pool entries of the blocks' units, see kernels/blocks.py; None = made when needed.
    """

    blocks: Tensor
    count: Tensor
    tail_start: Tensor
    block_size: int
    units: Tensor | None = None

    def of(self, rows: Tensor) -> "BlockSet":
        """The sets of some rows."""
        return BlockSet(self.blocks[..., rows, :], self.count[..., rows], self.tail_start[rows], self.block_size)


@dataclass(frozen=True)
class Rows:
    """The rows of one attention call.

    start, width, position [R] int64: first query in q, number of queries, position of the first.
    page_table [R, P] int64. selection None = all rows dense; sparse [R] bool: the rows that read the selection, None =
    all of them (one query wide each, where a kernel is to serve them). widest: a bound on the widths, None = look.
    work: how a GPU splits the reading, see kernels/work.py, and row_of [T]: the row of each query; None = worked out.
    alone: the twin reads each query by itself, so that what it makes of one does not depend on the others.
    """

    start: Tensor
    width: Tensor
    position: Tensor
    page_table: Tensor
    page_size: int
    selection: BlockSet | None = None
    sparse: Tensor | None = None
    widest: int | None = None
    work: Work | None = None
    row_of: Tensor | None = None
    alone: bool = False

    @cached_property
    def parts(self) -> list["Rows"]:
        """The same rows in groups that hold only dense or only selected rows, none of width 0: for the twin."""
        live = self.width > 0
        if not bool(live.any()):
            return []
        if self.selection is None or self.sparse is None:
            if bool(live.all()):
                return [self]
            return [self.some(live.nonzero()[:, 0], self.selection is not None)]
        groups = ((live & ~self.sparse, False), (live & self.sparse, True))
        return [self.some(mask.nonzero()[:, 0], chosen) for mask, chosen in groups if bool(mask.any())]

    @property
    def single(self) -> list["Rows"]:
        """Each query of each row, as a row of its own."""
        found = []
        for r, width in enumerate(self.width.tolist()):
            row = self.some(torch.tensor([r], device=self.width.device), self.selection is not None)
            one = torch.ones_like(row.width)
            found += [replace(row, start=row.start + w, width=one, position=row.position + w) for w in range(width)]
        return found

    def some(self, rows: Tensor, selected: bool) -> "Rows":
        """Rows numbered `rows` [R'], with their selection or dense."""
        chosen = self.selection.of(rows) if selected and self.selection is not None else None
        return Rows(
            self.start[rows], self.width[rows], self.position[rows], self.page_table[rows], self.page_size, chosen
        )

    @cached_property
    def queries(self) -> Tensor:
        """Index of each query in q; short rows repeat their last one.  # [R, W]"""
        widest = int(self.width.max()) if self.widest is None else self.widest
        w = torch.arange(widest, device=self.start.device)
        return self.start[:, None] + torch.minimum(w, self.width[:, None] - 1).clamp(min=0)

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
