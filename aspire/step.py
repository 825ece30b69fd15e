"""What happens in one decode step on the device? plan -> forward -> verify -> commit -> refresh.

Nothing here looks at a request: the step reads and writes `SlotState` and the pool. Rollback is in `_commit`, alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.attention import MixedAttention, Plan, RowGroups, ScoreProbe
from aspire.cache.pool import KVPool
from aspire.kernels.attention import Rows
from aspire.kernels.noise import DRAFT_OR_TARGET
from aspire.model.decoder import Decoder
from aspire.policies.method import Method
from aspire.policies.selection import Selected
from aspire.policies.speculation import selected_tokens
from aspire.sampling import Filtered, filter_logits, pick
from aspire.state import SlotState
from aspire.verify import Drafts, Verdict, Verification, judge


@dataclass(frozen=True)
class StepOutput:
    """What the host needs of a step, row by row: slot, verified, drafted, accepted, and the committed tokens.

    tokens of a drafting row are empty. kv_tokens: KV tokens read per layer, on average; width: tokens fed.
    """

    slots: list[int]
    verified: list[bool]
    drafted: list[int]
    accepted: list[int]
    tokens: list[list[int]]
    width: int
    kv_tokens: float


class Stepper:
    """One step after another over one batch; holds what a run fixes."""

    def __init__(
        self, model: Decoder, pool: KVPool, method: Method, verification: Verification, candidates: int
    ) -> None:
        """candidates: entries of a filtered distribution, see sampling.py."""
        method.check(model.spec.layers)
        self.model, self.pool, self.method = model, pool, method
        self.verification, self.candidates = verification, candidates
        self.dense_share = len(method.refresh.dense_layers(model.spec.layers)) / model.spec.layers

    @torch.no_grad()
    def step(self, state: SlotState) -> tuple[SlotState, StepOutput]:
        """One pass over all active slots (at least one)."""
        plan = Plan.of(state, self.method.speculation.decide(state))
        kv_tokens = self._kv_tokens(plan, state)
        drafted = state.drafted[plan.slots]
        logits, probe = self._forward(plan, state)
        target = self._filter(plan, state, logits)
        self._append_drafts(plan, state, target)
        verdict = self._verify(plan, state, target)
        seen = state.length[plan.slots] + torch.where(plan.verify, 0, drafted)
        state = self._commit(plan, state, verdict)
        self._refresh(plan, state, probe, seen)
        return state, self._report(plan, drafted, verdict, kv_tokens)

    def _kv_tokens(self, plan: Plan, state: SlotState) -> Tensor:
        """KV tokens each row reads, averaged over layers.  # [R] fp32"""
        context = plan.position + plan.width
        chosen = selected_tokens(state, state.length + state.drafted)[plan.slots]
        return torch.where(plan.verify, context, (1 - self.dense_share) * chosen + self.dense_share * context)

    def _forward(self, plan: Plan, state: SlotState) -> tuple[Tensor, ScoreProbe | None]:
        """Logits of every token of the pass [T, V] fp32, and the probe with its scores."""
        spec, row, positions = self.model.spec, plan.row_of_token, plan.positions
        slot = plan.slots[row]
        offset = positions - (state.length[slot] - 1)  # 0 = the last committed token, j = draft j
        drafts = state.draft_tokens[slot, (offset - 1).clamp(min=0)] if state.longest_draft else state.last_token[slot]
        tokens = torch.where(offset == 0, state.last_token[slot], drafts)
        page = state.page_table[slot, positions // self.pool.page_size]
        entries = page * self.pool.page_size + positions % self.pool.page_size
        groups = RowGroups(plan, state, self.method, spec.layers, spec.kv_heads, self.pool.page_size)
        probe = self._probe(groups)
        hidden = self.model(tokens, positions, MixedAttention(self.pool, entries, groups, probe))
        return self.model.logits(hidden), probe

    def _probed(self, plan: Plan) -> Tensor:
        """Numbers of the rows after which the selection is recomputed.  # [R']"""
        due = self.method.refresh.due
        return ((plan.verify & due("verify")) | (~plan.verify & due("draft"))).nonzero()[:, 0]

    def _probe(self, groups: RowGroups) -> ScoreProbe | None:
        probe, chosen = self.method.selection.probe, self._probed(groups.plan)
        if probe is None or not len(chosen):
            return None
        rows: Rows = groups.all_rows
        if len(chosen) < len(groups.plan.slots):
            rows = groups.verify_rows if self.method.refresh.due("verify") else groups.dense(groups.drafting)
        return ScoreProbe.of(self.pool, rows, probe, self.model.spec.layers)

    def _filter(self, plan: Plan, state: SlotState, logits: Tensor) -> Filtered:
        """The distribution at each token of the pass, after the request's own temperature, top-k and top-p."""
        slot = plan.slots[plan.row_of_token]
        return filter_logits(logits, state.temperature[slot], state.top_k[slot], state.top_p[slot], self.candidates)

    def _append_drafts(self, plan: Plan, state: SlotState, dist: Filtered) -> None:
        """Sample the next draft of every drafting row, with the noise of its position."""
        rows = (~plan.verify).nonzero()[:, 0]
        if not len(rows):
            return
        slots, at = plan.slots[rows], dist.rows(plan.start[rows])
        column = state.drafted[slots]
        if self.verification.draft_sampling == "greedy":
            tokens = at.ids.gather(1, at.probs.argmax(1, keepdim=True))[:, 0]
            at = Filtered(at.ids, (at.ids == tokens[:, None]).float())
        else:
            tokens = pick(
                at, state.seed[slots], self._draft_key(state, plan.position[rows] + 1, column), DRAFT_OR_TARGET
            )
        state.draft_tokens[slots, column] = tokens
        if self.verification.mode == "rejection":
            state.q_ids[slots, column], state.q_probs[slots, column] = at.ids, at.probs
        state.drafted[slots] += 1

    def _draft_key(self, state: SlotState, position: Tensor, column: Tensor) -> Tensor:
        """What keys a draft's noise: its position, as for the target's pick, so that coupled picks agree.

        Rejection must not draw a position twice with the same noise: after a refusal it is drafted anew, from a
        distribution that may depend on the draft refused before. A position comes back in a lower column each time.
        """
        if self.verification.mode != "rejection":
            return position
        return position * state.longest_draft + column

    def _verify(self, plan: Plan, state: SlotState, target: Filtered) -> Verdict | None:
        """Judge the drafts of every verifying row; None if none verifies."""
        rows = plan.verify.nonzero()[:, 0]
        if not len(rows):
            return None
        slots, width = plan.slots[rows], int(plan.width[rows].max())
        columns = torch.arange(width, device=rows.device)
        index = plan.start[rows][:, None] + torch.minimum(columns, plan.width[rows][:, None] - 1)
        q = None
        if self.verification.mode == "rejection":
            q = Filtered(state.q_ids[slots, : width - 1], state.q_probs[slots, : width - 1])
        drafts = Drafts(
            state.draft_tokens[slots, : width - 1], state.drafted[slots], state.seed[slots], state.length[slots],
            state.rounds[slots], q,
        )  # fmt: skip
        return judge(self.verification, target.rows(index.flatten()), drafts)

    def _commit(self, plan: Plan, state: SlotState, verdict: Verdict | None) -> SlotState:
        """Commit what was accepted and roll back the rest: lengths, drafts and selections, here and nowhere else."""
        if verdict is None:
            return state
        slots = plan.slots[plan.verify]
        verified = torch.zeros_like(state.active).index_fill(0, slots, True)
        drafted, accepted = torch.zeros_like(state.drafted), torch.zeros_like(state.drafted)
        drafted[slots], accepted[slots] = state.drafted[slots], verdict.accepted
        row = torch.arange(len(slots), device=slots.device)
        state.last_token[slots] = verdict.tokens[row, verdict.accepted]
        state.length[slots] += verdict.accepted + 1
        state.room[slots] -= verdict.accepted + 1
        state.drafted[slots] = 0
        self._trim_selection(state, slots)
        state = self.method.speculation.observe(state, verified, drafted, accepted)
        return replace(state, rounds=state.rounds + verified)

    def _trim_selection(self, state: SlotState, slots: Tensor) -> None:
        """A selection made while drafting may name positions just taken back; the next row must not read them.

        KV is final up to position length - 2, and the next row writes length - 1 itself.
        """
        block, end = state.block_tokens, state.length[slots] - 1
        tail = state.tail_start[slots]
        tail = torch.where(tail > end, end // block * block, tail)
        chosen = torch.arange(state.blocks.shape[2], device=slots.device) < state.block_count[:, slots, None]
        kept = chosen & (state.blocks[:, slots] < (tail // block)[:, None])  # [S, R, K]
        state.tail_start[slots] = tail
        state.block_count[:, slots] = kept.sum(2)

    def _refresh(self, plan: Plan, state: SlotState, probe: ScoreProbe | None, seen: Tensor) -> None:
        """Recompute the selection of the rows whose turn it is, for the length after this step."""
        chosen = self._probed(plan)
        if not len(chosen):
            return
        slots = plan.slots[chosen]
        length = state.length[slots] + state.drafted[slots]
        scores = None if probe is None else probe.scores
        write_selection(state, slots, self.method.selection.select(scores, seen[chosen], length))

    def _report(self, plan: Plan, drafted: Tensor, verdict: Verdict | None, kv_tokens: Tensor) -> StepOutput:
        verified = plan.verify.tolist()
        accepted, tokens = [0] * len(verified), [[] for _ in verified]  # type: list[int], list[list[int]]
        if verdict is not None:
            rows = plan.verify.nonzero()[:, 0].tolist()
            for row, count, line in zip(rows, verdict.accepted.tolist(), verdict.tokens.tolist(), strict=True):
                accepted[row], tokens[row] = count, line[: count + 1]
        width, kv = len(plan.row_of_token), float(kv_tokens.sum())
        return StepOutput(plan.slots.tolist(), verified, drafted.tolist(), accepted, tokens, width, kv)


def write_selection(state: SlotState, slots: Tensor, chosen: Selected) -> None:
    """Give slots [R] a new selection; what it lists past the state's capacity is past its count as well."""
    width = min(chosen.blocks.shape[2], state.blocks.shape[2])
    state.blocks[:, slots, :width] = chosen.blocks[..., :width]
    state.block_count[:, slots] = chosen.count
    state.tail_start[slots] = chosen.tail_start
