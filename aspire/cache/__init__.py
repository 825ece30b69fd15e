"""The KV cache: a pool of pages and the counting of who owns them."""

from aspire.cache.pages import OutOfPages, PageAllocator, PageList
from aspire.cache.pool import KVPool

__all__ = ["KVPool", "OutOfPages", "PageAllocator", "PageList"]
