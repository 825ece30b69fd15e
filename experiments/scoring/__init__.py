"""Is an answer right? One scorer a kind of answer; which of them judges a benchmark is said in conf/benchmark."""

from .answers import Choice, Integer, Maths
from .longbench import LongBench
from .program import Program
from .scorer import Scorer, Verdict, judge

__all__ = ["Choice", "Integer", "LongBench", "Maths", "Program", "Scorer", "Verdict", "judge"]
