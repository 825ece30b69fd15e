"""Does the plan know what a run takes? Against the tensors of an engine, and the batches that fit."""

from dataclasses import fields
from typing import Any

import pytest
from methods import EVERY_METHOD, METHODS, WARM, prompts, requests
from test_shapes import configs
from tiny import tiny_model, tiny_spec
from torch import Tensor

from aspire.engine import Engine
from aspire.memory import MemoryPlan, Work, max_fit, plan_memory, pool_pages, state_bytes
from aspire.policies import Method
from aspire.prefill import prefill
from aspire.settings import EngineSettings
from aspire.verify import Verification
from experiments.layout import lay_out, make_method, resolve
from experiments.loading import unload
from experiments.session import open_session

REJECT = Verification("rejection")


@pytest.mark.parametrize(**EVERY_METHOD)
def test_the_state_of_a_running_engine_has_the_bytes_planned(method: Method) -> None:
    """Every tensor of `SlotState` on a CPU, sizes that are no multiples of anything; draft distributions included."""
    model, settings = tiny_model(layers=3), EngineSettings(slots=3, max_len=77, page_size=4)
    engine = Engine(model, settings, method, REJECT)
    for request in requests(prompts(3), WARM, new=5):
        engine.submit(request)
    engine.fill_slots()
    held = [getattr(engine.state, f.name) for f in fields(engine.state)]
    measured = sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor))
    planned = state_bytes(model.spec, settings, method, 3, REJECT, WARM.top_k)
    assert planned.total() == measured
    drafts = engine.state.q_ids.numel() * 8 + engine.state.q_probs.numel() * 4
    assert planned["draft distributions"] == drafts
    selection = (engine.state.blocks.numel() + engine.state.block_count.numel()) * 8
    assert planned["selections"] == selection


def test_weights_pool_and_prompts_have_the_bytes_planned() -> None:
    """Tied and untied heads; what a `Prompt` keeps; a pool made for the plan's pages."""
    for tied in (True, False):
        model = tiny_model(tied=tied)
        settings = EngineSettings(slots=2, max_len=60, page_size=4)
        work = Work((17, 41), 19, 1)
        plan = plan_memory(model.spec, settings, [(METHODS[3], 2)], REJECT, work)
        assert plan.parts["weights"] == sum(p.numel() * p.element_size() for p in model.parameters())
        pages = pool_pages(4, work.prompt_tokens, 2, 19, 6)
        engine = Engine(model, EngineSettings(slots=2, max_len=60, page_size=4, pages=pages), METHODS[3])
        assert plan.parts["KV pool"] == engine.pool.bytes
        kept = [prefill(model, engine.pool, list(range(n)), 16) for n in work.prompt_tokens]
        held = sum(x.numel() * x.element_size() for p in kept for x in (p.queries, p.logits))
        assert plan.parts["prompts' queries, logits"] == held


def test_a_pool_as_planned_holds_every_slot_to_its_last_token() -> None:
    """Prompts shared, their last page copied, drafts past the answer's end: nobody is preempted, no page is missing."""
    model, method = tiny_model(), METHODS[7]
    for length in (16, 17, 31, 32):  # a full last page and a partial one
        ids = prompts(4, shortest=length, longest=length)
        pages = pool_pages(16, [length] * 4, 4, 33, method.speculation.longest)
        engine = Engine(model, EngineSettings(slots=4, max_len=length + 33, pages=pages), method, REJECT)
        kept = [prefill(model, engine.pool, x, 16) for x in ids]
        for request, prompt in zip(requests(ids, WARM, new=33), kept, strict=True):
            engine.submit(request, prompt)
        while engine.busy:
            engine.step()
        assert engine.preemptions == 0


def plan_of(batch: int, **kw: Any) -> MemoryPlan:
    spec = tiny_spec(max_len=100_000)
    settings = EngineSettings(slots=batch, max_len=1100, page_size=16)
    sized = [(method, batch) for method in kw.get("methods", METHODS)]
    return plan_memory(spec, settings, sized, REJECT, Work((1000,) * batch, 100, 20))


def test_max_fit_is_the_last_batch_that_fits_and_grows_with_memory() -> None:
    previous = -1
    for mib in (1, 8, 64, 300, 1000):
        fits = max_fit(plan_of, mib * 2**20, most=500)
        assert fits >= previous
        assert fits == 0 or plan_of(fits).total <= 0.95 * mib * 2**20
        assert fits == 500 or plan_of(fits + 1).total > 0.95 * mib * 2**20
        previous = fits
    totals = [plan_of(batch).total for batch in range(1, 40)]
    assert totals == sorted(totals)


def test_engines_side_by_side_add_up_but_share_weights_and_pool() -> None:
    together, alone = plan_of(4, methods=METHODS[:2]), [plan_of(4, methods=[m]) for m in METHODS[:2]]
    assert together.parts["weights"] == alone[0].parts["weights"]
    assert together.parts["KV pool"] == max(p.parts["KV pool"] for p in alone)
    assert together.parts["logits"] == sum(p.parts["logits"] for p in alone)


def test_a_plan_that_does_not_fit_names_parts_and_fix() -> None:
    plan = plan_of(64)
    plan.refuse_beyond(plan.total, "lower batch")
    with pytest.raises(ValueError, match=r"needs .* GiB, .* are available \(.*KV pool .*\); lower batch"):
        plan.refuse_beyond(plan.total - 1, "lower batch")
    assert plan.table()[-1].startswith("total") and any("KV pool" in line for line in plan.table())


def test_what_does_not_fit_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.layout.free_bytes", lambda device: 2**16)
    monkeypatch.setattr("experiments.session.load_model", lambda config: pytest.fail("the model was loaded"))
    (config,) = configs(tmp_path, ["vegas"])
    with pytest.raises(ValueError, match=r"GiB.*weights.*lower batch"):
        lay_out(resolve(config), [make_method(config)])
    (config,) = configs(tmp_path, ["vegas"], batch="max_fit")
    with pytest.raises(ValueError, match=r"GiB.*weights.*shorten the prompts"):
        lay_out(resolve(config), [make_method(config)])


@pytest.mark.parametrize("mode", ["equal", "max_fit"])
def test_max_fit_batches_fill_the_memory_given(mode: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal: one number for all; max_fit: each its own, at least as large; prompts as many as the largest batch."""
    unload()  # another test's model would count as memory to be had
    monkeypatch.setattr("experiments.layout.free_bytes", lambda device: 40 * 2**20)
    words = {"batch": "max_fit", "comparison__batch_mode": mode}
    made = [resolve(c) for c in configs(tmp_path, ["autoregressive", "sparsespec"], **words)]
    layout = lay_out(made[0], [make_method(c) for c in made])
    assert layout.mode == mode and 0.9 * 40 * 2**20 < layout.plan.total <= 0.95 * 40 * 2**20
    assert len(layout.items) == max(layout.batches) == layout.config["batch"] == layout.settings.slots
    assert layout.batches[0] == layout.batches[1] if mode == "equal" else layout.batches[0] > layout.batches[1]
    session = open_session(layout)
    assert session.pool.bytes == layout.plan.parts["KV pool"]
