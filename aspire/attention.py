"""What does a layer of one pass attend to? Dense rows, selected rows, dense layers while drafting, and probes.

`MixedAttention` is the `attend` that the model calls: it writes the pass's keys and values into the pool, runs the rows
over their keys and, where a probe asks, turns what they looked at into scores. Every slot has its row, of width 0 where
it is empty, so that shapes depend on sizes a host knows and on nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aspire.cache.pool import KVPool
from aspire.kernels.attention import (
    EVERY,
    BlockSet,
    Rows,
    Taps,
    budget,
    fixed_split,
    mixed_attention,
    query_tile,
    slots_of,
    tuning,
)
from aspire.kernels.blocks import resolve
from aspire.kernels.feed import Feed, feed
from aspire.kernels.heads import Heads, store_heads
from aspire.kernels.jit import wanted
from aspire.kernels.scores import probe_scores, reduce_scores
from aspire.kernels.work import Work, plan_work
from aspire.model.spec import ModelSpec
from aspire.policies.method import Method
from aspire.policies.selection import Probe
from aspire.policies.speculation import selected_blocks
from aspire.state import SlotState

INVARIANT_WIDTH = 17  # queries of the tile of every row, where methods of up to 16 drafts are to see the same bits
WIDE_TILE = 32  # rows of a query tile up to which draft rows may share a call with verify rows


@dataclass(frozen=True)
class Plan:
    """The rows of one decode pass, one a slot, and what each feeds.

    verify, draft [B] bool; of `feed` see kernels/feed.py; T tokens, the last of them padding where a pass is launched
    with more than its rows feed; widest: no row is wider.
    """

    verify: Tensor
    draft: Tensor
    feed: Feed
    tokens: int
    widest: int

    @classmethod
    def of(
        cls, state: SlotState, verify: Tensor, page_size: int, tokens: int | None = None, widest: int | None = None,
        fresh: bool = False, dense_share: float = 0.0,
    ) -> "Plan":  # fmt: skip
        """Rows of the active slots; verify [B] bool says which of them verify. None = count, which waits for them.

        fresh: key a draft's noise by its column as well, see `Stepper`. dense_share: see kernels/feed.py.
        """
        verify, draft = state.active & verify, state.active & ~verify
        if tokens is None or widest is None:
            width = torch.where(verify, state.drafted + 1, draft.long())
            tokens, widest = int(width.sum()), int(width.max())
        fed = feed(
            verify, draft, state.drafted, state.length, state.last_token, state.draft_tokens, state.page_table,
            selected_blocks(state) * state.block_tokens, state.tail_start, page_size, tokens, widest, fresh,
            dense_share,
        )  # fmt: skip
        return cls(verify, draft, fed, tokens, widest)


class PassRows:
    """Which rows read what in each layer of a decode pass.

    One attention call serves rows of both kinds, in a query tile that holds the widest. Where that tile is large, and
    always on a CPU, whose twin gathers keys, verify rows and draft rows have a call each.
    """

    def __init__(
        self, plan: Plan, state: SlotState, method: Method, spec: ModelSpec, pool: KVPool, kind: str,
        invariant: bool = False,
    ) -> None:  # fmt: skip
        """kind: "draft", "verify" or "mixed", what rows the pass has. invariant: see EngineSettings."""
        self.plan, self.state, self.spec, self.kind, self.invariant = plan, state, spec, kind, invariant
        self.least_width = max(INVARIANT_WIDTH, state.longest_draft + 1) if invariant else 1  # of a query tile
        self.page_size, self.itemsize = pool.page_size, pool.k.element_size()
        self.scope = method.selection.scope
        self.dense_layers = frozenset(method.refresh.dense_layers(spec.layers))
        self.on_gpu = wanted(state.length)
        self.group = spec.heads // spec.kv_heads
        wide = query_tile(plan.widest, self.group) > WIDE_TILE and not invariant
        self.apart = kind == "mixed" and (not self.on_gpu or wide)

    def __call__(self, layer: int) -> list[Rows]:
        if self.kind == "verify":
            return [self.dense]
        if layer in self.dense_layers:
            return [self.verifying, self.reading_all] if self.on_gpu and self.apart else [self.dense]
        drafts = self.shared if self.scope == "request" else self.chosen(layer)
        return [self.verifying, drafts] if self.apart else [drafts]

    @cached_property
    def dense(self) -> Rows:
        """All rows over their whole context."""
        return self._rows(self.plan.feed.width, self.plan.widest)

    @cached_property
    def verifying(self) -> Rows:
        return self._rows(torch.where(self.plan.verify, self.plan.feed.width, 0), self.plan.widest)

    @cached_property
    def reading_all(self) -> Rows:
        """Draft rows in a dense layer."""
        return self._rows(self.plan.draft.long(), 1)

    @cached_property
    def shared(self) -> Rows:
        return self.chosen(0)

    def chosen(self, layer: int) -> Rows:
        """The rows of a layer in which draft rows read their selection; only these, where the kinds are apart."""
        state, heads = self.state, self.spec.kv_heads
        at: int | slice = 0
        if self.scope != "request":
            at = layer if self.scope == "layer" else slice(layer * heads, (layer + 1) * heads)
        units = self.units[at] if self.on_gpu else None
        sets = BlockSet(state.blocks[at], state.block_count[at], state.tail_start, state.block_tokens, units)
        return self._rows(*self._drafts, sets, None if self.scope == "request" else layer)

    @property
    def _drafts(self) -> tuple[Tensor, int]:
        return (self.plan.draft.long(), 1) if self.apart else (self.plan.feed.width, self.plan.widest)

    def _rows(self, width: Tensor, widest: int, sets: BlockSet | None = None, layer: int | None = None) -> Rows:
        fed, work, sparse = self.plan.feed, None, None if sets is None else self.plan.draft
        if self.on_gpu:
            widest = max(widest, self.least_width)
            work = self._plan(width, widest)[0] if sets is None else self.works[layer or 0]
        return Rows(
            fed.start, width, fed.position, self.state.page_table, self.page_size, sets, sparse, widest, work, fed.row,
            self.invariant,
        )  # fmt: skip

    @cached_property
    def units(self) -> Tensor:
        """Pool entries of every scope's blocks."""
        state = self.state
        return resolve(
            state.blocks, state.block_count, state.page_table, self.plan.draft, state.block_tokens, self.page_size
        )

    @cached_property
    def works(self) -> list[Work]:
        """A split for each layer's selection, in one launch."""
        width, widest = self._drafts
        return self._plan(width, max(widest, self.least_width), self.state.block_count)

    def _plan(self, width: Tensor, widest: int, count: Tensor | None = None) -> list[Work]:
        spec = self.spec
        tune = tuning(len(width), widest, self.group, spec.kv_heads, count is None, self.itemsize)
        device = width.device
        if self.invariant:
            longest = self.state.page_table.shape[1] * self.page_size
            pieces, slots, every = fixed_split(tune, len(width), longest), 0, EVERY
        else:
            pieces, every = budget(tune, device, len(width), spec.kv_heads, spec.head_dim), 0
            slots = slots_of(tune, device, spec.head_dim)
        if count is None:
            position = self.plan.feed.position
            return plan_work(width, position, tune.tile, pieces, kv_heads=spec.kv_heads, slots=slots, every=every)
        return plan_work(
            width, self.plan.feed.position, tune.tile, pieces, self.plan.draft, count, self.state.tail_start,
            self.state.block_tokens, spec.kv_heads if self.scope == "kv_head" else 1, spec.kv_heads, slots, every,
        )  # fmt: skip


class ScoreProbe:
    """Collects the scores that a selection asked for, layer by layer, during one pass.

    scores [S, B, L] fp32, scopes in layer order, written for the probed rows only.
    """

    def __init__(self, pool: KVPool, plan: Plan, dense: Rows, probe: Probe, spec: ModelSpec, chosen: Tensor) -> None:
        """chosen [B] bool: the rows to probe. Of each the first query and the last, or all of them."""
        self.pool, self.rows, self.heads, self.spec = pool, dense, probe.heads, spec
        self.chosen, self.every, fed = chosen, probe.queries == "all", plan.feed
        if self.every:
            self.queries = fed.index
            counts = torch.arange(plan.widest, device=chosen.device) < fed.width[:, None]
        elif plan.widest == 1:
            self.queries, counts = fed.index, fed.width[:, None] > 0
        else:
            self.queries = fed.index[:, :: plan.widest - 1].contiguous()  # the first, and the last one repeated
            counts = torch.stack([fed.width > 0, fed.width > 1], 1)
        self.counts = counts & chosen[:, None]
        self.at = fed.position[:, None] + self.queries - fed.start[:, None]
        self.slice = spec.kv_heads if probe.heads == "group_mean" else 1
        self.layers = probe.at(spec.layers)
        on_gpu = wanted(chosen)
        length = dense.page_table.shape[1] * dense.page_size if on_gpu else int((fed.position + fed.width).max())
        shape = (len(self.layers) * self.slice, len(chosen), length)
        self.scores = torch.empty(shape, device=chosen.device)
        self.taps: Taps | None = None
        if on_gpu:
            # fp16 keeps a logit to three digits and a half, at half of the traffic; fp32 models keep all.
            exact = pool.k.dtype == torch.float32 or spec.qkv_bias  # biased heads have logits of hundreds
            kind = torch.float32 if exact else torch.float16
            logits = torch.empty(*self.queries.shape, spec.heads, length, dtype=kind, device=chosen.device)
            lse = torch.empty(plan.tokens, spec.heads, device=chosen.device)
            self.taps = Taps(chosen, self.every, logits, lse)

    def taps_of(self, layer: int) -> Taps | None:
        return self.taps if layer in self.layers else None

    def collect(self, layer: int, q: Tensor) -> None:
        """Scores of a layer that has just been read; q [T, Hq, D]."""
        if layer not in self.layers:
            return
        first = self.layers.index(layer) * self.slice
        out = self.scores[first : first + self.slice]
        if self.taps is not None:
            reduce_scores(
                self.taps.logits, self.taps.lse, self.queries, self.at, self.counts, self.spec.kv_heads, self.heads, out
            )
            return
        probed = self.chosen.nonzero()[:, 0]  # the twin reads the keys again: only where it must
        if not len(probed):
            return
        rows = self.rows.some(probed, False)
        part = probe_scores(q, self.pool.k[layer], rows, self.queries[probed], self.counts[probed], self.heads)
        out[:, probed, : part.shape[2]] = part


class MixedAttention:
    """Attention of one pass over the pool; called by the model once a layer, in layer order."""

    def __init__(
        self, pool: KVPool, entries: Tensor, groups: Callable[[int], list[Rows]], probe: ScoreProbe | None = None
    ) -> None:
        """entries [T]: where each token's keys and values go, -1 = nowhere."""
        self.pool, self.entries, self.groups, self.probe = pool, entries, groups, probe

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """The layer's projected heads of all tokens -> [T, Hq, D]"""
        k_cache, v_cache = self.pool.k[layer], self.pool.v[layer]
        q = store_heads(heads, k_cache, v_cache, self.entries)
        out = torch.empty_like(q)
        taps = None if self.probe is None else self.probe.taps_of(layer)
        for rows in self.groups(layer):
            mixed_attention(q, k_cache, v_cache, rows, out, taps)
        if self.probe is not None:
            self.probe.collect(layer, q)
        return out
