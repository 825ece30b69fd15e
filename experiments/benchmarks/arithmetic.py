"""Which short prompts have answers that are right by construction? Generated word problems with integer answers.

Each kind of problem draws its numbers first and derives text and answer from the same numbers, so the answer cannot
disagree with the text. The answers are asked for at length, so that a small model keeps generating.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .item import Item, encode_chat, request_seed, room_for_prompt

INSTRUCTION = (
    "Solve this problem step by step. Write every step at length: say what you compute, why, and what it gives. "
    "Check the result at the end. Finish with the sentence 'The answer is N.', where N is a whole number."
)

_NAMES = (
    "Ada", "Bruno", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mara", "Nils",
    "Oona", "Priya",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A word problem: kind names the template, steps counts the operations that lead to the answer."""

    kind: str
    steps: int
    text: str
    answer: int


@dataclass(frozen=True)
class Arithmetic:
    """`requests` different problems of min_steps to max_steps steps."""

    requests: int
    seed: int = 123
    min_steps: int = 2
    max_steps: int = 4

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be >= 1, got {self.requests}")
        if not self._kinds():
            raise ValueError(f"no problem has {self.min_steps} to {self.max_steps} steps: the templates have 2 to 4")

    def _kinds(self) -> list[tuple[int, Callable[..., tuple[str, int]]]]:
        return [(steps, kind) for steps, kind in _KINDS if self.min_steps <= steps <= self.max_steps]

    def problems(self) -> list[Problem]:
        """The problems, all different, the same for the same fields."""
        seen: dict[str, Problem] = {}
        for problem in self._draw():
            seen.setdefault(problem.text, problem)
            if len(seen) == self.requests:
                break
        return list(seen.values())

    def _draw(self) -> Iterator[Problem]:
        rng = random.Random(self.seed)
        kinds = self._kinds()
        while True:
            # Kinds take turns in a new order each time: eight requests should not be eight shopping trips.
            for steps, kind in rng.sample(kinds, len(kinds)):
                text, answer = kind(rng, *rng.sample(_NAMES, 2))
                yield Problem(kind.__name__.strip("_"), steps, text, answer)

    def build(self, tokenizer: PreTrainedTokenizerBase, context: int, max_new_tokens: int) -> list[Item]:
        """Raises ValueError if a prompt and its answer do not fit the context."""
        room = room_for_prompt(context, max_new_tokens)
        items = []
        for index, problem in enumerate(self.problems()):
            name = f"arithmetic/{index}-{problem.kind}"
            ids = encode_chat(tokenizer, f"{problem.text}\n\n{INSTRUCTION}")
            if len(ids) > room:
                raise ValueError(
                    f"{name} has {len(ids)} prompt tokens; with max_new_tokens {max_new_tokens} that is more than "
                    f"the context of {context}: lower max_new_tokens"
                )
            seed = request_seed(self.seed, name, 0)
            items.append(Item(f"{name}#0", tuple(ids), str(problem.answer), seed, False, len(ids)))
        return items


def _change(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    a, p, b, q = rng.randint(2, 9), rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 9)
    cost = a * p + b * q
    paid = (cost // 50 + 1) * 50
    return (
        f"{name} buys {a} notebooks at {p} dollars each and {b} pens at {q} dollars each, and pays with {paid} "
        f"dollars. How many dollars does {name} get back?",
        paid - cost,
    )


def _journey(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    h, v, k, w = rng.randint(2, 7), rng.randint(40, 95), rng.randint(2, 7), rng.randint(40, 95)
    return (
        f"{name} drives for {h} hours at {v} kilometres per hour and then for {k} hours at {w} kilometres per hour. "
        "How many kilometres is that altogether?",
        h * v + k * w,
    )


def _future_age(rng: random.Random, name: str, other: str) -> tuple[str, int]:
    age, times, years = rng.randint(4, 19), rng.randint(2, 4), rng.randint(3, 15)
    return (
        f"{name} is {age} years old, and {other} is {times} times as old. How old will {other} be in {years} years?",
        age * times + years,
    )


def _family_age(rng: random.Random, name: str, other: str) -> tuple[str, int]:
    age, more, times = rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 4)
    sibling = age + more
    return (
        f"{name} is {age} years old. {other} is {more} years older than {name}, and their mother is {times} times as "
        f"old as {other}. What is the sum of all three ages?",
        age + sibling + times * sibling,
    )


def _tank(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    start, out, minutes = rng.randint(20, 200), rng.randint(2, 9), rng.randint(5, 40)
    inflow = out + rng.randint(1, 12)
    return (
        f"A tank holds {start} litres of water. {name} opens a tap that adds {inflow} litres per minute while a leak "
        f"loses {out} litres per minute. How many litres are in the tank after {minutes} minutes?",
        start + (inflow - out) * minutes,
    )


def _sharing(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    friends, each, per_tray = rng.randint(3, 9), rng.randint(3, 15), rng.randint(6, 24)
    trays = friends * each // per_tray + 1  # the smallest number of trays that leaves something for the baker
    kept = trays * per_tray - friends * each
    return (
        f"{name} bakes {trays} trays of {per_tray} biscuits, keeps {kept} of them and shares the rest equally among "
        f"{friends} friends. How many biscuits does each friend get?",
        each,
    )


def _wages(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    hours, days, wage = rng.randint(4, 9), rng.randint(3, 6), rng.randint(11, 29)
    spent = rng.randint(20, hours * days * wage // 2)
    return (
        f"{name} works {hours} hours a day on {days} days and earns {wage} dollars per hour, then spends {spent} "
        "dollars. How many dollars are left?",
        hours * days * wage - spent,
    )


def _savings(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    start, weekly, weeks = rng.randint(15, 300), rng.randint(4, 45), rng.randint(4, 30)
    return (
        f"{name} has {start} dollars and saves {weekly} dollars every week. How many dollars does {name} have after "
        f"{weeks} weeks?",
        start + weekly * weeks,
    )


def _discount(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    price, percent, count = 20 * rng.randint(2, 15), 5 * rng.randint(1, 12), rng.randint(2, 6)
    return (
        f"A coat costs {price} dollars and is sold at {percent} percent off. {name} buys {count} of these coats. "
        "How many dollars does that cost?",
        (price - price * percent // 100) * count,  # exact: price is a multiple of 20 and percent of 5
    )


def _fence(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    length, width, gate, price = rng.randint(12, 60), rng.randint(5, 30), rng.randint(2, 5), rng.randint(6, 35)
    return (
        f"{name} fences a rectangular garden that is {length} metres long and {width} metres wide, and leaves "
        f"{gate} metres open for a gate. A metre of fence costs {price} dollars. How many dollars does the fence cost?",
        (2 * (length + width) - gate) * price,
    )


def _library(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    shelves, books, boxes, each = rng.randint(5, 30), rng.randint(12, 40), rng.randint(2, 9), rng.randint(5, 25)
    lent = rng.randint(10, shelves * books // 2)
    return (
        f"A library has {shelves} shelves with {books} books each. It lends out {lent} books, and {name} donates "
        f"{boxes} boxes with {each} books each. How many books are in the library now?",
        shelves * books - lent + boxes * each,
    )


def _machines(rng: random.Random, name: str, _: str) -> tuple[str, int]:
    slow, more, hours = rng.randint(8, 40), rng.randint(3, 25), rng.randint(3, 24)
    fast = slow + more
    return (
        f"{name} runs two machines at the same time. One makes {slow} parts per hour, the other {fast}. How many "
        f"hours do they need together for {(slow + fast) * hours} parts?",
        hours,
    )


# (operations that lead to the answer, template)
_KINDS: tuple[tuple[int, Callable[..., tuple[str, int]]], ...] = (
    (4, _change),
    (3, _journey),
    (2, _future_age),
    (4, _family_age),
    (3, _tank),
    (3, _sharing),
    (3, _wages),
    (2, _savings),
    (3, _discount),
    (4, _fence),
    (4, _library),
    (2, _machines),
)
