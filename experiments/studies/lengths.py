"""How far do requests of one batch differ in how many drafts stand, and one request from round to round?

The published motivation (arXiv 2609.17943): 20 drafts a round over 256 long prompts. Only rounds that drafted all of
them count, so that a request's end, which leaves room for fewer, does not pass for a refusal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments.metrics import ratio
from experiments.records import RequestLine

SUMMARY = (
    "requests", "rounds", "shortest mean", "mean of means", "longest mean", "between requests",
    "change across windows", "correlation of rounds",
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """One request: drafts that stood in each full round, in order; never empty."""

    id: str
    accepted: tuple[int, ...]

    @property
    def mean(self) -> float:
        return fmean(self.accepted)

    def windows(self, rounds: int) -> list[float]:
        """Means of successive windows; a last one of fewer rounds is left out."""
        whole = len(self.accepted) // rounds * rounds
        return [fmean(self.accepted[at : at + rounds]) for at in range(0, whole, rounds)]


def lengths_of(lines: Iterable[RequestLine], longest: int) -> list[Lengths]:
    """The requests that had a round of `longest` drafts. Raises ValueError where none had."""
    each = [(line.id, tuple(a for d, a in line.rounds if d == longest)) for line in lines]
    found = [Lengths(name, accepted) for name, accepted in each if accepted]
    if not found:
        raise ValueError(f"no round drafted {longest} tokens; run a fixed length of {longest} on longer answers")
    return found


def change_across_windows(requests: Sequence[Lengths], rounds: int) -> float | None:
    """Mean |difference| of a request's successive window means, over all such pairs; None where there is no pair."""
    steps = [abs(b - a) for each in requests for a, b in _pairs(each.windows(rounds))]
    return fmean(steps) if steps else None


def _pairs(values: list[float]) -> list[tuple[float, float]]:
    return list(zip(values, values[1:]))


def correlation(requests: Sequence[Lengths]) -> float | None:
    """Of a round with the next of the same request, about the request's own mean, pooled over requests.

    Short requests pull it below 0, by 1 / rounds where rounds are independent.
    """
    centred = [np.array(each.accepted) - each.mean for each in requests]
    return ratio(float(sum((x[1:] * x[:-1]).sum() for x in centred)), float(sum((x * x).sum() for x in centred)))


def share_between(requests: Sequence[Lengths]) -> float | None:
    """Share of the variance of all rounds that lies between requests: 0 = requests alike, 1 = rounds alike."""
    rounds = np.concatenate([each.accepted for each in requests])
    within = sum(((np.array(each.accepted) - each.mean) ** 2).sum() for each in requests)
    total = float(((rounds - rounds.mean()) ** 2).sum())
    return ratio(total - float(within), total)


def summary(requests: Sequence[Lengths], window: int) -> dict[str, float | None]:
    """What the table shows and the verdicts read; means over requests weigh every request alike, as the paper's."""
    means = [each.mean for each in requests]
    values = (
        len(means), sum(len(each.accepted) for each in requests), min(means), fmean(means), max(means),
        share_between(requests), change_across_windows(requests, window), correlation(requests),
    )  # fmt: skip
    return dict(zip(SUMMARY, values, strict=True))
