"""Where do keys and values live? One tensor each for the whole engine, cut into pages."""

import torch
from torch import Tensor

from aspire.cache.pages import OutOfPages, PageAllocator, PageList
from aspire.kernels.kv import copy_entries


class KVPool:
    """Paged keys and values: [N, pages * page_size, Hkv, D] each; entry = page * page_size + offset.

    Committed entries are always full-attention KV; entries of drafts are provisional and get rewritten by verify.
    With `poison`, entries that nobody may read are NaN.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, pages: int, page_size: int,
        dtype: torch.dtype = torch.float32, device: str = "cpu", poison: bool = False,
    ) -> None:  # fmt: skip
        shape = (layers, pages * page_size, kv_heads, head_dim)
        fill = float("nan") if poison else 0.0
        self.k = torch.full(shape, fill, dtype=dtype, device=device)
        self.v = torch.full(shape, fill, dtype=dtype, device=device)
        self.page_size = page_size
        self.poison = poison
        self.allocator = PageAllocator(pages, page_size)

    @property
    def pages(self) -> int:
        return self.k.shape[1] // self.page_size

    @property
    def bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    def entries(self, pages: PageList, start: int, stop: int) -> Tensor:
        """Pool entries of positions start .. stop-1 of a sequence.  # [stop - start]"""
        at = torch.arange(start, stop, device=self.k.device)
        table = torch.tensor(pages.pages, dtype=torch.int64, device=self.k.device)
        return table[at // self.page_size] * self.page_size + at % self.page_size

    def fork(self, source: PageList, tokens: int) -> PageList:
        """A sequence that begins with the first `tokens` of another: full pages shared, the last part copied."""
        child = self.allocator.fork(source, tokens)
        start = len(child.pages) * self.page_size
        try:
            self.allocator.reserve(child, tokens)
        except OutOfPages:
            self.release(child)
            raise
        if start < tokens:
            copy_entries(self.k, self.v, self.entries(source, start, tokens), self.entries(child, start, tokens))
        return child

    def truncate(self, pages: PageList, tokens: int) -> None:
        """Keep the first `tokens` of a sequence and give back the pages past them (NaN when poisoned)."""
        cut = pages.pages[tokens // self.page_size : self.allocator.pages_for(tokens)]
        assert all(self.allocator.owners[page] == 1 for page in cut), "cannot cut into a shared page"
        if self.poison and tokens < len(pages.pages) * self.page_size:
            self._forget(self.entries(pages, tokens, self.allocator.pages_for(tokens) * self.page_size))
        for page in self.allocator.truncate(pages, tokens):
            if self.poison:
                self._forget(torch.arange(page * self.page_size, (page + 1) * self.page_size, device=self.k.device))

    def forget(self, pages: PageList, tokens: int) -> None:
        """What lies past the first `tokens` of a sequence is of no use any more: NaN when poisoned."""
        if self.poison:
            self._forget(self.entries(pages, tokens, len(pages.pages) * self.page_size))

    def release(self, pages: PageList) -> None:
        self.truncate(pages, 0)

    def _forget(self, entries: Tensor) -> None:
        self.k[:, entries] = float("nan")
        self.v[:, entries] = float("nan")
