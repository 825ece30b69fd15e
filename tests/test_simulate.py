"""Does a simulated batch do what the engine would, is a pass priced as it was measured, and is all of it marked?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aspire.policies import ClosedForm, Fixed, Probe, TopBlocks
from aspire.replay import Drafts, replay_batch
from experiments import simulate as command
from experiments.cost import Cost, Priced, fit
from experiments.modelled import MODELLED, read, write_modelled
from experiments.records import read_record
from experiments.redraw import find_fig1, redraw
from experiments.simulate import card_of, drafts_of, error_lines, mape, measured_cells, validate
from tests.fake_records import request

RECORDS = Path(__file__).parents[1] / "results" / "records"
SELECTION = TopBlocks(Probe(), ratio=0.5, floor=16, recent=0)
CARD = (4.0, 1000.0)


def drafts(stands: bool, count: int, requests: int = 4, prompt: int = 64) -> Drafts:
    """Every draft stands, or none."""
    counts = torch.full((requests,), count)
    return Drafts(torch.full((requests, count + 20), stands), counts, torch.full_like(counts, prompt))


def test_plain_decoding_reads_everything_and_commits_a_token_a_row() -> None:
    passes = replay_batch(Fixed(0), drafts(False, 10), SELECTION, 0.0, 3, 30)
    assert passes.verifying.tolist() == [3] * 10 and passes.committed.tolist() == [3] * 10
    assert passes.dense.tolist() == [3 * (64 + step) for step in range(10)] and not passes.selected.any()


def test_a_fixed_length_is_lockstep_and_its_passes_are_known() -> None:
    """Two slots, 3 drafts that all stand, half of the budget, a quarter of the layers dense: by hand."""
    passes = replay_batch(Fixed(3), drafts(True, 8), SELECTION, 0.25, 2, 16)
    assert passes.verifying.tolist() == [0, 0, 0, 2] * 2 and passes.fed.tolist() == [2, 2, 2, 8] * 2
    assert passes.committed.tolist() == [0, 0, 0, 8] * 2
    # Contexts 64, 65 and 66 have budgets of 2, 3 and 3 blocks of 16: half of 4, 5 and 5, rounded up.
    assert passes.selected.tolist()[:4] == [2 * 0.75 * x for x in (32, 48, 48, 0)]
    assert passes.dense.tolist()[:4] == [2 * 0.25 * 64, 2 * 0.25 * 65, 2 * 0.25 * 66, 2 * 67]


def test_who_ends_makes_room_for_the_next() -> None:
    """Answers of 5 tokens, none of whose drafts stand: contexts begin anew after five rounds."""
    passes = replay_batch(Fixed(1), drafts(False, 5), SELECTION, 1.0, 2, 20)
    contexts = passes.dense[passes.verifying > 0] / 2 - 1
    assert contexts.tolist() == [64, 65, 66, 67, 68] * 2


def test_a_policy_that_decides_for_itself_mixes_rows() -> None:
    """One request whose drafts stand and one whose do not: the closed form lets them part."""
    both = drafts(True, 200, requests=2)
    both.stands[1] = False
    cost = command.CostModel(model=1.0, mlp=0.0, attn=0.01, layers=4)
    policy = ClosedForm(cost=cost)
    passes = replay_batch(policy, both, SELECTION, 0.25, 2, 200)
    mixed = (passes.verifying > 0) & (passes.drafting > 0)
    assert mixed.double().mean() > 0.5
    assert float(passes.committed.sum()) >= 200


def test_recorded_verdicts_are_repeated_to_an_answers_length() -> None:
    """Two drafts of which one stands, then two that do; a request without drafts has none that stands."""
    found = drafts_of([request([(2, 1), (2, 2)]), request([(0, 0)])], context=7, answer=5, longest=2)
    assert found.stands.tolist() == [[True, False, True, True, True, False, True, True], [False] * 8]
    assert found.count.tolist() == [5, 5] and found.prompt.tolist() == [7, 7]


def test_the_fit_finds_planted_costs_and_prices_another_card() -> None:
    dice = np.random.default_rng(0)
    planted = Cost(layer_ms=0.02, dense=1.1, feed=2.0, draft=1.4, gap=1.01)
    terms = dice.uniform(1, 10, (200, 4))
    ms = planted.ms(terms, *CARD) / planted.gap
    found = fit([Priced("m", ("m", 1, 1), terms, ms, 1.01)], *CARD)
    for name in ("layer_ms", "dense", "feed", "draft", "gap"):
        assert getattr(found, name) == pytest.approx(getattr(planted, name), rel=1e-6)
    half = found.ms(terms, CARD[0] / 2, CARD[1] / 2) - found.gap * found.layer_ms * terms[:, 0]
    full = found.ms(terms, *CARD) - found.gap * found.layer_ms * terms[:, 0]
    assert half == pytest.approx(2 * full)


def test_committed_cells_are_predicted_within_ten_per_cent() -> None:
    """On cells that the costs were not fitted on: all of them, and those that draft."""
    checked, scenarios = read(RECORDS / MODELLED)
    for held in ("cell", "model"):
        own = [one for one in checked if one.held == held]
        assert len(own) == len(measured_cells()) and mape(own) <= 0.10
        assert mape([one for one in own if one.method != "autoregressive"]) <= 0.10
    assert {one.evidence for one in checked} == {one["evidence"] for one in scenarios} == {"modelled"}


@pytest.mark.parametrize(
    "wanted",
    ["qwen3_8b-90000-7/autoregressive", "qwen3_1p7b-90000-12/aspire_fixed_3", "qwen3_8b-17000-fit-equal/aspire"],
)
def test_validation_is_that_of_the_records(wanted: str) -> None:
    """Committed errors follow from committed cells."""
    folders = measured_cells()
    own = [f for f in folders if f"{f.parent.name}/{read_record(f).cell.method}" == wanted]
    known = {one.held: one for one in read(RECORDS / MODELLED)[0] if one.cell == wanted}
    for one in validate(folders, card_of("h200"), own):
        assert one.predicted == pytest.approx(known[one.held].predicted, rel=0.01)


def test_nothing_modelled_enters_what_is_measured(tmp_path: Path) -> None:
    """Figure 1 does not see it; table and figure are marked, and the same bytes twice."""
    source = RECORDS / MODELLED
    target = tmp_path / "records" / MODELLED
    target.mkdir(parents=True)
    for path in source.glob("*.json*"):
        (target / path.name).write_bytes(path.read_bytes())
    assert find_fig1(tmp_path / "records") == []
    first, again = (redraw(tmp_path / "records", tmp_path / out) for out in ("first", "again"))
    assert [path.name for path in first] == ["modelled.md", "modelled.pdf", "modelled.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    text = first[0].read_text("utf-8")
    assert "‡ modelled: predicted by the fitted cost model, not run" in text and "tok/s ‡" in text
    assert write_modelled(tmp_path / "nothing", tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["card=h300"], "did you mean 'h"), (["card=h200", "batch=500"], "ask for a smaller batch"),
        (["card=h200", "method=vegas", "requests=2"], "not modelled"),
    ],
)  # fmt: skip
def test_bad_words_get_one_clear_error(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        command.main(words)


def test_a_setting_of_ones_own(capsys: pytest.CaptureFixture) -> None:
    """Longer drafts pay more where more of them stand, on any card; and a recorded run can be replayed."""
    own = ["card=h100_nvl", "context=17000", "answer=64", "requests=16", "batch=8"]

    def speedup(*more: str) -> dict[str, Any]:
        command.main([*own, *more])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    low, high = speedup("alpha=0.5"), speedup("alpha=0.98")
    assert low["speedup"] < high["speedup"] and low["evidence"] == high["evidence"] == "modelled"
    assert high["tokens_per_round"] > low["tokens_per_round"]
    trace = next(f for f in measured_cells() if "/hetero/" in f.as_posix() and "fixed_10" in f.name)
    assert speedup(f"trace={trace}")["acceptance"].startswith("trace:")


def test_errors_are_said_for_all_cells_and_for_those_that_draft() -> None:
    checked = read(RECORDS / MODELLED)[0]
    lines = error_lines(checked)
    assert len(lines) == 2 and all("that draft" in line and "worst" in line for line in lines)
