"""Does a pass change what it must and nothing else, however it is padded, and through kernels as through their twins?

A GPU launches passes of few shapes, so most carry padding, and captures them with all slots masked.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import pytest
import torch
from methods import ASPIRE, EVERY_METHOD, METHODS, WARM, AtRandom, engine_for, model_of, prompts, requests, step_through
from torch import Tensor

import aspire.attention
import aspire.kernels.filter
from aspire.engine import Engine
from aspire.graphs import masked
from aspire.kernels.jit import triton
from aspire.policies import Method, Speculation
from aspire.settings import EngineSettings
from aspire.state import SlotState
from aspire.step import Ahead, Shape, StepOutput, Stepper
from aspire.verify import Verification

NAN = float("nan")
# The products with the weights are computed otherwise for another number of rows: values of up to about 4, in fp32.
NEAR = {"rtol": 1e-5, "atol": 2e-5, "equal_nan": True}
MODES = {"coupled": Verification(), "rejection": Verification("rejection")}
pytestmark = pytest.mark.usefixtures("poisoned")


def before_each_pass(
    method: Method, how: Verification, new: int = 6, invariant: bool = False
) -> Iterator[tuple[Engine, Ahead]]:
    """An engine with three requests in four slots, before each of its passes; slot 1 falls empty first."""
    settings = EngineSettings(slots=4, max_len=96, page_size=4, prefill_chunk=16, poison=True, invariant=invariant)
    engine = Engine(model_of("llama"), settings, method, how)
    batch = requests(prompts(3, seed=3), WARM, new)
    batch[1].max_new_tokens = 3
    for request in batch:
        engine.submit(request)
    engine.fill_slots()
    while any(engine.seats):
        engine._reserve()
        yield engine, engine.stepper.look(engine.state)
        engine.step()


def tried(stepper: Stepper, state: SlotState, shape: Shape) -> tuple[SlotState, Tensor, Tensor, StepOutput]:
    """State, pool and report after a pass that is then undone."""
    state, before = copy.deepcopy(state), (stepper.pool.k.clone(), stepper.pool.v.clone())
    report = stepper.step(state, shape)
    after = stepper.pool.k.clone(), stepper.pool.v.clone()
    stepper.pool.k.copy_(before[0])
    stepper.pool.v.copy_(before[1])
    return state, *after, StepOutput.read(report.numpy())


def assert_same(one: SlotState, two: SlotState, exact: bool = False) -> None:
    """Equal states; where not exact, probabilities near, and of the selections what counts."""
    for f in fields(SlotState):
        ours, theirs = getattr(one, f.name), getattr(two, f.name)
        if f.name == "q_probs" and not exact:
            torch.testing.assert_close(ours, theirs, **NEAR)
        elif f.name == "blocks" and not exact:  # past the counts may stand anything
            listed = torch.arange(ours.shape[2]) < one.block_count[..., None]
            assert torch.equal(ours * listed, theirs * listed), f.name
        elif isinstance(ours, Tensor):
            assert torch.equal(ours, theirs), f.name
        else:
            assert ours == theirs, f.name


def assert_like(one: tuple, two: tuple) -> None:
    """Two results of `tried`."""
    assert_same(one[0], two[0])
    for ours, theirs in zip(one[1:3], two[1:3]):
        torch.testing.assert_close(ours, theirs, **NEAR)
    assert one[3] == two[3]


# -- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(**EVERY_METHOD)
def test_padding_leaves_no_trace(method: Method, mode: str) -> None:
    """Tokens past those the rows feed and a looser bound on the widths: state, pool and report as without."""
    kinds = set()
    for engine, ahead in before_each_pass(method, MODES[mode]):
        shape, state, stepper = ahead.shape, engine.state, engine.stepper
        plain = tried(stepper, state, shape)
        assert plain[3].slots == state.active.nonzero()[:, 0].tolist()
        widest = shape.widest if shape.kind == "draft" else engine.longest + 1
        for padded in (Shape(shape.kind, shape.tokens + 5, widest), stepper.padded(shape, 4)):
            assert padded.tokens >= shape.tokens and padded.widest >= shape.widest
            assert_like(tried(stepper, state, padded), plain)
        # a mixed pass is right whatever the rows are
        assert_like(tried(stepper, state, Shape("mixed", shape.tokens, shape.widest)), plain)
        kinds.add(shape.kind)
    assert kinds >= ({"verify"} if not method.speculation.longest else {"draft", "verify"}) or "mixed" in kinds


def test_padding_is_stored_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above would notice: padding that is stored at its position, 0 of some row, changes the pool."""
    import aspire.attention as attention

    healthy: Callable = attention.feed

    def careless(*args: object) -> object:
        fed = healthy(*args)
        fed.entries.clamp_(min=0)
        return fed

    monkeypatch.setattr(attention, "feed", careless)
    engine, ahead = next(before_each_pass(ASPIRE, MODES["coupled"]))
    plain, padded = (tried(engine.stepper, engine.state, Shape("draft", ahead.tokens + n, 1)) for n in (0, 1))
    with pytest.raises(AssertionError):
        assert_like(padded, plain)


# -- masked slots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(**EVERY_METHOD)
def test_a_pass_with_all_slots_masked_changes_nothing(method: Method, mode: str) -> None:
    """What a capture relies on: its passes run while requests sit in the slots, drafts and selections included."""
    for number, (engine, _) in enumerate(before_each_pass(method, MODES[mode])):
        if number % 3:
            continue
        state, pool = engine.state, engine.pool
        before, k, v = copy.deepcopy(state), pool.k.clone(), pool.v.clone()
        for kind in ("draft", "verify", "mixed"):
            widest = 1 if kind == "draft" else engine.longest + 1
            for shape in (Shape(kind, 4, widest), Shape(kind, 4 * widest + 3, widest)):
                with masked(state.active, state.verify):
                    assert not state.active.any() and not state.verify.any()
                    out = StepOutput.read(engine.stepper.step(state, shape).numpy())
                assert out.slots == [] and out.kv_tokens == 0
        assert before.active.any()
        assert_same(state, before, exact=True)
        for cache, was in ((pool.k, k), (pool.v, v)):
            assert torch.equal(cache.isnan(), was.isnan()) and torch.equal(cache.nan_to_num(), was.nan_to_num())


def test_masked_gives_back_what_was_there_after_an_error() -> None:
    flag, other = torch.tensor([True, False]), torch.tensor([True])
    with pytest.raises(KeyError), masked(flag, other):
        assert not flag.any() and not other.any()
        raise KeyError
    assert flag.tolist() == [True, False] and other.tolist() == [True]


# -- kernels --------------------------------------------------------------------------------------------------------

BY_NAME = {m.name: m for m in METHODS}
# a set a request, a layer, a KV head; a window, of which nothing is probed; no drafts at all
THROUGH_KERNELS = [  # method, mode, invariant rows
    ("aspire", "rejection", False), ("vegas", "coupled", False), ("sparsespec", "rejection", False),
    ("magicdec_stream", "coupled", False), ("autoregressive", "coupled", False), ("aspire", "coupled", True),
    ("sparsespec", "coupled", True), ("autoregressive", "coupled", True),
]  # fmt: skip


@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("name", "mode", "invariant"), THROUGH_KERNELS)
def test_a_pass_through_the_kernels_is_that_of_the_twins(
    name: str, mode: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass of each kind, as a GPU would launch it: the kernels of a step, with the glue between them.

    Only the filter of the logits stays with its twin: interpreted it takes half a second a row.
    """
    method = BY_NAME[name]
    if method.speculation.longest:
        method = replace(method, speculation=AtRandom(longest=4, salt=1))
    modules = [m for at, m in sys.modules.items() if at.startswith("aspire.") and hasattr(m, "wanted")]
    modules.remove(aspire.kernels.filter)
    left = dict.fromkeys(("draft", "verify", "mixed") if method.speculation.longest else ("verify",), 1)
    for engine, ahead in before_each_pass(method, MODES[mode], 10, invariant):
        shape, stepper = ahead.shape, engine.stepper
        if not left[shape.kind]:
            continue
        left[shape.kind] = 0
        plain = tried(stepper, engine.state, shape)
        with monkeypatch.context() as patch:
            for module in modules:
                patch.setattr(module, "wanted", lambda tensor: True)
            for wide in (32, 8) if shape.kind == "mixed" else (32,):  # 8: verify and draft rows have calls of their own
                patch.setattr(aspire.attention, "WIDE_TILE", wide)
                assert_like(tried(stepper, engine.state, stepper.padded(shape, 4)), plain)
    print(left, engine.stepper)
    assert not any(left.values()), left


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_shape_is_foreseen(method: Method) -> None:
    """Whatever slots hold and draft, the pass is launched in one of the shapes that were captured beforehand."""
    slots, longest = 5, method.speculation.longest
    stepper = Stepper(model_of("llama"), None, method, Verification("coupled"), 1)  # type: ignore[arg-type]
    known, rng = set(stepper.shapes(slots)), random.Random(0)
    for _ in range(300):
        active = rng.randint(1, slots)
        if method.speculation.lockstep:
            all_draft = longest > 0 and rng.random() < 0.5
            verifying, widths = (0, [1] * active) if all_draft else (active, [longest + 1] * active)
        else:
            verifying = rng.randint(0, active) if longest else active
            widths = [rng.randint(1, longest + 1) for _ in range(verifying)] + [1] * (active - verifying)
        ahead = Ahead(sum(widths), max(widths), verifying, active)
        assert stepper.padded(ahead.shape, slots) in known, ahead


@dataclass(frozen=True)
class UntilOdd(Speculation):
    """Verifies once the newest draft is an odd token: a decision about the tokens of the very pass it follows."""

    longest: int = 6
    reads_drafts: bool = True

    def wants_verify(self, state: SlotState) -> Tensor:
        newest = state.draft_tokens.gather(1, (state.drafted - 1).clamp(min=0)[:, None])[:, 0]
        return (state.drafted > 0) & (newest % 2 == 1)


def test_a_policy_that_reads_drafts_sees_the_newest() -> None:
    """Every round ends with its first odd draft, or at the longest; the text is plain either way."""
    batch = requests(prompts(3, seed=5), new=40)
    engine, ended = engine_for("llama", replace(ASPIRE, speculation=UntilOdd()), 3), list[int]()

    def look(_: int) -> None:
        state = engine.state
        for slot in (state.active & state.verify & (state.room > 7)).nonzero()[:, 0].tolist():
            drafts = state.draft_tokens[slot, : state.drafted[slot]].tolist()
            ended.append(len(drafts))
            assert all(x % 2 == 0 for x in drafts[:-1]) and (drafts[-1] % 2 == 1 or len(drafts) == 6)

    step_through(engine, batch, look)
    assert len(set(ended)) > 1
