"""Are settings that cannot work refused, and methods that fit taken?"""

from dataclasses import replace
from typing import Any

import pytest

from aspire.policies import ClosedForm, CostModel, Fixed, Method, Probe, Refresh, TopBlocks
from baselines.magicdec import SnapKV, Window
from baselines.sparsespec import Staggered

ASPIRE = TopBlocks(Probe("first_last", (-2,), "max"))
VEGAS = TopBlocks(
    Probe("first_last", None, "mean"), block=1, scope="layer", floor=256, recent=0, tail_in_budget=False
)  # fmt: skip
SPARSESPEC = TopBlocks(Probe("all", None, "group_mean"), block=1, scope="kv_head", recent=0)
UNIT = CostModel(0, 0, 1)

REFUSED: dict[str, tuple[str, Any]] = {
    "refresh event": ("must be one of", lambda: Refresh(on=("prefil",))),
    "dense layer": ("does not exist", lambda: Refresh(dense=(4,)).dense_layers(4)),
    "dense layer from the end": ("does not exist", lambda: Refresh(dense=(-5,)).dense_layers(4)),
    "probe queries": ("first_last or all", lambda: Probe(queries="first")),
    "probe heads": ("must be one of", lambda: Probe(heads="sum")),
    "scope": ("scope must be", lambda: replace(ASPIRE, scope="head")),
    "ratio": ("out of range", lambda: replace(ASPIRE, ratio=1.01)),
    "block": ("out of range", lambda: replace(ASPIRE, block=0)),
    "recent past floor": ("exceed the floor", lambda: replace(ASPIRE, floor=127)),
    "kv_head without group_mean": ("group_mean", lambda: replace(VEGAS, scope="kv_head")),
    "group_mean without kv_head": ("group_mean", lambda: replace(SPARSESPEC, scope="layer")),
    "draft length": ("must be >= 0", lambda: Fixed(-1)),
    "stagger": ("must be >= 1", lambda: Staggered(0)),
    "omega": ("must be in", lambda: ClosedForm(omega=1.1)),
    "alpha_0": ("must be in", lambda: ClosedForm(alpha_0=-0.1)),
    "sinks": ("below the floor", lambda: Window(floor=16, sinks=16)),
    "window": ("between 1 and the floor", lambda: SnapKV(floor=32)),
    "kernel": ("must be odd", lambda: SnapKV(kernel=4)),
    "draft refresh from a sparse layer": (
        r"needs scores of layers \[2\]",
        lambda: Method("m", ASPIRE, Fixed(5), Refresh(("draft", "verify"), (-1,))).check(4),
    ),
    "one set from many layers": (
        "exactly one layer",
        lambda: Method("m", replace(VEGAS, scope="request"), Fixed(5), Refresh(("verify",))).check(4),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    """E05: a ValueError that names what is wrong."""
    message, build = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        build()


def test_methods_that_fit_are_taken() -> None:
    """Layers count from the end; config lists become tuples; only a closed form without costs needs calibration."""
    aspire = Method("aspire", ASPIRE, ClosedForm(), Refresh(["prefill", "draft", "verify"], [-2]))  # type: ignore[arg-type]
    aspire.check(28)
    assert aspire.refresh.dense_layers(28) == (26,) and aspire.refresh == Refresh(("prefill", "draft", "verify"), (-2,))
    assert Refresh(dense=(-1, 3, 0)).dense_layers(4) == (0, 3)
    assert aspire.needs_cost_model and not aspire.with_cost_model(UNIT).needs_cost_model
    for method in (Method(), Method("vegas", VEGAS, Fixed(6)), Method("sparsespec", SPARSESPEC, Staggered())):
        method.check(4)
        assert not method.needs_cost_model
