"""How does a prompt enter the pool? Chunk by chunk through the same attention, once, for all methods.

A `Prompt` keeps what any selection may later ask for: its pages, its last queries in every layer, and the logits of the
token after it. Methods fork its pages, so that a comparison prefills each prompt a single time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aspire.attention import MixedAttention, ScoreProbe
from aspire.cache.pages import OutOfPages, PageList
from aspire.cache.pool import KVPool
from aspire.kernels.attention import Rows
from aspire.model.decoder import Decoder
from aspire.policies.selection import Probe

KEPT_QUERIES = 32  # the longest window any selection looks back over: SnapKV's


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
        rows = one_row(pool, pages, start, stop)
        first_kept = max(0, len(ids) - KEPT_QUERIES - start)  # windows may straddle chunks

        def keep(layer: int, q: Tensor, first: int = first_kept) -> None:
            kept[layer].append(q[first:].clone())

        def whole(layer: int, rows: Rows = rows) -> list[Rows]:
            return [rows]

        attend = MixedAttention(pool, pool.entries(pages, start, stop), whole, keep)
        hidden = model(tokens[start:stop], torch.arange(start, stop, device=tokens.device), attend)
    queries = torch.stack([torch.cat(parts) for parts in kept])
    return Prompt(len(ids), pages, queries, model.logits(hidden[-1:])[0])


@torch.no_grad()
def prompt_scores(pool: KVPool, prompt: Prompt, probe: Probe) -> Tensor:
    """Scores of a prompt's positions from its last `probe.prefill_queries` queries.  # [S, 1, L] fp32"""
    n = min(probe.prefill_queries, prompt.queries.shape[1])
    rows = one_row(pool, prompt.pages, prompt.length - n, prompt.length)
    layers = prompt.queries.shape[0]
    counts = torch.ones(1, n, dtype=torch.bool, device=pool.k.device)
    collect = ScoreProbe(pool, rows, rows.queries, counts, frozenset(probe.at(layers)), probe.heads)
    for layer in range(layers):
        collect(layer, prompt.queries[layer, -n:])
    return collect.scores
