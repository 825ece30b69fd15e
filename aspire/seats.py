"""Which request sits in which slot, and does it have pages for what comes next?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.cache.pages import OutOfPages, PageList
from aspire.cache.pool import KVPool
from aspire.prefill import Prompt
from aspire.request import Request

TOKENS_AHEAD = 256  # that a slot's pages run ahead of it, where the pool allows: telling the device costs a copy


@dataclass
class Seat:
    """A request in a slot, with its pages. order: when it was admitted; the last one in is preempted first."""

    request: Request
    pages: PageList
    order: int
    prompt: Prompt | None  # the caller's prefilled prompt, should the request have to come back


class Seats(list[Seat | None]):
    """The slots of the running batch, None where one is empty. page_table [B, P] is the device's copy of the pages."""

    def __init__(self, slots: int, pool: KVPool, longest: int) -> None:
        """longest: draft length; a round writes that many positions past the committed ones."""
        super().__init__([None] * slots)
        self.pool, self.longest = pool, longest
        self._admitted = 0

    def take(self, slot: int, request: Request, pages: PageList, prompt: Prompt | None) -> None:
        self[slot] = Seat(request, pages, self._admitted, prompt)
        self._admitted += 1

    def taken(self) -> set[int]:
        return {slot for slot, seat in enumerate(self) if seat is not None}

    def by_age(self) -> list[int]:
        """Occupied slots, the longest admitted first."""
        return [slot for _, slot in sorted((seat.order, slot) for slot, seat in enumerate(self) if seat)]

    def map_pages(self, slot: int, page_table: Tensor, first: int) -> None:
        """Tell the device which pages a slot has, from logical page `first` on."""
        seat = self[slot]
        assert seat is not None
        new = torch.tensor(seat.pages.pages[first:], dtype=torch.int64)
        if page_table.is_cuda:  # from pageable memory the copy would wait for the passes in flight
            new = new.pin_memory()
        page_table[slot, first : first + len(new)] = new.to(page_table.device, non_blocking=True)

    def reserve(self, slot: int, page_table: Tensor) -> bool:
        """Pages for the slot's next round, False where the pool is short."""
        seat = self[slot]
        assert seat is not None
        return self._reserve(slot, seat, page_table, seat.request.length + self.longest)

    def run_ahead(self, slot: int, page_table: Tensor, needed: int) -> bool:
        """Pages for `needed` tokens, and for some more while every slot could still have a round; False if short."""
        seat = self[slot]
        assert seat is not None
        last = len(seat.request.prompt_ids) + seat.request.max_new_tokens + self.longest
        allocator, ahead = self.pool.allocator, min(needed + TOKENS_AHEAD, last)
        more = allocator.pages_for(ahead) - len(seat.pages.pages)
        if allocator.free_pages - more < len(self) * allocator.pages_for(2 * self.longest + 1):
            ahead = needed
        return self._reserve(slot, seat, page_table, ahead)

    def _reserve(self, slot: int, seat: Seat, page_table: Tensor, tokens: int) -> bool:
        held = len(seat.pages.pages)
        try:
            if self.pool.allocator.reserve(seat.pages, tokens):
                self.map_pages(slot, page_table, held)
        except OutOfPages:
            return False
        return True

    def youngest(self, needy: int) -> int:
        """Who has to make way. Raises ValueError where the needy slot is alone: it can never go on."""
        by_age, seat = self.by_age(), self[needy]
        assert seat is not None
        if len(by_age) == 1:
            needed = self.pool.allocator.pages_for(seat.request.length + self.longest)
            raise ValueError(
                f"request {seat.request.id} needs {needed} pages; the pool has {self.pool.pages}, less those of "
                f"prefilled prompts; raise engine.pages or release prompts"
            )
        return by_age[-1]
