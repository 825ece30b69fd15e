"""How do keys and values get into the pool, and from one place in it to another?

Contract. k_cache, v_cache [M, Hkv, D] of one layer, entries [T] int64 distinct, k, v [T, Hkv, D]: entry e of row t is
overwritten whole, no other entry is touched. `copy_entries` does the same for all layers, [N, M, Hkv, D].
"""

from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, entries: Tensor, k: Tensor, v: Tensor) -> None:
    """k_cache[entries] = k and v_cache[entries] = v, in place."""
    k_cache.index_copy_(0, entries, k)
    v_cache.index_copy_(0, entries, v)


def copy_entries(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Entries `source` [n] of every layer are written over entries `target` [n], in place."""
    k_cache[:, target] = k_cache[:, source]
    v_cache[:, target] = v_cache[:, source]
