"""What would another draft policy have made of drafts whose verdicts are known? A replay, in modelled time.

`stands` says of every position of a request's answer whether a draft there stands. A policy that drafts g tokens at
position p commits those that stand up to the first that does not, and one token more. This assumes that a verdict
belongs to its position: not to how many drafts came before it, nor to how old the selection was.

Time is that of the homogeneous approximation (ASPIRE section 4.2), in which a request's batch holds copies of it: rows
of other kinds, barriers and empty slots cost nothing here, to no policy. A request's time is the sum of its passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.policies.selection import TopBlocks
from aspire.policies.speculation import CostModel, Speculation
from aspire.state import SlotState


@dataclass(frozen=True)
class Drafts:
    """Answers whose drafts were judged. stands [R, P] bool; count [R]: positions of each; prompt [R]: tokens before."""

    stands: Tensor
    count: Tensor
    prompt: Tensor

    @property
    def runs(self) -> Tensor:
        """Drafts in a row that stand from each position on; 0 past the end.  # [R, P + 1]"""
        positions = self.stands.shape[1]
        ahead = torch.zeros(len(self.stands), positions + 1, dtype=torch.int64)
        stands = self.stands & (torch.arange(positions) < self.count[:, None])
        for at in reversed(range(positions)):
            ahead[:, at] = torch.where(stands[:, at], ahead[:, at + 1] + 1, 0)
        return ahead


@dataclass(frozen=True)
class Clock:
    """Milliseconds of the passes of `batch` copies of a request, which draft with a selection of that budget."""

    cost: CostModel
    selection: TopBlocks
    batch: int

    def selected(self, context: Tensor) -> Tensor:
        """Tokens a draft row reads in a layer with a selection, its tail included."""
        return torch.minimum(self.selection.budget(context) * self.selection.block, context)

    def draft(self, context: Tensor) -> Tensor:
        read = self.cost.draft_kv(self.selected(context), context)
        return self.cost.pass_ms(torch.full_like(context, self.batch), self.batch * read)

    def verify(self, drafted: Tensor, context: Tensor) -> Tensor:
        return self.cost.pass_ms(self.batch * (drafted + 1), self.batch * context)

    def cost_for(self, slots: int) -> CostModel:
        """The cost model by which a policy that sees `slots` active slots decides for `batch` copies of each."""
        share = self.batch / slots
        return replace(self.cost, mlp=self.cost.mlp * share, attn=self.cost.attn * share)


@dataclass(frozen=True)
class Replayed:
    """Of each request [R]: milliseconds, passes that verified, drafts, drafts that stood, tokens committed."""

    ms: Tensor
    rounds: Tensor
    drafted: Tensor
    accepted: Tensor
    committed: Tensor


def replay(speculation: Speculation, drafts: Drafts, clock: Clock) -> Replayed:
    """Every request to its end under one policy, each by its own clock."""
    state, runs = _seated(speculation, drafts), drafts.runs
    requests = torch.arange(len(drafts.count))
    ms = torch.zeros(len(requests), dtype=torch.float64)
    total = torch.zeros(3, len(requests), dtype=torch.int64)  # rounds, drafted, accepted
    while bool((live := state.room > 0).any()):
        context = state.length + state.drafted
        state = replace(state, block_count=clock.selected(context)[None], tail_start=context)
        verify = speculation.decide(state) & live
        ms += torch.where(verify, clock.verify(state.drafted, context), clock.draft(context)) * live
        accepted = torch.minimum(runs[requests, state.length - drafts.prompt], state.drafted)
        total += torch.stack([torch.ones_like(accepted), state.drafted, accepted]) * verify
        state = _committed(speculation, state, verify, live, accepted)
    return Replayed(ms, total[0], total[1], total[2], drafts.count)


def best_of(each: Sequence[Replayed]) -> Replayed:
    """Of each request the replay that took it the least time."""
    fastest = torch.stack([one.ms for one in each]).argmin(0)
    at = torch.arange(len(fastest))

    def pick(name: str) -> Tensor:
        return torch.stack([getattr(one, name) for one in each])[fastest, at]

    return Replayed(pick("ms"), pick("rounds"), pick("drafted"), pick("accepted"), pick("committed"))


def _seated(speculation: Speculation, drafts: Drafts) -> SlotState:
    """A slot for each request, which stays active to the end of the replay: policies count them."""
    slots = len(drafts.count)
    state = SlotState.empty(slots, 1, max(speculation.longest, 1), 1, 1, 1, 1, "cpu")
    state = replace(
        state, active=torch.ones(slots, dtype=torch.bool), room=drafts.count.clone(), length=drafts.prompt.clone()
    )
    for slot in range(slots):
        state = speculation.start(state, slot)
    return state


def _committed(speculation: Speculation, state: SlotState, verify: Tensor, live: Tensor, accepted: Tensor) -> SlotState:
    """The state after a pass: drafts appended, or committed and forgotten."""
    state = speculation.observe(state, verify, state.drafted, accepted)
    taken = torch.where(verify, accepted + 1, 0)
    return replace(
        state, length=state.length + taken, room=state.room - taken, rounds=state.rounds + verify,
        drafted=torch.where(verify, 0, state.drafted + (live & ~verify)),
    )  # fmt: skip


@dataclass(frozen=True)
class Hindsight(Speculation):
    """Drafts as many tokens as a plan says for the position: lengths [R, P], by committed tokens past prompt [R]."""

    longest: int
    lengths: Tensor
    prompt: Tensor

    def wants_verify(self, state: SlotState) -> Tensor:
        at = (state.length - self.prompt).clamp(max=self.lengths.shape[1] - 1)
        return state.drafted >= self.lengths[torch.arange(len(at)), at]


def hindsight(drafts: Drafts, clock: Clock, longest: int) -> Hindsight:
    """The draft lengths, up to `longest`, of one who knows which drafts will stand: of the least time to the end."""
    runs, positions = drafts.runs, drafts.stands.shape[1]
    requests = torch.arange(len(drafts.count))
    lengths = torch.zeros(len(requests), positions, dtype=torch.int64)
    rest = torch.zeros(len(requests), positions + 1, dtype=torch.float64)  # least ms from a position to the end
    for at in reversed(range(positions)):
        most = torch.minimum(runs[:, at], drafts.count - at - 1).clamp(0, longest)  # more would only cost
        ms = _round_ms(clock, drafts.prompt + at, longest)
        after = rest[requests[:, None], (at + 1 + torch.arange(longest + 1)).clamp(max=positions)]
        total = (ms + after).masked_fill(torch.arange(longest + 1) > most[:, None], float("inf"))
        lengths[:, at] = total.argmin(1)
        rest[:, at] = torch.where(at < drafts.count, total.amin(1), 0)
    return Hindsight(longest, lengths, drafts.prompt)


def _round_ms(clock: Clock, context: Tensor, longest: int) -> Tensor:
    """Milliseconds of a round of 0 .. longest drafts that begins at a context [R].  # [R, longest + 1] fp64"""
    drafted = torch.arange(longest + 1)
    at = context[:, None] + drafted
    draft = clock.draft(at).double().cumsum(1)
    before = torch.cat([torch.zeros_like(draft[:, :1]), draft[:, :-1]], 1)
    return before + clock.verify(drafted, at)
