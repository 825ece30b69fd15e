"""How do LongBench's authors score a task? F1 of words, rouge-L, classes, paragraph numbers, counts, similar code.

Source: `metrics.py` and `eval.py` of THUDM/LongBench; every metric gives their number, but for texts on which their
rouge-L exceeds Python's recursion limit and so counts 0. The score of an item is the best over its references.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TypeAlias

from experiments.benchmarks.item import Item

from .scorer import Scorer

Metric: TypeAlias = Callable[[str, str, Sequence[str]], float]  # prediction, reference, classes of the task
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # few-shot tasks: what follows the line is another made-up example


def qa_f1(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words, as counts, without case, punctuation and articles."""
    said, wanted = _words(prediction), _words(reference)
    same = sum((Counter(said) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def rouge_l(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F of the union longest common subsequence over sentences, which end at every full stop.

    Words count once, as in the `rouge` package: its precision and recall are over distinct words.
    """
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    union = {word for ref in wanted for hyp in said for word in _common(ref, hyp)}
    precision = len(union) / len({word for sentence in said for word in sentence})
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(x: list[str], y: list[str]) -> list[str]:
    """A longest common subsequence; of several the one that the `rouge` package walks back to."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        row, above = [0], table[-1]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    i, j, found = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.append(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / classes named in the text if the right one is among them; a class that is part of the right one is not."""
    named = [name for name in classes if name in prediction]
    for name in named:  # it skips the entry behind one that it removes, as the authors' loop does
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the text that are the right one."""
    found = re.findall(r"\d+", prediction)
    return found.count(reference) / len(found) if found else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The same for the number of the right paragraph, which the reference names."""
    (number, *_) = re.findall(r"(?:Paragraph |段落)(\d+)", reference)
    return count(prediction, number)


def code_similarity(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of characters, in steps of 0.01, of the first line that is neither a comment nor a fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return float(line == reference)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


METRICS: dict[str, Metric] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("trec", "lsht"), classification),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), retrieval),
    "passage_count": count,
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
}


@dataclass(frozen=True)
class LongBench(Scorer):
    """The metric of each item's task. A cut text is scored as it is: the authors' own token limits cut most."""

    def judges(self, item: Item) -> bool:
        """Not the tasks that are scored by Chinese words, which need a segmenter, nor classes that are not known."""
        metric = METRICS.get(item.task or "")
        return super().judges(item) and metric is not None and (metric is not classification or bool(item.classes))

    def find(self, text: str, task: str | None, cut: bool) -> str | None:
        if task in FIRST_LINE:
            text = text.lstrip("\n").split("\n")[0]
        return text if text.strip() else None

    def score(self, found: str, item: Item) -> float:
        assert item.task is not None
        return max((METRICS[item.task](found, each, item.classes) for each in references(item)), default=0.0)


def references(item: Item) -> list[str]:
    """The accepted answers: a JSON list, or one answer as plain text."""
    try:
        content = json.loads(str(item.answer))
    except json.JSONDecodeError:
        content = None
    return [str(each) for each in content] if isinstance(content, list) else [str(item.answer)]
