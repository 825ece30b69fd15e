"""Where did every layer look while a text was decoded? Attention weights of each decoded token, reduced over heads.

The text is given, so its tokens are fed through full attention in chunks: causal attention makes each of their queries
see what it would have seen decoded alone. Correctness is what counts here, not speed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.cache.pages import PageList
from aspire.cache.pool import KVPool
from aspire.model.decoder import Decoder
from aspire.prefill import ChunkAttention, prefill


@dataclass(frozen=True)
class Trace:
    """weights [N, T, L] fp32: of layer, decoded token and position, the largest softmax weight of any query head.

    Token t is the one fed at position L - T + t; positions past it have weight 0. said [T] int64: the argmax after it.
    """

    weights: Tensor
    said: Tensor


def head_max(q: Tensor, keys: Tensor) -> Tensor:
    """Queries q [T, Hq, D] at the last T positions of keys [L, Hkv, D] -> weights [T, L], as in `Trace`."""
    t, heads, dim = q.shape
    length, kv_heads = keys.shape[:2]
    grouped = q.view(t, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    logits = (grouped @ keys.permute(1, 2, 0)[:, None]).float() * dim**-0.5  # [Hkv, group, T, L]
    at = torch.arange(length - t, length, device=q.device)
    hidden = torch.arange(length, device=q.device) > at[:, None]
    return logits.masked_fill_(hidden, float("-inf")).softmax(-1).amax((0, 1))


@torch.no_grad()
def trace(model: Decoder, pool: KVPool, prompt: list[int], text: list[int], prefill_chunk: int = 512) -> Trace:
    """Feed `text` after `prompt`, both at least one token, with full attention; takes no page for longer than that.

    The weights take layers x len(text) x (len(prompt) + len(text)) x 4 bytes. Raises OutOfPages when the pool is full.
    """
    assert prompt and text, "a trace needs a prompt and a text of at least one token each"
    start, stop = len(prompt), len(prompt) + len(text)
    pages = prefill(model, pool, prompt, prefill_chunk).pages
    try:
        pool.allocator.reserve(pages, stop)
        return _feed(model, pool, pages, text, start)
    finally:
        pool.release(pages)


def _feed(model: Decoder, pool: KVPool, pages: PageList, text: list[int], start: int) -> Trace:
    """The text's tokens in one pass, whose queries are kept."""
    stop = start + len(text)
    kept: list[list[Tensor]] = [[] for _ in range(model.spec.layers)]
    attend = ChunkAttention(pool, pages, start, stop, kept, 0)
    device = pool.k.device
    hidden = model(torch.tensor(text, device=device), torch.arange(start, stop, device=device), attend)
    entries = pool.entries(pages, 0, stop)
    weights = [head_max(torch.cat(parts), pool.k[layer][entries]) for layer, parts in enumerate(kept)]
    return Trace(torch.stack(weights), model.logits(hidden).argmax(-1))
