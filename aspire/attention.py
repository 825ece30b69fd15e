"""What does a layer of one pass attend to? Dense rows, selected rows, dense layers while drafting, and probes.

`MixedAttention` is the `attend` that the model calls: it writes the pass's keys and values into the pool, runs each
group of rows over its keys and, where a probe asks, hands the layer's queries on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from aspire.cache.pool import KVPool
from aspire.kernels.attention import BlockSet, Rows, mixed_attention
from aspire.kernels.kv import write_kv
from aspire.kernels.scores import probe_scores
from aspire.policies.method import Method
from aspire.policies.selection import Probe
from aspire.state import SlotState

Watch = Callable[[int, Tensor], None]  # (layer, rotated queries [T, Hq, D])


@dataclass(frozen=True)
class Plan:
    """The rows of one decode pass, in slot order.

    slots [R] int64; verify [R] bool, the others draft; start, width, position [R] int64 as in `Rows`.
    """

    slots: Tensor
    verify: Tensor
    start: Tensor
    width: Tensor
    position: Tensor

    @classmethod
    def of(cls, state: SlotState, verify: Tensor) -> "Plan":
        """Rows of the active slots; verify [B] bool says which of them verify."""
        slots = state.active.nonzero()[:, 0]
        drafted, length, verifies = state.drafted[slots], state.length[slots], verify[slots]
        width = torch.where(verifies, drafted + 1, 1)
        position = length - 1 + torch.where(verifies, 0, drafted)
        return cls(slots, verifies, width.cumsum(0) - width, width, position)

    @cached_property
    def row_of_token(self) -> Tensor:
        """[T] int64"""
        index = torch.arange(self.slots.shape[0], device=self.slots.device)
        return index.repeat_interleave(self.width)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64"""
        offset = torch.arange(self.row_of_token.shape[0], device=self.slots.device)
        return (self.position - self.start)[self.row_of_token] + offset

    def rows(self, page_table: Tensor, page_size: int, chosen: Tensor, selection: BlockSet | None = None) -> Rows:
        """The rows numbered `chosen` [R'], dense or over `selection`; page_table [B, P]."""
        table = page_table[self.slots[chosen]]
        return Rows(self.start[chosen], self.width[chosen], self.position[chosen], table, page_size, selection)


class RowGroups:
    """Which rows read what in each layer of a decode pass."""

    def __init__(
        self, plan: Plan, state: SlotState, method: Method, layers: int, kv_heads: int, page_size: int
    ) -> None:
        self.plan, self.state, self.page_size, self.kv_heads = plan, state, page_size, kv_heads
        self.scope = method.selection.scope
        self.dense_layers = frozenset(method.refresh.dense_layers(layers))
        self.verifying = plan.verify.nonzero()[:, 0]
        self.drafting = (~plan.verify).nonzero()[:, 0]

    def __call__(self, layer: int) -> list[Rows]:
        if layer in self.dense_layers or not len(self.drafting):
            return [self.all_rows]
        drafts = self.shared_drafts if self.scope == "request" else self.draft_rows(layer)
        return [self.verify_rows, drafts] if len(self.verifying) else [drafts]

    def dense(self, chosen: Tensor) -> Rows:
        return self.plan.rows(self.state.page_table, self.page_size, chosen)

    @cached_property
    def all_rows(self) -> Rows:
        return self.dense(torch.arange(self.plan.slots.shape[0], device=self.plan.slots.device))

    @cached_property
    def verify_rows(self) -> Rows:
        return self.dense(self.verifying)

    @cached_property
    def shared_drafts(self) -> Rows:
        return self.draft_rows(0)

    def draft_rows(self, layer: int) -> Rows:
        slots, state = self.plan.slots[self.drafting], self.state
        if self.scope == "kv_head":
            scope = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads)
            blocks, count = state.blocks[scope, slots], state.block_count[scope, slots]
        else:
            scope_index = layer if self.scope == "layer" else 0
            blocks, count = state.blocks[scope_index, slots], state.block_count[scope_index, slots]
        chosen = BlockSet(blocks, count, state.tail_start[slots], state.block_tokens)
        return self.plan.rows(state.page_table, self.page_size, self.drafting, chosen)


@dataclass
class ScoreProbe:
    """Collects the scores that a selection asked for, layer by layer, during one pass.

    rows: the probed rows, dense; queries, counts [R, Q] as in kernels/scores.py.
    """

    pool: KVPool
    rows: Rows
    queries: Tensor
    counts: Tensor
    layers: frozenset[int]
    heads: str
    collected: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, pool: KVPool, rows: Rows, probe: Probe, layers: int) -> "ScoreProbe":
        """Queries of decode rows: the first and the last, or all; a row one query wide gives that one."""
        if probe.queries == "all":
            queries = rows.queries
            counts = torch.arange(queries.shape[1], device=queries.device) < rows.width[:, None]
        else:
            queries = torch.stack([rows.start, rows.start + rows.width - 1], 1)
            counts = torch.stack([torch.ones_like(rows.width, dtype=torch.bool), rows.width > 1], 1)
        return cls(pool, rows, queries, counts, frozenset(probe.at(layers)), probe.heads)

    def __call__(self, layer: int, q: Tensor) -> None:
        if layer in self.layers:
            self.collected.append(probe_scores(q, self.pool.k[layer], self.rows, self.queries, self.counts, self.heads))

    @property
    def scores(self) -> Tensor:
        """[S, R, L] fp32, scopes in layer order."""
        return torch.cat(self.collected)


class MixedAttention:
    """Attention of one pass over the pool; called by the model once a layer, in layer order."""

    def __init__(
        self, pool: KVPool, entries: Tensor, groups: Callable[[int], list[Rows]], watch: Watch | None = None
    ) -> None:
        """entries [T]: where each token's keys and values go."""
        self.pool, self.entries, self.groups, self.watch = pool, entries, groups, watch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], rotated -> [T, Hq, D]"""
        k_cache, v_cache = self.pool.k[layer], self.pool.v[layer]
        write_kv(k_cache, v_cache, self.entries, k, v)
        out = torch.empty_like(q)
        for rows in self.groups(layer):
            mixed_attention(q, k_cache, v_cache, rows, out)
        if self.watch is not None:
            self.watch(layer, q)
        return out
