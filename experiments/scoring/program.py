"""Does a program pass its tests? A command of the reader's own says so; nothing that a model wrote runs without one."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.benchmarks.item import Item

from .scorer import Scorer

_FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Program(Scorer):
    """Hands the last closed code block of a text to `command`, as JSON {id, code, answer} on its standard input.

    Exit code 0 is right, 1 is wrong; running longer than timeout_s is wrong too. Isolation is the command's business.
    Raises ValueError for a command that is not there.
    """

    command: Sequence[str]
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command or self.timeout_s <= 0:
            raise ValueError("scoring.command is a list of words, e.g. [python, judge.py], timeout_s above 0")
        if shutil.which(self.command[0]) is None:
            raise ValueError(f"scoring.command: there is no {self.command[0]} to run; give the path of a program")

    def judges(self, item: Item) -> bool:
        """Any: the command may know the tests of an item by its id."""
        return True

    def find(self, text: str, task: str | None, cut: bool) -> str | None:
        blocks = _FENCE.findall(text)
        return blocks[-1] if blocks else None

    def score(self, found: str, item: Item) -> float:
        """1 or 0. Raises ValueError where the command leaves with another exit code."""
        asked = json.dumps({"id": item.id, "code": found, "answer": item.answer})
        try:
            done = subprocess.run([*self.command], input=asked, capture_output=True, text=True, timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            return 0.0
        if done.returncode not in (0, 1):
            raise ValueError(f"scoring.command left with {done.returncode} for {item.id}: {done.stderr.strip()[-300:]}")
        return float(done.returncode == 0)
