"""Which methods does every generic test run, and on what? One table of all nine, with budgets for tiny contexts.

A list of requests is made from a seed; `run` decodes it through a poisoned, shuffled pool, with a model that refuses to
hand out a NaN: so every test that runs a method also shows that no stale entry was read.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from tiny import tiny_model
from torch import Tensor

from aspire.engine import Engine
from aspire.kernels.noise import uniform
from aspire.model.decoder import Decoder
from aspire.policies import (
    ClosedForm,
    CostModel,
    Everything,
    Fixed,
    Method,
    Probe,
    Refresh,
    Speculation,
    Stepped,
    TopBlocks,
)
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.state import SlotState
from baselines.magicdec import SnapKV, Window
from baselines.sparsespec import Staggered

COST = CostModel(model=1.0, mlp=0.02, attn=0.002, layers=2, dense_layers=1)
ALWAYS = Refresh(on=("prefill", "draft", "verify"))
ASPIRE = Method(
    "aspire",
    TopBlocks(Probe("first_last", (-2,), "max"), block=3, ratio=0.1, floor=12, recent=3),  # a block is no page
    ClosedForm(longest=8, cost=COST),
    replace(ALWAYS, dense=(-2,)),
)
VEGAS = Method(
    "vegas",
    TopBlocks(
        Probe("first_last", None, "mean"), block=1, scope="layer", ratio=0.1, floor=8, recent=0, tail_in_budget=False
    ),
    Fixed(6),
)
METHODS = (
    Method(),
    Method("magicdec_stream", Window(ratio=0.1, floor=8, sinks=2), Fixed(4), ALWAYS),
    Method("magicdec_snapkv", SnapKV(ratio=0.1, floor=8, window=4, kernel=3), Fixed(4), Refresh(on=("prefill",))),
    VEGAS,
    Method(
        "sparsespec",
        TopBlocks(Probe("all", None, "group_mean"), block=1, scope="kv_head", ratio=0.1, floor=8, recent=0),
        Staggered(8),
        Refresh(on=("verify",)),
    ),
    replace(ASPIRE, name="aspire_fixed", speculation=Fixed(5)),
    replace(ASPIRE, name="aspire_fsm", speculation=Stepped(longest=16)),
    ASPIRE,
    replace(VEGAS, name="vegas_async", speculation=ClosedForm(longest=8, cost=replace(COST, dense_layers=0))),
)
SPECULATIVE = METHODS[1:]
IDENTITY = Method("identity", Everything(), Fixed(4))  # drafts as well as the target
MODELS: dict[str, dict[str, Any]] = {"llama": {"vocab": 97, "seed": 2}, "qwen3": {"layers": 3, "vocab": 509, "seed": 5}}
WARM = Sampling(temperature=0.7, top_k=20, top_p=0.9)
EVERY_METHOD: dict[str, Any] = {"argnames": "method", "argvalues": METHODS, "ids": attrgetter("name")}
EVERY_SPECULATIVE: dict[str, Any] = {**EVERY_METHOD, "argvalues": SPECULATIVE}


@dataclass(frozen=True)
class AtRandom(Speculation):
    """Verifies at pseudo-random times that depend on the request and its round alone, not on its slot."""

    longest: int = 7
    chance: float = 0.25
    salt: int = 0

    def wants_verify(self, state: SlotState) -> Tensor:
        return uniform(state.seed + self.salt, state.rounds, 9, state.drafted[:, None])[:, 0] < self.chance


class Finite:
    """A model that fails at the first logit that is not finite."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.spec, self.embed = model, model.spec, model.embed

    def __call__(self, *args: Any) -> Tensor:
        return self.model(*args)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        assert logits.isfinite().all(), "NaN reached a logit"
        return logits


def model_of(kind: str, cache: dict[str, Decoder] = {}) -> Decoder:  # noqa: B006
    """The tiny model of that kind, made once."""
    if kind not in cache:
        cache[kind] = tiny_model(kind, **MODELS[kind])
    return cache[kind]


def prompts(count: int, vocab: int = 97, shortest: int = 3, longest: int = 45, seed: int = 0) -> list[list[int]]:
    """Ragged random prompts."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def requests(prompt_list: list[list[int]], sampling: Sampling | None = None, new: int = 24, **kw: Any) -> list[Request]:
    """One request a prompt, each with its own seed."""
    sampling = sampling or Sampling()
    return [Request(f"r{i}", list(p), replace(sampling, seed=100 + i), new, **kw) for i, p in enumerate(prompt_list)]


def engine_for(kind: str, method: Method, slots: int, **kw: Any) -> Engine:
    """An engine over a poisoned pool whose pages come in random order; kw: fields of EngineSettings, or of Engine."""
    of_engine = {name: kw.pop(name) for name in ("verification", "pool") if name in kw}
    settings = {"max_len": 160, "page_size": 4, "prefill_chunk": 16, "poison": True, **kw}
    engine = Engine(Finite(model_of(kind)), EngineSettings(slots=slots, **settings), method, **of_engine)  # type: ignore
    order = list(range(engine.pool.allocator.free_pages))
    random.Random(slots).shuffle(order)
    engine.pool.allocator.shuffle(order)
    return engine


def run(kind: str, method: Method, batch: list[Request], slots: int | None = None, **kw: Any) -> list[Request]:
    """Decode the requests; every page must come back."""
    engine = engine_for(kind, method, slots or len(batch), **kw)
    free = engine.pool.allocator.free_pages
    engine.generate(batch)
    assert engine.pool.allocator.free_pages == free
    return batch


def ids(batch: list[Request]) -> list[list[int]]:
    return [r.output_ids for r in batch]


def solo(kind: str, method: Method, make: Callable[[], list[Request]]) -> list[Request]:
    """The same requests, each alone."""
    return [run(kind, method, [request])[0] for request in make()]


def step_through(engine: Engine, batch: list[Request], after: Callable[[int], None]) -> None:
    """Run the requests, calling `after(number of the step)` after each step."""
    for request in batch:
        engine.submit(request)
    number = 0
    while engine.busy:
        engine.step()
        number += 1
        after(number)


def by_position(batch: list[Request], longest: int) -> list[tuple[int, int]]:
    """(rounds that drafted at least j, of these accepted at j) for j = 1 .. longest."""
    rounds = torch.tensor([pair for r in batch for pair in r.rounds])
    return [(int((rounds[:, 0] >= j).sum()), int((rounds[:, 1] >= j).sum())) for j in range(1, longest + 1)]
