"""How good are graded answers? avg@k, pass@k, their errors, and the difference of two methods, as pure functions.

An item is what stands before `#` in a request's id; its samples are its repeats, k of them. Items count alike whatever
their number of samples, and errors are over items: samples of one item are not independent.
"""

from collections.abc import Mapping, Sequence
from math import comb, sqrt
from statistics import fmean, stdev

import numpy as np

from experiments.records import Graded, Quality, RequestLine, Slice

Interval = tuple[float, float]
Samples = Mapping[str, Sequence[float]]  # item -> scores of its samples, 0 to 1


def by_item(lines: Sequence[RequestLine]) -> dict[str, list[float]]:
    """The scores of every item that was graded; those without an answer are 0."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line.graded is not None:
            found.setdefault(line.id.partition("#")[0], []).append(line.graded.score)
    return found


def average(samples: Samples) -> float | None:
    """avg@k: the mean over items of the mean over their samples."""
    return fmean(map(fmean, samples.values())) if samples else None


def standard_error(samples: Samples) -> float | None:
    """Of avg@k, from the spread of the items' means; None below two items."""
    means = [fmean(each) for each in samples.values()]
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else None


def interval(samples: Samples, level: float = 0.95) -> Interval | None:
    """Of avg@k. Wilson's where every item is all right or all wrong, Student's t over items elsewhere.

    None below two items.
    """
    means = [fmean(each) for each in samples.values()]
    error = standard_error(samples)
    if error is None:
        return None
    from scipy import stats  # here: its import takes a second

    if all(mean in (0.0, 1.0) for mean in means):
        found = stats.binomtest(int(sum(means)), len(means)).proportion_ci(level, method="wilson")
        return float(found.low), float(found.high)
    reach = float(stats.t.ppf((1 + level) / 2, len(means) - 1)) * error
    return max(fmean(means) - reach, 0.0), min(fmean(means) + reach, 1.0)


def pass_at(samples: Samples, k: int) -> float | None:
    """Chance that at least one of k samples is right, unbiased: mean of 1 - C(n - right, k) / C(n, k).

    A sample is right at a score of 1. None where an item has fewer than k samples. Source: Chen et al. 2021, eq. 1.
    """
    if not samples or k < 1 or any(len(each) < k for each in samples.values()):
        return None
    rights = [(len(each), sum(score == 1 for score in each)) for each in samples.values()]
    return fmean(1 - comb(n - right, k) / comb(n, k) for n, right in rights)


def difference(mine: Samples, theirs: Samples) -> float | None:
    """avg@k of one method less that of another, over the items that both have."""
    paired = _paired(mine, theirs)
    return fmean(paired) if paired else None


def difference_interval(
    mine: Samples, theirs: Samples, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Paired percentile bootstrap over items of the difference; None below two items that both have."""
    paired = np.array(_paired(mine, theirs))
    if len(paired) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(paired), size=(resamples, len(paired)))
    low, high = np.quantile(paired[drawn].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _paired(mine: Samples, theirs: Samples) -> list[float]:
    return [fmean(scores) - fmean(theirs[item]) for item, scores in mine.items() if item in theirs]


def quality(lines: Sequence[RequestLine], scorer: str) -> Quality:
    """The summary of a cell's graded lines. Raises ValueError where items have different numbers of samples."""
    samples = by_item(lines)
    each = {len(scores) for scores in samples.values()}
    if len(each) > 1:
        raise ValueError(f"items have {min(each)} to {max(each)} samples; every item needs as many as the others")
    k = each.pop() if each else 0
    graded = [line.graded for line in lines if line.graded is not None]
    low, high = interval(samples) or (None, None)
    items = {line.id.partition("#")[0] for line in lines}
    return Quality(
        scorer=scorer, items=len(samples), samples_per_item=k, unscored=len(items) - len(samples),
        score=average(samples), stderr=standard_error(samples), low=low, high=high,
        pass_at={str(n): pass_at(samples, n) for n in _powers(k)} if _all_or_nothing(graded) else {},
        right=sum(one.score == 1 for one in graded), partly=sum(0 < one.score < 1 for one in graded),
        wrong=sum(one.outcome == "answered" and one.score == 0 for one in graded),
        unparsable=sum(one.outcome == "unparsable" for one in graded),
        unfinished=sum(one.outcome == "unfinished" for one in graded),
        at_limit=sum(line.graded is not None and line.finish_reason == "length" for line in lines),
        tasks=_tasks(lines),
    )  # fmt: skip


def _powers(k: int) -> list[int]:
    """1, 2, 4, ... and k itself."""
    return sorted({*(2**n for n in range(k.bit_length()) if 2**n <= k), *([k] if k else [])})


def _all_or_nothing(graded: Sequence[Graded]) -> bool:
    """Whether "right" means anything: scores like F1 are seldom 1."""
    return all(one.score in (0, 1) for one in graded)


def _tasks(lines: Sequence[RequestLine]) -> dict[str, Slice]:
    """The score of each task, where there are tasks."""
    tasks = sorted({line.graded.task for line in lines if line.graded is not None and line.graded.task is not None})
    return {task: _slice([line for line in lines if line.graded and line.graded.task == task]) for task in tasks}


def _slice(lines: Sequence[RequestLine]) -> Slice:
    samples = by_item(lines)
    low, high = interval(samples) or (None, None)
    return Slice(items=len(samples), score=average(samples), low=low, high=high)
