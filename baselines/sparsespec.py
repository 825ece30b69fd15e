"""When does SparseSpec (arXiv 2512.01278) verify? After a fixed number of drafts, with the slots' phases spread out.

Sources and deviations: baselines/README.md.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aspire.policies.speculation import Speculation
from aspire.state import SlotState


@dataclass(frozen=True)
class Staggered(Speculation):
    """One draft length for all, but a new request's first round is cut so that verifications spread over passes."""

    longest: int = 8

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise ValueError(f"draft length must be >= 1, got {self.longest}")

    def start(self, state: SlotState, slot: int) -> SlotState:
        """Join the least populated phase: the number of drafts left before a slot verifies, 1 .. longest."""
        phases = torch.arange(1, self.longest + 1, device=state.target.device)
        others = state.active.clone()
        others[slot] = False
        left = torch.where(others, state.target - state.drafted, 0)
        population = (left[:, None] == phases).sum(0)
        target = state.target.clone()
        target[slot] = phases[self.longest - 1 - population.flip(0).argmin()]  # ties: the longer first round
        return replace(state, target=target)

    def wants_verify(self, state: SlotState) -> Tensor:
        return state.drafted >= state.target

    def observe(self, state: SlotState, verified: Tensor, drafted: Tensor, accepted: Tensor) -> SlotState:
        return replace(state, target=torch.where(verified, self.longest, state.target))
