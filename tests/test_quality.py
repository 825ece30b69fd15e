"""Are scores averaged as they are said to be, and does the quality table compare only what may be compared?"""

import json
from itertools import product
from math import comb, sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from test_runs import configs

from experiments import compare, quality, scores
from experiments.config import refuse
from experiments.metrics import check
from experiments.records import RECORD, Graded, Parting, Record, RequestLine, read_record, read_requests, write_record
from experiments.redraw import redraw
from experiments.scoring import Integer
from tests.fake_records import request, timed

DRAIN = {"protocol": {"replay": "drain"}, "engine": {"device": "cpu", "dtype": "float32"}}
GATE = {"passed": True, "noise": 0.1}


def graded(line: RequestLine, score: float, outcome: str = "answered", task: str | None = None) -> RequestLine:
    reason = "length" if outcome == "unfinished" else "stop"
    verdict = Graded(outcome=outcome, score=score, found="7" if outcome == "answered" else None, task=task)
    return line.model_copy(update={"graded": verdict, "finish_reason": reason})


def answers(pattern: dict[str, list[float]], task: str | None = None) -> list[RequestLine]:
    """A line a sample; item -> scores of its samples."""
    return [
        graded(request([(0, 0)] * 5, f"{name}#{repeat}"), score, task=task)
        for name, each in pattern.items()
        for repeat, score in enumerate(each)
    ]


# C14: 30 items, 4 samples each; item i is right in i % 5 of them.
PATTERN = {f"aime/{i}": [float(j < i % 5) for j in range(4)] for i in range(30)}


def test_all_samples_of_all_items_count() -> None:
    """C14: avg@k, pass@k, n and the standard error come from every sample, not from the first of each."""
    found = scores.quality(answers(PATTERN), "Integer()")
    rates = [i % 5 / 4 for i in range(30)]
    assert (found.items, found.samples_per_item, found.right, found.wrong) == (30, 4, 60, 60)
    assert found.score == pytest.approx(fmean(rates)) == 0.5
    assert found.stderr == pytest.approx(stdev(rates) / sqrt(30))
    assert list(found.pass_at) == ["1", "2", "4"]
    assert found.pass_at["1"] == pytest.approx(0.5) and found.pass_at["4"] == pytest.approx(24 / 30)
    one = scores.quality(answers({name: each[:1] for name, each in PATTERN.items()}), "Integer()")
    assert (one.samples_per_item, list(one.pass_at), one.score) == (1, ["1"], 24 / 30)


@pytest.mark.parametrize(("right", "k"), list(product(range(6), range(1, 6))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(right: int, k: int) -> None:
    """Unbiased: over all draws of k out of 5 samples."""
    samples = [1.0] * right + [0.0] * (5 - right)
    masks = [m for m in product((0, 1), repeat=5) if sum(m) == k]
    share = fmean(any(m and s for m, s in zip(mask, samples)) for mask in masks)
    assert len(masks) == comb(5, k)
    assert scores.pass_at({"a": samples}, k) == pytest.approx(share)


def test_what_cannot_be_known_is_null() -> None:
    assert scores.pass_at({"a": [1.0]}, 2) is None and scores.pass_at({}, 1) is None
    assert scores.average({}) is None and scores.interval({"a": [1.0]}) is None
    assert scores.standard_error({"a": [1.0, 0.0]}) is None
    assert scores.difference_interval({"a": [1.0]}, {"a": [0.0]}) is None
    assert scores.difference({"a": [1.0]}, {"b": [0.0]}) is None
    with pytest.raises(ValueError, match="1 to 2 samples"):
        scores.quality(answers({"a": [1.0], "b": [1.0, 0.0]}), "Integer()")


def test_a_right_or_wrong_score_has_the_binomial_interval() -> None:
    """C13: also of a slice with few items. Wilson's for 8 of 10, as tables of it say."""
    low, high = scores.interval({str(i): [float(i < 8)] for i in range(10)}) or (0, 0)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert scores.interval({str(i): [float(i < 8)] * 4 for i in range(10)}) == (low, high)  # samples that agree
    mixed = answers({"a": [1.0], "b": [0.0]}, "short") + answers({"c": [1.0], "d": [1.0], "e": [0.0]}, "long")
    found = scores.quality(mixed, "Choice()")
    assert {name: part.items for name, part in found.tasks.items()} == {"long": 3, "short": 2}
    assert found.tasks["long"].score == pytest.approx(2 / 3)
    assert 0 < found.tasks["long"].low < 2 / 3 < found.tasks["long"].high < 1


def test_the_t_interval_covers_the_mean() -> None:
    """Of graded scores like F1: about 95 of 100 times on draws of a known mean."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(400):
        low, high = scores.interval({str(i): [x] for i, x in enumerate(rng.beta(2, 3, 12))}) or (0, 0)
        inside += low <= 0.4 <= high
    assert 0.92 <= inside / 400 <= 0.98


def test_the_difference_is_paired() -> None:
    """Two methods that differ on 2 of 40 hard and easy items: the items' own spread is no part of the interval."""
    base = {str(i): [float(i % 2)] for i in range(40)}
    mine = base | {"1": [0.0], "3": [0.0]}
    assert scores.difference(mine, base) == pytest.approx(-0.05)
    low, high = scores.difference_interval(mine, base) or (0, 0)
    assert -0.13 <= low < -0.05 < high <= 0
    assert scores.difference_interval(base, base) == (0, 0)
    assert scores.difference_interval(mine, base) == scores.difference_interval(mine, base)


def test_wrong_unparsable_and_unfinished_are_three_counts() -> None:
    """C11: cut answers are no wrong answers; a cut one that had its answer counts as cut and as right."""
    lines = [request([(0, 0)] * 3, f"a/{i}#0") for i in range(6)]
    verdicts = [(1.0, "answered"), (0.0, "answered"), (0.0, "unparsable"), (0.0, "unfinished"), (0.5, "answered")]
    made = [graded(line, *verdict) for line, verdict in zip(lines, verdicts)] + lines[5:]
    made[0] = made[0].model_copy(update={"finish_reason": "length"})
    found = scores.quality(made, "LongBench()")
    assert (found.right, found.partly, found.wrong, found.unparsable, found.unfinished) == (1, 1, 1, 1, 1)
    assert (found.at_limit, found.items, found.unscored, found.score) == (2, 5, 1, pytest.approx(0.3))
    assert found.pass_at == {}  # "right" says little where scores are shares


def cell(root: Path, method: str, lines: list[RequestLine], gate: dict | None = None, **more) -> Path:
    """A drained record of these lines, with its quality where they are graded."""
    more = {"config": DRAIN | more.pop("config", {})} | more
    record = timed(lines, [1.0], method, benchmark="aime25", **more)
    update: dict = {"protocol": {**record.protocol, "replay": "drain", "gate_counts": gate}}
    if any(line.graded for line in lines):
        update["quality"] = scores.quality(lines, repr(Integer(0, 999)))
    write_record(root / method, record.model_copy(update=update), lines)
    return root / method


def changed(line: RequestLine, at: int, gap: float | None = None) -> RequestLine:
    """Another token at an index; gap: what the gate saw there."""
    ids = [*line.output_ids]
    ids[at] += 1000
    seen = None if gap is None else Parting(at=at, gap=gap)
    return line.model_copy(update={"output_ids": ids, "parting": seen})


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """Plain decoding and two methods on 6 items: one equal, one that parts in every way there is."""
    plain = answers({f"aime/{i}": [float(i < 3)] for i in range(6)})
    parted = [
        plain[0], changed(plain[1], 2, 0.15), changed(plain[2], 2, 0.25), changed(plain[3], 2), plain[4], plain[5],
    ]  # fmt: skip
    parted[2] = graded(parted[2], 0.0)
    cell(tmp_path, "autoregressive", plain, GATE)
    cell(tmp_path, "vegas", plain, GATE)
    cell(tmp_path, "aspire", parted, GATE)
    return tmp_path


def test_texts_are_equal_near_ties_different_or_not_judged(compared: Path) -> None:
    """G09: a difference within twice the measured noise is a near tie; what the gate did not see is neither."""
    table = quality.frame(quality.read(sorted(p.parent for p in compared.rglob(RECORD)))).set_index("method")
    assert list(table.index) == ["autoregressive", "vegas", "aspire"]
    columns = ["texts", "equal", "near tie", "different", "not judged"]
    assert list(table.loc["vegas", columns]) == [6, 6, 0, 0, 0]
    assert list(table.loc["aspire", columns]) == [6, 3, 1, 1, 1]
    assert table.loc["autoregressive", columns].isna().all()
    assert table.loc["vegas", quality.DIFFERENCE] == 0 and table.loc["aspire", "score"] == pytest.approx(2 / 6)
    assert table.loc["aspire", quality.DIFFERENCE] == pytest.approx(-1 / 6)
    assert table.loc["aspire", f"{quality.DIFFERENCE} 95 % low"] < -1 / 6
    assert list(table["wrong"]) == [3, 3, 4]


@pytest.mark.parametrize(
    ("gate", "seen", "found"),
    [
        (None, Parting(at=2, gap=0.0), quality.UNJUDGED),
        ({"passed": False, "noise": 0.1}, Parting(at=2, gap=0.0), quality.DIFFERENT),
        (GATE, Parting(at=2, gap=0.25), quality.DIFFERENT),
        (GATE, Parting(at=3, gap=0.0), quality.UNJUDGED),  # of another text
        (GATE, None, quality.UNJUDGED),
    ],
)
def test_a_near_tie_needs_a_gate_that_judged_this_difference(
    gate: dict | None, seen: Parting | None, found: str
) -> None:
    base = request([(0, 0)] * 5)
    mine = changed(base, 2).model_copy(update={"parting": seen})
    assert quality.text_class(mine, base, gate or {}) == found
    assert quality.text_class(changed(base, 2, 0.2), base, GATE) == quality.NEAR_TIE
    shorter = base.model_copy(update={"output_ids": base.output_ids[:-1]})
    assert quality.text_class(shorter, base, GATE) == quality.UNJUDGED


@pytest.mark.parametrize("mark", [("shapes", "emulated:iid(0.9)"), ("shapes", "measured"), ("modelled", "emulated:x")])
def test_emulated_and_random_records_are_refused(compared: Path, mark: tuple[str, str], capsys) -> None:
    """Evidence is never mixed: one such record among real ones is an error that names it."""
    evidence, acceptance = mark
    lines = answers({f"aime/{i}": [1.0] for i in range(6)})
    cell(compared / "more", "aspire_fixed", lines, evidence=evidence, acceptance=acceptance)
    with pytest.raises(ValueError, match=f"aspire_fixed shows {evidence}.*{acceptance.split('(')[0]}"):
        quality.main([str(compared)])
    assert capsys.readouterr().out == ""


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    """A failed cell, a window that cut answers, another run, no baseline, no scores: a row with a note, no numbers."""
    plain = answers({f"aime/{i}": [1.0] for i in range(4)})
    cell(tmp_path, "autoregressive", plain)
    cell(tmp_path, "vegas", plain, config={"run_id": "other"})
    cell(tmp_path, "sparsespec", [line.model_copy(update={"graded": None}) for line in plain])
    cut = cell(tmp_path, "aspire_fsm", plain, config={"protocol": {"replay": "cyclic"}})
    record = read_record(cell(tmp_path, "aspire", plain))
    failed = record.model_copy(update={"status": "failed", "error": "out of\nmemory", "quality": None})
    write_record(tmp_path / "aspire", failed)
    table = quality.frame(quality.read([*tmp_path.iterdir()])).set_index("method")
    assert table.loc["vegas", "note"] == "run differs from the autoregressive record's"
    assert table.loc["vegas", "score"] == 1 and np.isnan(table.loc["vegas", "texts"])
    assert table.loc["sparsespec", "equal"] == 4 and "benchmark.scoring is null" in table.loc["sparsespec", "note"]
    assert "protocol=quality" in table.loc[cut.name, "note"] and np.isnan(table.loc[cut.name, "score"])
    assert table.loc["aspire", "note"] == "failed: out of memory"
    alone = quality.frame(quality.read([tmp_path / "vegas"]))
    assert alone["note"].item() == "no autoregressive record"


def test_the_command_prints_and_writes_the_same_bytes(compared: Path, tmp_path: Path, capsys) -> None:
    """The page shows the outcomes apart; with `quality` as its folder `make figures` writes it too."""
    quality.main([str(compared), str(tmp_path / "out")])
    page = (tmp_path / "out" / "quality.md").read_text()
    assert capsys.readouterr().out.startswith(page)
    head = [name.strip() for name in page.splitlines()[0].split("|")]
    assert {"near tie", "not judged", "wrong", "unparsable", "unfinished", "at token limit", "score 95 %"} <= {*head}
    (tmp_path / "records").mkdir()
    compared_again = tmp_path / "records" / "quality"
    for folder in ("autoregressive", "vegas", "aspire"):
        (compared_again / folder).mkdir(parents=True)
        for file in (compared / folder).iterdir():
            (compared_again / folder / file.name).write_bytes(file.read_bytes())
    written = redraw(tmp_path / "records", tmp_path / "redrawn")
    assert [path.name for path in written] == ["quality.md", "quality.csv"]
    assert written[0].read_text() == page


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"], ["/nowhere"]])
def test_bad_arguments_are_one_line(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="usage|protocol=quality") as caught:
        quality.main(arguments)
    with pytest.raises(SystemExit):
        refuse(caught.value)


def test_a_quality_that_does_not_follow_from_the_lines_is_found(compared: Path) -> None:
    check(compared / "vegas")
    content = json.loads((compared / "vegas" / RECORD).read_text())
    content["quality"]["right"] += 1
    (compared / "vegas" / RECORD).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="quality is .* in the record"):
        check(compared / "vegas")
    content["quality"] = None
    (compared / "vegas" / RECORD).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="quality is None"):
        check(compared / "vegas")


def test_records_of_before_have_no_quality(tmp_path: Path) -> None:
    """Files without the new fields still read, and check."""
    lines = [request([(0, 0)] * 5, f"r{i}") for i in range(2)]
    write_record(tmp_path, timed(lines, [1.0]), lines)
    content = json.loads((tmp_path / RECORD).read_text())
    del content["quality"]
    (tmp_path / RECORD).write_text(json.dumps(content))
    old = [{k: v for k, v in json.loads(x.model_dump_json()).items() if k not in ("graded", "parting")} for x in lines]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert read_record(tmp_path).quality is None and read_requests(tmp_path) == lines
    check(tmp_path)


GREEDY = ("sampling=greedy", "verification=greedy", "protocol=quality", "benchmark.max_new_tokens=8")


def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[list[Record], list[list[RequestLine]]]:
    """A comparison that is scored as if its random weights were real, whose records say shapes all the same."""
    made = configs(tmp_path, ["autoregressive", "vegas"], *GREEDY, *more)
    monkeypatch.setattr("experiments.layout.make_scorer", lambda config: Integer())
    records = compare.run_comparison(made, tmp_path / "cells", lambda line: None)
    return records, [read_requests(tmp_path / "cells" / record.cell_id) for record in records]


def test_a_run_scores_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request, once, with the scorer of the benchmark; the summary follows from the lines."""
    records, lines = real(tmp_path, monkeypatch, "protocol.gate=3")
    for record, each in zip(records, lines):
        assert record.error is None and record.quality is not None
        assert (record.quality.items, record.quality.scorer) == (3, "Integer(low=None, high=None)")
        assert all(line.graded is not None for line in each)
        check(tmp_path / "cells" / record.cell_id)
    # More texts than slots (3 for 2): the gate takes them in turns.
    assert [r.protocol["gate_counts"]["tokens"] for r in records] == [24, 24]


def test_a_window_that_cuts_answers_and_random_weights_score_nothing(tmp_path: Path, monkeypatch) -> None:
    (record, _), lines = real(tmp_path / "a", monkeypatch, "protocol.replay=cyclic")
    assert record.status == "ok" and record.quality is None and not any(line.graded for line in lines[0])
    monkeypatch.undo()
    made = configs(tmp_path, ["autoregressive"], *GREEDY)
    assert made[0]["benchmark"]["scoring"] is not None
    (record,) = compare.run_comparison(made, tmp_path / "b", lambda line: None)
    assert record.status == "ok" and record.quality is None


def test_a_gate_leaves_where_a_text_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index and gap of each text that differs from plain decoding, by request, over several turns of the gate."""
    asked: list[int] = []
    force = compare.force

    def parts(model, pool, kept, texts, width, twins):
        """The last text of all is said to part, at a gap of 0.05."""
        asked.append(len(texts))
        forced = force(model, pool, kept, texts, width, twins)
        if sum(asked) == 6 and width > 2:
            forced[-1] = type(forced[-1])(forced[-1].gaps, 0.1, 0.05)
        return forced

    monkeypatch.setattr(compare, "force", parts)
    monkeypatch.setattr(compare, "parting", lambda text, plain: 4)
    records, lines = real(tmp_path, monkeypatch, "protocol.gate=3")
    assert asked == [2, 2, 2] and [r.status for r in records] == ["ok", "ok"]
    assert [line.parting for line in lines[1]] == [None, None, Parting(at=4, gap=0.05)]
    assert [line.parting for line in lines[0]] == [None] * 3
