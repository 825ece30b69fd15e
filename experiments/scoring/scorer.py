"""What is a scorer, and what becomes of a text without an answer? Unfinished, unparsable and wrong are kept apart."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from experiments.benchmarks.item import Item

Outcome = Literal["answered", "unfinished", "unparsable"]
OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Verdict:
    """score: 0 to 1, and 0 where there is no answer. found: the answer as it was read, None where there is none."""

    outcome: Outcome
    score: float
    found: str | None


class Scorer(ABC):
    """Reads an answer and compares it with the reference. A subclass is a frozen dataclass, named in conf/benchmark."""

    @abstractmethod
    def find(self, text: str, task: str | None, cut: bool) -> str | None:
        """The answer in a text, thinking removed; None if there is none.

        cut: the text ended at its token limit, so that its last number need not be its answer: only an answer that
        says that it is one counts.
        """

    @abstractmethod
    def score(self, found: str, item: Item) -> float:
        """0 to 1: how right an answer is."""

    def judges(self, item: Item) -> bool:
        """Whether an item has what this scorer needs; others stay without a score, and are counted."""
        return item.answer is not None


def answer_of(text: str, thinking: bool) -> str | None:
    """What follows the last thinking block; None if a block is still open.

    thinking: the prompt itself opened a block, as some chat templates do, so that the text begins inside it.
    """
    _, closed, rest = text.rpartition(CLOSE)
    if closed:
        return None if OPEN in rest else rest
    return None if thinking or OPEN in text else text


def judge(scorer: Scorer, item: Item, text: str, cut: bool, thinking: bool = False) -> Verdict:
    """The verdict on one text. cut: it ended at its token limit; thinking: its prompt opened a thinking block.

    A text cut inside its thinking has no answer, whatever it says there.
    """
    answer = answer_of(text, thinking)
    found = None if answer is None else scorer.find(answer, item.task, cut)
    if found is None:
        return Verdict("unfinished" if cut else "unparsable", 0.0, None)
    return Verdict("answered", float(scorer.score(found, item)), found)
