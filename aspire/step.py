"""What happens in one decode step on the device? plan -> forward -> verify -> commit -> refresh -> decide next.

Nothing here looks at a request: the step reads and writes `SlotState` and the pool, in place. Its shapes follow from a
`Shape` that the host knows before it starts, so the same code runs eagerly and inside a CUDA graph. Rollback is in
`_commit`, alone.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aspire.attention import MixedAttention, PassRows, Plan, ScoreProbe
from aspire.beside import beside, rejoin
from aspire.cache.pool import KVPool
from aspire.kernels.attention import query_tile
from aspire.kernels.blocks import count_below
from aspire.kernels.drafts import keep_drafts
from aspire.kernels.jit import power_of_2
from aspire.kernels.noise import DRAFT_OR_TARGET
from aspire.kernels.report import ACCEPTED, DRAFTED, TOKENS, VERIFIED, coming, report
from aspire.model.decoder import Decoder
from aspire.policies.method import Method
from aspire.policies.selection import Selected
from aspire.sampling import Filtered, filter_and_pick
from aspire.state import SlotState
from aspire.verify import Drafts, Verdict, Verification, judge


@dataclass(frozen=True)
class Shape:
    """What a host must know of a pass to launch it: kind draft, verify or mixed, tokens with padding, widest row."""

    kind: str
    tokens: int
    widest: int


@dataclass(frozen=True)
class Ahead:
    """What the device has decided about the next pass: tokens to feed, widest row, verifying and active slots."""

    tokens: int
    widest: int
    verifying: int
    active: int

    @property
    def shape(self) -> Shape:
        kind = "draft" if not self.verifying else "verify" if self.verifying == self.active else "mixed"
        return Shape(kind, self.tokens, self.widest)


@dataclass(frozen=True)
class StepOutput:
    """What the host needs of a step, row by row: slot, verified, drafted, accepted, and the committed tokens.

    tokens of a drafting row are empty. kv_tokens: KV tokens read per layer, on average.
    """

    slots: list[int]
    verified: list[bool]
    drafted: list[int]
    accepted: list[int]
    tokens: list[list[int]]
    kv_tokens: float

    @classmethod
    def read(cls, report: np.ndarray, taken: Container[int] | None = None) -> "StepOutput":
        """From the lines of a report, see kernels/report.py; taken: the slots to read, None = all."""
        *lines, last = report.tolist()
        rows = [
            (slot, line) for slot, line in enumerate(lines) if line[VERIFIED] >= 0 and (taken is None or slot in taken)
        ]
        return cls(
            [slot for slot, _ in rows], [line[VERIFIED] == 1 for _, line in rows], [line[DRAFTED] for _, line in rows],
            [line[ACCEPTED] for _, line in rows],
            [line[TOKENS : TOKENS + 1 + line[ACCEPTED]] if line[VERIFIED] else [] for _, line in rows],
            last[0] / 64,
        )  # fmt: skip


class Stepper:
    """One step after another over one batch; holds what a run fixes."""

    def __init__(
        self, model: Decoder, pool: KVPool, method: Method, verification: Verification, candidates: int,
        announce: Callable[[Tensor], None] = lambda ahead: None, invariant: bool = False,
    ) -> None:  # fmt: skip
        """candidates: entries of a filtered distribution, see sampling.py; invariant: see EngineSettings.

        announce: is given the fields of `Ahead` [4] int64, on the device, as soon as the next pass is decided.
        """
        method.check(model.spec.layers)
        self.announce, self.invariant = announce, invariant
        self.model, self.pool, self.method = model.made_invariant() if invariant else model, pool, method
        self.verification, self.candidates = verification, candidates
        # Rejection must not draw a position twice with the same noise: after a refusal it is drafted anew, from a
        # distribution that may depend on the draft refused before. A position comes back in a lower column each time,
        # so position and column together are fresh. Coupled drafts take the noise of the target's pick instead.
        self.fresh = verification.mode == "rejection"
        self.dense_share = len(method.refresh.dense_layers(model.spec.layers)) / model.spec.layers

    @torch.no_grad()
    def step(self, state: SlotState, shape: Shape) -> Tensor:
        """One pass over all active slots, as `decide` has planned it; returns its report."""
        plan = Plan.of(
            state, state.verify, self.pool.page_size, shape.tokens, shape.widest, self.fresh, self.dense_share
        )
        drafted, verdict, device = state.drafted.clone(), None, state.drafted.device
        state.drafted.add_(plan.draft)
        early = self._follows_from_counts(shape.kind)
        if early:
            with beside(device):
                self._decide_next(state)
        hidden, probe = self._forward(plan, state, shape.kind)
        if shape.kind == "draft":  # nothing is committed: the selection is made while the tokens are sampled
            with beside(device):
                self._refresh(plan, state, probe, shape.kind)
        target, picks = self._filter(plan, state, self.model.logits(hidden))
        if early or shape.kind == "draft":
            rejoin(device)
        if shape.kind != "verify":
            self._append_drafts(plan, state, drafted, target, picks)
        if shape.kind != "draft":
            verdict = self._verify(plan, state, drafted, target, picks)
            self._commit(plan, state, verdict)
        if not early:
            self._decide_next(state)
        if shape.kind != "draft":
            self._refresh(plan, state, probe, shape.kind)
        return self._report(plan, drafted, verdict)

    @torch.no_grad()
    def decide(self, state: SlotState) -> None:
        """Who verifies in the next pass."""
        state.verify.copy_(self.method.speculation.decide(state) & state.active)

    def _decide_next(self, state: SlotState) -> None:
        """Decide, and say so at once: the host launches the next pass while this one still runs."""
        self.decide(state)
        self.announce(coming(state.active, state.verify, state.drafted))

    def _follows_from_counts(self, kind: str) -> bool:
        """Whether the next pass can be decided before this one has run: when it drafts, or when nobody ever does."""
        speculation = self.method.speculation
        return not speculation.longest or (kind == "draft" and not speculation.reads_drafts)

    @torch.no_grad()
    def look(self, state: SlotState) -> Ahead:
        """The next pass, decided anew after the host has changed a slot; waits for the device."""
        self.decide(state)
        return Ahead(*coming(state.active, state.verify, state.drafted).tolist())

    def padded(self, shape: Shape, slots: int) -> Shape:
        """The shape a GPU pass is launched with: few shapes, so that a captured pass fits most of them.

        Where slots verify when they like, a pass in which all do is launched like any mixed one.
        """
        longest, lockstep = self.method.speculation.longest, self.method.speculation.lockstep
        if shape.kind == "draft":
            return Shape("draft", slots, 1)
        group = self.model.spec.heads // self.model.spec.kv_heads
        widest = min(query_tile(shape.widest, group) // group, longest + 1)
        step = max(8, power_of_2(shape.tokens) // 8)  # an eighth is wasted at most
        tokens = min(-(-shape.tokens // step) * step, slots * (longest + 1))
        return Shape(shape.kind if lockstep else "mixed", max(tokens, slots), widest)

    def shapes(self, slots: int) -> list[Shape]:
        """All shapes that a pass over up to `slots` slots is launched with, the widest first: others fit its memory."""
        longest = self.method.speculation.longest
        found = [Shape("draft", slots, 1)] if longest else []
        if self.method.speculation.lockstep:
            found += [Shape("verify", active * (longest + 1), longest + 1) for active in range(1, slots + 1)]
        else:
            for width in range(1, longest + 2):
                found += [Shape("mixed", tokens, width) for tokens in range(width, slots * width + 1)]
        return sorted({self.padded(shape, slots) for shape in found}, key=lambda shape: -shape.tokens)

    def _forward(self, plan: Plan, state: SlotState, kind: str) -> tuple[Tensor, ScoreProbe | None]:
        """Hidden states of every token of the pass [T, E], and the probe with its scores."""
        fed = plan.feed
        groups = PassRows(plan, state, self.method, self.model.spec, self.pool, kind, self.invariant)
        probe = self._probe(plan, groups, kind)
        attend = MixedAttention(self.pool, fed.entries, groups, probe)
        return self.model(fed.ids, fed.positions, attend), probe

    def _due(self, plan: Plan, kind: str) -> Tensor | None:
        """The rows after which the selection is recomputed, None where it never is in such a pass.  # [B] bool"""
        if not self.method.speculation.longest:  # who never drafts has no use for a selection
            return None
        verify = plan.verify if self.method.refresh.due("verify") and kind != "draft" else None
        draft = plan.draft if self.method.refresh.due("draft") and kind != "verify" else None
        if verify is None or draft is None:
            return draft if verify is None else verify
        return verify | draft

    def _probe(self, plan: Plan, groups: PassRows, kind: str) -> ScoreProbe | None:
        probe, due = self.method.selection.probe, self._due(plan, kind)
        if probe is None or due is None:
            return None
        return ScoreProbe(self.pool, plan, groups.dense, probe, self.model.spec, due)

    def _filter(self, plan: Plan, state: SlotState, logits: Tensor) -> tuple[Filtered, Tensor]:
        """The distribution at each token after the request's own temperature, top-k and top-p, and a token of it."""
        row = plan.feed.row
        return filter_and_pick(
            logits, state.temperature[row], state.top_k[row], state.top_p[row], self.candidates, state.seed[row],
            plan.feed.key, DRAFT_OR_TARGET,
        )  # fmt: skip

    def _append_drafts(self, plan: Plan, state: SlotState, column: Tensor, dist: Filtered, picks: Tensor) -> None:
        """The next draft of every drafting row, with the noise of its position, in its column [B]."""
        if not state.longest_draft:
            return
        ids, probs = dist.ids, dist.probs
        if self.verification.draft_sampling == "greedy":
            picks = ids.gather(1, probs.argmax(1, keepdim=True))[:, 0]
            probs = (ids == picks[:, None]).float()
        keep_drafts(
            plan.draft, plan.feed.index[:, 0], picks, ids, probs, column, state.draft_tokens, state.q_ids,
            state.q_probs, self.verification.mode == "rejection",
        )  # fmt: skip

    def _verify(self, plan: Plan, state: SlotState, drafted: Tensor, target: Filtered, picks: Tensor) -> Verdict:
        """Judge the drafts of every row; what it says of rows that do not verify is of no use."""
        columns = plan.widest - 1
        index = plan.feed.index.flatten()
        q = None
        if self.verification.mode == "rejection":
            q = Filtered(state.q_ids[:, :columns], state.q_probs[:, :columns])
        drafts = Drafts(
            state.draft_tokens[:, :columns], drafted.clamp(max=columns), state.seed, state.length, state.rounds, q
        )
        return judge(self.verification, target.rows(index), drafts, picks[index].view(-1, plan.widest))

    def _commit(self, plan: Plan, state: SlotState, verdict: Verdict) -> None:
        """Commit what was accepted and roll back the rest: lengths, drafts and selections, here and nowhere else."""
        verified = plan.verify
        drafted, accepted = torch.where(verified, state.drafted, 0), torch.where(verified, verdict.accepted, 0)
        last = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        committed = accepted + verified
        state.last_token.copy_(torch.where(verified, last, state.last_token))
        state.length.add_(committed)
        state.room.sub_(committed)
        state.drafted.mul_(~verified)
        self._trim_selection(state, verified)
        state.adopt(self.method.speculation.observe(state, verified, drafted, accepted))
        state.rounds.add_(verified)

    def _trim_selection(self, state: SlotState, verified: Tensor) -> None:
        """A selection made while drafting may name positions just taken back; the next row must not read them.

        KV is final up to position length - 2, and the next row writes length - 1 itself.
        """
        block, end = state.block_tokens, state.length - 1
        tail = torch.where(verified & (state.tail_start > end), end // block * block, state.tail_start)
        state.tail_start.copy_(tail)
        kept = count_below(state.blocks, state.block_count, tail // block)
        state.block_count.copy_(torch.where(verified, kept, state.block_count))

    def _refresh(self, plan: Plan, state: SlotState, probe: ScoreProbe | None, kind: str) -> None:
        """Recompute the selection of the rows whose turn it is, for the length after this step."""
        due = self._due(plan, kind)
        if due is None:
            return
        scores = None if probe is None else probe.scores
        seen, length = plan.feed.position + 1, state.length + state.drafted
        write_selection(state, due, self.method.selection.select(scores, seen, length))

    def _report(self, plan: Plan, drafted: Tensor, verdict: Verdict | None) -> Tensor:
        accepted, tokens = (None, None) if verdict is None else (verdict.accepted, verdict.tokens)
        return report(plan.feed.width, plan.verify, drafted, accepted, tokens, plan.feed.kv)


def write_selection(state: SlotState, due: Tensor, chosen: Selected) -> None:
    """Give the slots due [B] bool their new selection; what it lists past the capacity is past its count as well."""
    width = min(chosen.blocks.shape[2], state.blocks.shape[2])
    mine = state.blocks[..., :width]
    mine.copy_(torch.where(due[:, None], chosen.blocks[..., :width], mine))
    state.block_count.copy_(torch.where(due, chosen.count, state.block_count))
    state.tail_start.copy_(torch.where(due, chosen.tail_start, state.tail_start))
