"""How does a prompt enter the pool? Chunk by chunk with full attention, once, for all methods.

A `Prompt` keeps what any selection may later ask for: its pages, its last queries in every layer, and the logits of the
token after it. Methods fork its pages, so that a comparison prefills each prompt a single time. A run that asks for
shapes alone takes a `random_prompt`, which costs no prefill.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.cache.pages import OutOfPages, PageList
from aspire.cache.pool import KVPool
from aspire.kernels.attention import Rows, mixed_attention
from aspire.kernels.heads import Heads, store_heads
from aspire.kernels.prefill import prefill_attention
from aspire.kernels.scores import probe_scores
from aspire.model.decoder import Decoder
from aspire.policies.selection import Probe

KEPT_QUERIES = 32  # the longest window any selection looks back over: SnapKV's
RANDOM_KV = 0.1  # scale of a random prompt's keys and values: small enough for a flat softmax and finite logits
RANDOM_PIECE = 16384  # its positions drawn at once, which bounds the memory beside the pool


@dataclass
class Prompt:
    """A prefilled prompt. queries [N, Q, Hq, D] of its last Q <= 32 positions, logits [V] fp32 after its last token."""

    length: int
    pages: PageList
    queries: Tensor
    logits: Tensor


def one_row(pool: KVPool, pages: PageList, start: int, stop: int) -> Rows:
    """A dense row over positions start .. stop-1 of one sequence."""
    device = pool.k.device
    table = torch.tensor([pages.pages], dtype=torch.int64, device=device)
    first, width, position = torch.tensor([[0], [stop - start], [start]], device=device)
    return Rows(first, width, position, table, pool.page_size)


class ChunkAttention:
    """The `attend` of positions start .. stop-1 of one sequence, which also keeps the queries from `first_kept` on.

    A GPU gathers the sequence's keys and values from its pages once a layer, so that a library can read them.
    """

    def __init__(
        self, pool: KVPool, pages: PageList, start: int, stop: int, kept: list[list[Tensor]], first_kept: int
    ) -> None:
        """first_kept: counted from `start`; kept: a list of parts for each layer."""
        self.pool, self.kept, self.first_kept = pool, kept, first_kept
        self.entries = pool.entries(pages, 0, stop)
        self.own = self.entries[start:]
        self.rows = None if pool.k.is_cuda else one_row(pool, pages, start, stop)

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        k_cache, v_cache = self.pool.k[layer], self.pool.v[layer]
        q = store_heads(heads, k_cache, v_cache, self.own)
        self.kept[layer].append(q[self.first_kept :].clone())
        if self.rows is None:
            return prefill_attention(q, k_cache[self.entries], v_cache[self.entries])
        out = torch.empty_like(q)
        mixed_attention(q, k_cache, v_cache, self.rows, out)
        return out


@torch.no_grad()
def prefill(
    model: Decoder, pool: KVPool, ids: list[int], chunk: int, pages: PageList | None = None, done: int = 0
) -> Prompt:
    """Run a prompt of at least one token through the model, from token `done` on: `pages` hold those before it.

    Raises OutOfPages when the pool is full, and then has released `pages`.
    """
    pages = pages or PageList()
    try:
        pool.allocator.reserve(pages, len(ids))
    except OutOfPages:
        pool.release(pages)
        raise
    tokens = torch.tensor(ids, device=pool.k.device)
    kept: list[list[Tensor]] = [[] for _ in range(model.spec.layers)]
    for start in range(done, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        first_kept = max(0, len(ids) - KEPT_QUERIES - start)  # windows may straddle chunks
        attend = ChunkAttention(pool, pages, start, stop, kept, first_kept)
        hidden = model(tokens[start:stop], torch.arange(start, stop, device=tokens.device), attend)
    queries = torch.stack([torch.cat(parts) for parts in kept])
    return Prompt(len(ids), pages, queries, model.logits(hidden[-1:])[0].float())


@torch.no_grad()
def random_prompt(model: Decoder, pool: KVPool, length: int, seed: int) -> Prompt:
    """A prompt of `length` >= 1 tokens that nobody wrote: random KV, queries and logits, for runs that time shapes.

    Raises OutOfPages when the pool is full, and then takes none.
    """
    pages, spec, device = PageList(), model.spec, pool.k.device
    pool.allocator.reserve(pages, length)
    rng = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = pool.k.dtype) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype, device=device)

    pieces = pool.entries(pages, 0, length).split(RANDOM_PIECE)
    for layer in range(spec.layers):
        for cache in (pool.k[layer], pool.v[layer]):
            for piece in pieces:
                cache.index_copy_(0, piece, normal(len(piece), spec.kv_heads, spec.head_dim).mul_(RANDOM_KV))
    queries = normal(spec.layers, min(length, KEPT_QUERIES), spec.heads, spec.head_dim)
    return Prompt(length, pages, queries, normal(spec.vocab_size, dtype=torch.float32))


@torch.no_grad()
def prompt_scores(pool: KVPool, prompt: Prompt, probe: Probe) -> Tensor:
    """Scores of a prompt's positions from its last `probe.prefill_queries` queries.  # [S, 1, L] fp32"""
    n = min(probe.prefill_queries, prompt.queries.shape[1])
    rows = one_row(pool, prompt.pages, prompt.length - n, prompt.length)
    layers = prompt.queries.shape[0]
    counts = torch.ones(1, n, dtype=torch.bool, device=pool.k.device)
    each = (
        probe_scores(prompt.queries[layer, -n:], pool.k[layer], rows, rows.queries, counts, probe.heads)
        for layer in probe.at(layers)
    )
    return torch.cat(list(each))
