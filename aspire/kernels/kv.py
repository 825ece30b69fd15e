"""How do keys and values get into the pool, and from one place in it to another?

Contract. k_cache, v_cache [M, Hkv, D] of one layer, entries [T] int64, k, v [T, Hkv, D]: entry e >= 0 of row t is
overwritten whole, no other entry is touched. Entries >= 0 are distinct; one < 0 marks a padding token, which is
skipped. `copy_entries` copies between entries of all layers, [N, M, Hkv, D]; its entries are never padding.

`write_kv` is the twin's share of `store_heads`; on a GPU the kernel in heads.py writes k and v where it makes them.
"""

from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, entries: Tensor, k: Tensor, v: Tensor) -> None:
    """k_cache[entries] = k and v_cache[entries] = v, in place, without the padding. Synchronises with a device."""
    if bool((entries < 0).any()):
        real = entries >= 0
        entries, k, v = entries[real], k[real], v[real]
    k_cache.index_copy_(0, entries, k)
    v_cache.index_copy_(0, entries, v)


def copy_entries(k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Entries `source` [n] of every layer are written over entries `target` [n], in place."""
    k_cache[:, target] = k_cache[:, source]
    v_cache[:, target] = v_cache[:, source]
