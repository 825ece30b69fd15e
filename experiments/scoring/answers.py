r"""Which number, formula or letter does a text give as its answer? Boxes first, then sentences, then the last one.

The *last* statement of a kind counts: models correct themselves. An answer that a text states (`\boxed{}`, "the answer
is") also counts where the text was cut behind it; a bare last number or letter does not.
"""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from experiments.benchmarks.item import Item

from .scorer import Scorer

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Thousands commas (LaTeX's `{,}` and `\!` are taken out before), decimals; a minus counts where no number precedes it.
_NUMBER = r"(?:(?<![\w.)}])-\s*)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_STATED = re.compile(r"\banswer\s*(?:is|:|=)[\s:*$\\(=]*(" + _NUMBER + r")(?=\D)", re.IGNORECASE)
_UNIT = re.compile(r"\\(?:text|mathrm)\s*\{[^{}]*\}\s*(?:\^\s*\{?\d\}?)?")
_DIGITS = 25  # of a number: a text that repeats a digit for ever has no answer
_TAIL = 4000  # characters at the end of a text without a box that are searched for a formula


def boxes(text: str) -> Iterator[str]:
    r"""Contents of every `\boxed{...}` that is closed, in order, inner braces balanced."""
    for match in _BOX.finditer(text):
        depth, start = 1, match.end()
        for at in range(start, len(text)):
            escaped = text[at - 1] == "\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                yield text[start:at].strip()
                break


def numbers(text: str) -> list[str]:
    """Every number, without thousands separators and spaces."""
    bare = text.replace("{,}", ",").replace(r"\!", "").replace(r"\,", "")
    return [re.sub(r"[,\s]", "", found) for found in re.findall(_NUMBER, bare)]


@dataclass(frozen=True)
class Integer(Scorer):
    r"""A whole number of low to high (AIME: 0 to 999), None = any.

    The last `\boxed{}` that holds a number; else the last "answer is"; else the last number of a text that was not cut.
    """

    low: int | None = None
    high: int | None = None

    def find(self, text: str, task: str | None, cut: bool) -> str | None:
        boxed = [box for box in boxes(text) if re.search(r"\d", box)]
        if boxed:
            return boxed[-1]
        stated = _STATED.findall(text + ("" if cut else " "))
        if stated:
            return numbers(stated[-1])[-1]
        last = [] if cut else numbers(text)
        return last[-1] if last else None

    def judges(self, item: Item) -> bool:
        """Those whose reference is one whole number in the bounds."""
        return item.answer is not None and self._only(item.answer) is not None

    def score(self, found: str, item: Item) -> float:
        """1 or 0. A box with several numbers (a fraction, a point) is an answer, but not a whole number."""
        return float(self._only(found.split("=")[-1]) == self._only(str(item.answer)))

    def _only(self, text: str) -> int | None:
        """The number in a text, where it holds one, and a whole one in the bounds: 042 and 42.0 are 42."""
        each = numbers(_UNIT.sub("", text))
        value = Decimal(each[0]) if len(each) == 1 and len(each[0]) <= _DIGITS else None
        if value is None or value != value.to_integral_value():
            return None
        outside = (self.low is not None and value < self.low) or (self.high is not None and value > self.high)
        return None if outside else int(value)


@dataclass(frozen=True)
class Maths(Scorer):
    r"""A formula, compared by value: `\boxed{}`, else what math-verify finds in a text that was not cut."""

    def find(self, text: str, task: str | None, cut: bool) -> str | None:
        boxed = [box for box in boxes(text) if box]
        if boxed:
            return boxed[-1]
        from math_verify import parse  # here: its import takes a second

        found = [] if cut else parse(text[-_TAIL:], parsing_timeout=_seconds())
        return str(found[-1]) if found else None

    def score(self, found: str, item: Item) -> float:
        """1 or 0. The same characters are right also where math-verify reads no formula (a name, an interval)."""
        if _plain(found) == _plain(str(item.answer)):
            return 1.0
        from math_verify import parse, verify  # here: its import takes a second

        gold, target = (parse(f"${text}$", parsing_timeout=_seconds()) for text in (str(item.answer), found))
        return float(bool(gold and target) and verify(gold, target, timeout_seconds=_seconds()))


def _seconds() -> int | None:
    """math-verify keeps its time limit by a signal, which only the main thread may ask for."""
    return 5 if threading.current_thread() is threading.main_thread() else None


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"\\left|\\right|\\[!,;: ]|[\s$]", "", text).rstrip(".")


@dataclass(frozen=True)
class Choice(Scorer):
    r"""A letter of `letters`: "The correct answer is (B)" and its variants, `\boxed{B}`, "Answer: B".

    Else, in a text that was not cut, a last line that is a letter alone or begins with one: "B", "(B) because".
    Source of the first form: LongBench-v2, which asks for it; of the third: GPQA as simple-evals asks it.
    """

    letters: str = "ABCD"

    def find(self, text: str, task: str | None, cut: bool) -> str | None:
        text = re.sub(r"[*_`$]|\\text(?:bf)?|\\mathbf|\\mathrm", "", text)
        letter = f"([{self.letters}])"
        # "A" is also an article: "the answer is a matter of" names no letter, "the answer is A because" does.
        bare = rf"{letter}(?![\w'])(?!\s+(?!because|since|as\b|and\b|with\b|for\b)[a-z])"
        given = rf"(?:\(\s*{letter}\s*\)|\{{+\s*\(?{letter}\)?\s*\}}|{bare})"
        lead = r"(?i:\banswer(?:\s+is)?|\bcorrect\s+(?:choice|option)\s+is|\\boxed)\s*[:=]?\s*"
        found = re.findall(lead + r"(?i:(?:option|choice)\s+)?(?:\\boxed\s*)?" + given, text)
        if not found and not cut:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            found = re.findall(rf"\A(?:\({letter}\)|{letter}(?:[.):]|$))", lines[-1]) if lines else []
        return "".join(found[-1]) if found else None

    def judges(self, item: Item) -> bool:
        """Those whose reference is one of the letters, with or without brackets."""
        return item.answer is not None and _letter(item.answer) in set(self.letters)

    def score(self, found: str, item: Item) -> float:
        """1 or 0."""
        return float(found == _letter(str(item.answer)))


def _letter(reference: str) -> str:
    return reference.strip("() .")
