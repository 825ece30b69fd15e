"""Which pages of the pool belong to whom? Reserve, fork, truncate, free: plain host-side counting."""

from dataclasses import dataclass, field


class OutOfPages(Exception):
    """The pool has no page left; the engine answers by preempting a slot."""


@dataclass
class PageList:
    """The pages of one sequence, in order."""

    pages: list[int] = field(default_factory=list)


class PageAllocator:
    """Hands out pages and counts the owners of each. Full prompt pages may have several owners."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.owners = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def shuffle(self, order: list[int]) -> None:
        """Hand pages out in another order (tests: physical order must not matter)."""
        assert sorted(order) == sorted(self._free)
        self._free = list(order)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def reserve(self, owner: PageList, tokens: int) -> list[int]:
        """Make room for `tokens` tokens in all; returns the new pages. Raises OutOfPages, and then takes none."""
        missing = self.pages_for(tokens) - len(owner.pages)
        if missing > len(self._free):
            raise OutOfPages(f"{missing} pages wanted, {len(self._free)} free")
        new = [self._free.pop() for _ in range(missing)]
        for page in new:
            self.owners[page] = 1
        owner.pages += new
        return new

    def fork(self, source: PageList, tokens: int) -> PageList:
        """A second owner of the full pages among the first `tokens` tokens (never of a page still written to)."""
        shared = source.pages[: tokens // self.page_size]
        for page in shared:
            self.owners[page] += 1
        return PageList(list(shared))

    def truncate(self, owner: PageList, tokens: int) -> list[int]:
        """Give back what lies past `tokens` tokens; returns the pages that nobody owns any more."""
        keep = self.pages_for(tokens)
        gone, freed = owner.pages[keep:], []
        del owner.pages[keep:]
        for page in gone:
            self.owners[page] -= 1
            assert self.owners[page] >= 0, f"page {page} freed twice"
            if self.owners[page] == 0:
                self._free.append(page)
                freed.append(page)
        return freed
