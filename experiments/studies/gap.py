"""How much faster would a draft policy be that knew which drafts stand? Recorded acceptance under fitted cost models.

Modelled, not measured: aspire/replay.py says what the replay assumes. Drafts were judged in rounds of a fixed length;
the token after a fully accepted round was never drafted, so that no verdict exists for it, and it is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from aspire.policies import ClosedForm, CostModel, Fixed, Speculation, Stepped, TopBlocks
from aspire.replay import Clock, Drafts, Replayed, best_of, hindsight, replay
from experiments.layout import make_method
from experiments.records import Record, RequestLine

OWN, ORACLE = "best length of each request", "hindsight oracle"
PLAIN, FIXED, STEPPED, CLOSED = "autoregressive", "best fixed length", "ASPIRE-FSM", "ASPIRE"


@dataclass(frozen=True)
class Scenario:
    """A fitted cost model to replay under: the batch and the prompt length it was fitted at, the policy of its method.

    context None: each request keeps its own prompt.
    """

    name: str
    clock: Clock
    policy: ClosedForm
    context: int | None


@dataclass(frozen=True)
class Speed:
    """One policy under one scenario: modelled tokens a second of the batch, tokens a round, drafts a round."""

    policy: str
    tok_s: float
    tokens_per_round: float
    drafts_per_round: float


def verdicts_of(line: RequestLine) -> list[bool]:
    """Of each position that a draft was tried at: does it stand?"""
    return [
        stands for drafted, accepted in line.rounds for stands in [True] * accepted + [False] * (accepted < drafted)
    ]


def drafts_of(lines: Iterable[RequestLine], context: int | None = None) -> Drafts:
    """The judged drafts of all requests that have any. Raises ValueError where none has."""
    each = [(line.prompt_tokens if context is None else context, verdicts_of(line)) for line in lines]
    each = [(prompt, verdicts) for prompt, verdicts in each if verdicts]
    if not each:
        raise ValueError("no draft was judged; record a method that drafts, as aspire_fixed")
    longest = max(len(verdicts) for _, verdicts in each)
    stands = torch.tensor([verdicts + [False] * (longest - len(verdicts)) for _, verdicts in each])
    count = torch.tensor([len(verdicts) for _, verdicts in each])
    return Drafts(stands, count, torch.tensor([prompt for prompt, _ in each]))


def scenario_of(record: Record, own_prompts: bool) -> Scenario:
    """The cost model that a record of ASPIRE was run with. Raises ValueError for a record that has none.

    own_prompts: whether requests are replayed after their own prompts, rather than after ones of the record's length.
    """
    method = make_method(record.config)
    policy, selection = method.speculation, method.selection
    if record.calibration is None or not isinstance(policy, ClosedForm) or not isinstance(selection, TopBlocks):
        raise ValueError(
            f"{record.cell_id} has no cost model of the closed form; run method=aspire and read that record"
        )
    clock = Clock(CostModel(**record.calibration["cost"]), selection, record.cell.batch)
    context = None if own_prompts else record.workload.prompt_tokens.max
    return Scenario(record.cell.model, clock, policy, context)


def speeds(lines: Sequence[RequestLine], scenario: Scenario) -> list[Speed]:
    """Every policy on the recorded drafts under the scenario's cost model, none drafting longer than ASPIRE may."""
    drafts, clock, longest = drafts_of(lines, scenario.context), scenario.clock, scenario.policy.longest

    def run(policy: Speculation) -> Replayed:
        return replay(policy, drafts, clock)

    fixed = [run(Fixed(length, lockstep=False)) for length in range(longest + 1)]
    done = {
        PLAIN: fixed[0],
        FIXED: min(fixed[1:], key=lambda one: float(one.ms.sum())),
        STEPPED: run(Stepped(longest)),
        CLOSED: run(replace(scenario.policy, cost=clock.cost_for(len(drafts.count)))),
        OWN: best_of(fixed),
        ORACLE: run(hindsight(drafts, clock, longest)),
    }
    return [speed(name, one, clock.batch) for name, one in done.items()]


def speed(name: str, done: Replayed, batch: int) -> Speed:
    """Ratios of sums over requests; `batch` copies of a request commit so many times its tokens in its time."""
    rounds, tokens = int(done.rounds.sum()), int(done.committed.sum())
    tok_s = batch * tokens / (float(done.ms.sum()) / 1e3)
    return Speed(name, tok_s, tokens / rounds, int(done.drafted.sum()) / rounds)


def gap(found: Sequence[Speed], policy: str = CLOSED, oracle: str = ORACLE) -> float:
    """The share of the oracle's speed that a policy leaves."""
    by_name = {one.policy: one.tok_s for one in found}
    return 1 - by_name[policy] / by_name[oracle]
