"""How much faster would a draft policy be that knew which drafts stand? Recorded acceptance under fitted cost models.

Modelled, not measured: aspire/replay.py says what the replay assumes. Drafts were judged in rounds of a fixed length;
the token after a fully accepted round was never drafted, so that no verdict exists for it, and it is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch

from aspire.policies import ClosedForm, CostModel, Fixed, Speculation, Stepped, TopBlocks
from aspire.replay import Clock, Drafts, Replayed, best_of, hindsight, replay
from experiments.layout import make_method
from experiments.records import Record, RequestLine, Section

OWN, ORACLE = "best length of each request", "hindsight oracle"
PLAIN, FIXED, STEPPED, CLOSED = "autoregressive", "best fixed length", "ASPIRE-FSM", "ASPIRE"


@dataclass(frozen=True)
class Scenario:
    """The cost model of a record to replay under, at the batch it was fitted at, and the policy of its method.

    context: its prompt tokens, the replayed requests' too: their verdicts are kept, their own prompts are not.
    """

    record: Record
    clock: Clock
    policy: ClosedForm
    context: int


class Speed(Section):
    """One policy under one scenario: modelled tokens a second of the batch, tokens a round, drafts a round."""

    tok_s: float
    tokens_per_round: float
    drafts_per_round: float


class GapLine(Section):
    """The replay of one cell's drafts under the cost model of a record.

    fitted: cell id of that record, on `device`, at `commit`. batch, context: its own, under which the requests are
    replayed. requests, positions: replayed. speeds: by policy.
    """

    evidence: Literal["modelled"] = "modelled"
    fitted: str
    device: str | None
    commit: str | None
    model: str
    batch: int
    context: int
    cost: dict[str, float]
    requests: int
    positions: int
    speeds: dict[str, Speed]

    def gap(self, policy: str, oracle: str) -> float:
        """The share of the oracle's speed that a policy leaves."""
        return 1 - self.speeds[policy].tok_s / self.speeds[oracle].tok_s

    def speedup(self, policy: str) -> float:
        """Over autoregressive decoding in the same replay."""
        return self.speeds[policy].tok_s / self.speeds[PLAIN].tok_s


def verdicts_of(line: RequestLine) -> list[bool]:
    """Of each position that a draft was tried at: does it stand?"""
    return [
        stands for drafted, accepted in line.rounds for stands in [True] * accepted + [False] * (accepted < drafted)
    ]


def drafts_of(lines: Iterable[RequestLine], context: int) -> Drafts:
    """The judged drafts of requests that have any, after prompts of `context` tokens. Raises ValueError without any."""
    each = [verdicts for line in lines if (verdicts := verdicts_of(line))]
    if not each:
        raise ValueError("no draft was judged; record a method that drafts, as aspire_fixed")
    longest = max(map(len, each))
    stands = torch.tensor([verdicts + [False] * (longest - len(verdicts)) for verdicts in each])
    count = torch.tensor([len(verdicts) for verdicts in each])
    return Drafts(stands, count, torch.full_like(count, context))


def scenario_of(record: Record) -> Scenario:
    """The cost model that a record of ASPIRE was run with. Raises ValueError for a record that has none."""
    method = make_method(record.config)
    policy, selection = method.speculation, method.selection
    if record.calibration is None or not isinstance(policy, ClosedForm) or not isinstance(selection, TopBlocks):
        raise ValueError(
            f"{record.cell_id} has no cost model of the closed form; run method=aspire and read that record"
        )
    clock = Clock(CostModel(**record.calibration["cost"]), selection, record.cell.batch)
    context = record.workload.prompt_tokens.max
    assert context is not None, record.cell_id
    return Scenario(record, clock, policy, context)


def line_of(lines: Sequence[RequestLine], scenario: Scenario) -> GapLine:
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
    record = scenario.record
    return GapLine(
        fitted=record.cell_id, device=record.environment.device, commit=record.environment.commit,
        model=record.cell.model, batch=clock.batch, context=scenario.context, cost=asdict(clock.cost),
        requests=len(drafts.count), positions=int(drafts.count.sum()),
        speeds={name: speed_of(one, clock.batch) for name, one in done.items()},
    )  # fmt: skip


def speed_of(done: Replayed, batch: int) -> Speed:
    """Ratios of sums over requests; `batch` copies of a request commit so many times its tokens in its time."""
    rounds, tokens = int(done.rounds.sum()), int(done.committed.sum())
    return Speed(
        tok_s=round(batch * tokens / (float(done.ms.sum()) / 1e3), 3), tokens_per_round=round(tokens / rounds, 4),
        drafts_per_round=round(int(done.drafted.sum()) / rounds, 4),
    )  # fmt: skip
