"""When does a slot stop drafting and verify? Fixed, stepped by success, or the closed form of ASPIRE.

Every policy is a frozen dataclass of pure tensor functions over `SlotState`: no host sync, no data-dependent Python.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.state import SlotState


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of a pass: model + mlp * tokens + attn * KV tokens read (ASPIRE section 4.2).

    layers, dense_layers: of the model and method it was fitted for; a draft row reads its selection in all layers but
    the dense ones, where it reads the whole context.
    """

    model: float
    mlp: float
    attn: float
    layers: int = 1
    dense_layers: int = 0

    def draft_kv(self, selected: Tensor, context: Tensor) -> Tensor:
        """KV tokens a draft row reads, averaged over layers, so that one unit is one token in every layer."""
        dense = self.dense_layers / self.layers
        return (1 - dense) * selected + dense * context

    def pass_ms(self, tokens: Tensor, kv_tokens: Tensor) -> Tensor:
        return self.model + self.mlp * tokens + self.attn * kv_tokens

    def scaled(self, model: float, mlp: float, attn: float) -> "CostModel":
        """Each coefficient times a factor: what a method believes whose costs were fitted elsewhere."""
        return replace(self, model=self.model * model, mlp=self.mlp * mlp, attn=self.attn * attn)


class Speculation(ABC):
    """Base of all speculation policies. `longest` bounds the draft length: buffers and page reservations follow it.

    A lockstep policy drafts past a request's last token rather than leave the batch's rhythm; the others stop in time.
    reads_drafts: whether `decide` looks at draft_tokens, q_ids or q_probs. Where it does not, a GPU decides while the
    newest of them are still being sampled.
    """

    longest: int
    lockstep: bool = False
    reads_drafts: bool = False

    @abstractmethod
    def wants_verify(self, state: SlotState) -> Tensor:
        """Slots whose next row should verify, whatever `longest` and the request's room say.  # [B] bool"""

    def start(self, state: SlotState, slot: int) -> SlotState:
        """A request has just entered `slot`: set its estimates."""
        return state

    def observe(self, state: SlotState, verified: Tensor, drafted: Tensor, accepted: Tensor) -> SlotState:
        """Slots `verified` [B] bool had `drafted` [B] drafts of which `accepted` [B] were right."""
        return state

    def decide(self, state: SlotState) -> Tensor:
        """Which slots verify in the next pass; the other active ones draft.  # [B] bool"""
        cap = torch.full_like(state.room, self.longest)
        if not self.lockstep:
            cap = torch.minimum(cap, state.room - 1)  # a verify commits one token more than it accepts
        return state.active & ((state.drafted >= cap) | self.wants_verify(state))


@dataclass(frozen=True)
class Fixed(Speculation):
    """Always the same draft length; with `lockstep` all slots draft and verify together. longest 0 = autoregressive."""

    longest: int
    lockstep: bool = True

    def __post_init__(self) -> None:
        if self.longest < 0:
            raise ValueError(f"draft length must be >= 0, got {self.longest}")

    def wants_verify(self, state: SlotState) -> Tensor:
        return state.drafted >= self.longest


@dataclass(frozen=True)
class Stepped(Speculation):
    """One draft more after a fully accepted round, else one more than was accepted (ASPIRE-FSM)."""

    longest: int = 16
    first: int = 3

    def start(self, state: SlotState, slot: int) -> SlotState:
        target = state.target.clone()
        target[slot] = min(self.first, self.longest)
        return replace(state, target=target)

    def wants_verify(self, state: SlotState) -> Tensor:
        return state.drafted >= state.target

    def observe(self, state: SlotState, verified: Tensor, drafted: Tensor, accepted: Tensor) -> SlotState:
        stepped = torch.where(accepted == drafted, state.target + 1, accepted + 1).clamp(1, self.longest)
        return replace(state, target=torch.where(verified, stepped, state.target))


@dataclass(frozen=True)
class ClosedForm(Speculation):
    """The draft length that maximises expected committed tokens per time (ASPIRE section 4.2, Algorithm 1).

    omega: weight on the old acceptance estimate; alpha_0: estimate of a new request; first: drafts before the first
    verification. cost: fitted by calibrate.py; `cost=None` must be filled before use.
    """

    longest: int = 16
    first: int = 3
    omega: float = 0.8
    alpha_0: float = 0.9
    cost: CostModel | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.omega <= 1 or not 0 <= self.alpha_0 <= 1:
            raise ValueError(f"omega and alpha_0 must be in [0, 1], got {self.omega} and {self.alpha_0}")

    def start(self, state: SlotState, slot: int) -> SlotState:
        alpha = state.alpha.clone()
        alpha[slot] = self.alpha_0
        return replace(state, alpha=alpha)

    def observe(self, state: SlotState, verified: Tensor, drafted: Tensor, accepted: Tensor) -> SlotState:
        """alpha_hat = accepted / examined drafts; a round without drafts tells nothing."""
        examined = torch.minimum(accepted + 1, drafted)
        seen = accepted / examined.clamp(min=1)
        alpha = self.omega * state.alpha + (1 - self.omega) * seen
        return replace(state, alpha=torch.where(verified & (drafted > 0), alpha, state.alpha))

    def wants_verify(self, state: SlotState) -> Tensor:
        opening = (state.rounds == 0) & (state.drafted < self.first)
        return ~opening & (state.drafted >= self.best_length(state))

    def best_length(self, state: SlotState) -> Tensor:
        """argmax over gamma of expected tokens / time, were every slot like this one.  # [B] int64"""
        assert self.cost is not None, "calibrate first: ClosedForm.cost is not set"
        batch = state.active.sum()
        context = state.length + state.drafted
        selected = selected_tokens(state, context)
        draft = self.cost.pass_ms(batch, batch * self.cost.draft_kv(selected, context))
        verify = self.cost.pass_ms(batch * (state.drafted + 1), batch * context)
        gamma = torch.arange(self.longest + 1, device=context.device)
        rate = expected_tokens(state.alpha, self.longest) / (1 + (draft / verify)[:, None] * gamma)
        return rate.argmax(1)


def expected_tokens(alpha: Tensor, longest: int) -> Tensor:
    """1 + alpha + ... + alpha^gamma, gamma = 0 .. longest; a sum, so alpha = 1 needs no guard.  # [B, longest + 1]"""
    gamma = torch.arange(longest + 1, device=alpha.device)
    return (alpha[:, None] ** gamma).cumsum(1)


def selected_blocks(state: SlotState) -> Tensor:
    """Blocks a draft row of each slot reads in a layer with a selection, averaged over scopes.  # [B]"""
    count = state.block_count
    return count[0] if len(count) == 1 else count.float().mean(0)


def selected_tokens(state: SlotState, context: Tensor) -> Tensor:
    """Tokens a draft row of each slot reads in a layer with a selection, its tail included.  # [B]"""
    return selected_blocks(state) * state.block_tokens + (context - state.tail_start)
