"""Do the studies of traces say what their records hold? Lengths by request, recall beside a record, modelled gaps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_records import request, requests, timed
from hydra import initialize_config_dir
from test_runs import TINY
from test_shapes import configs as shapes_configs

from aspire.verify import Emulation
from experiments.check import check
from experiments.config import CONF, register
from experiments.records import RequestLine, failed_record, find_records, read_record, read_requests, write_record
from experiments.run import run
from experiments.studies.gap import CLOSED, FIXED, ORACLE, OWN, PLAIN, drafts_of, verdicts_of
from experiments.studies.heterogeneity import Heterogeneity, picked
from experiments.studies.lengths import change_across_windows, correlation, lengths_of, share_between, summary
from experiments.studies.oracle import OracleGap
from experiments.studies.recall import RECALL, MassRecall
from experiments.studies.sources import Asked, curves
from experiments.studies.study import Study, study_of
from experiments.studies.traced import Traced

DRAFTS = {"method": {"name": "aspire_fixed", "label": "ASPIRE-Fixed", "speculation": {"longest": 20}}}


def cell(root: Path, study: Study, lines: list[RequestLine] | None, series: str, profile: str = "embedded") -> Path:
    """A made-up cell of a study; without lines a failed one."""
    config = DRAFTS | {
        "study": {"name": study.name, "profile": profile, "part": "all", "series": series, "x": 20, "place": 0}
    }
    record = timed(lines or requests(0.5, 4), [10.0], "aspire_fixed", "ASPIRE-Fixed", config=config)
    if lines is None:
        record = failed_record(record.cell, record.config, RuntimeError("out of memory"))
    folder = root / study.name / profile / "all" / record.cell_id
    write_record(folder, record, lines or [])
    return folder


def twenty(*accepted: int, name: str = "r0") -> RequestLine:
    return request([(20, a) for a in accepted], name)


def test_lengths_of_requests_by_hand() -> None:
    """Only rounds that drafted all 20 count, so that the end of a request is no refusal."""
    lines = [twenty(2, 4, 6, 8, name="a"), request([(20, 20), (20, 20), (3, 1)], "b"), request([(3, 3)], "c")]
    found = lengths_of(lines, 20)
    assert [(each.id, each.accepted) for each in found] == [("a", (2, 4, 6, 8)), ("b", (20, 20))]
    assert found[0].windows(2) == [3, 7] and found[0].windows(3) == [4] and found[1].windows(2) == [20]
    assert change_across_windows(found, 2) == 4 and change_across_windows(found, 4) is None
    said = summary(found, 2)
    assert (said["shortest mean"], said["mean of means"], said["longest mean"]) == (5, 12.5, 20)
    with pytest.raises(ValueError, match="fixed length of 20"):
        lengths_of([request([(3, 3)])], 20)


def test_what_rounds_of_a_request_share() -> None:
    alike = lengths_of([twenty(3, 3, 3, name="a"), twenty(9, 9, 9, name="b")], 20)
    assert share_between(alike) == 1 and correlation(alike) is None
    same = lengths_of([twenty(0, 10, name="a"), twenty(10, 0, name="b")], 20)
    assert share_between(same) == 0
    falling = lengths_of([twenty(0, 0, 0, 9, 9, 9)], 20)
    swinging = lengths_of([twenty(0, 9, 0, 9, 0, 9)], 20)
    assert correlation(falling) == pytest.approx(0.5) and correlation(swinging) == pytest.approx(-5 / 6)
    assert [each.id for each in picked(alike, 1)] == ["a"] and len(picked(alike, 5)) == 2


def test_heterogeneity_is_told_and_drawn_alike_twice(tmp_path: Path) -> None:
    """Beside a failed cell, whose row says why; claims of numbers that are not there are not judged."""
    study = study_of("heterogeneity")
    assert isinstance(study, Heterogeneity)
    lines = [twenty(*([3, 2, 4, 3] * 5), name="a"), twenty(*([20, 12] * 10), name="b")]
    folders = [cell(tmp_path, study, lines, "drafts a round"), cell(tmp_path, study, None, "drafts a round", "h200")]
    rows = study.frame(folders)
    text = study.table(rows)
    assert "3.00" in text and "16.00" in text and "9.50" in text and "out of memory" in text
    said = {(v.profile, v.text.split(": ")[-1]): (v.value, v.word) for v in study.verdicts(rows)}
    assert said["embedded", "mean over requests"] == (9.5, "agrees")
    assert said["embedded", "the request with the highest mean"] == (16, "differs")
    drawn = [[path.read_bytes() for path in study.figure(rows, tmp_path / name)] for name in ("one", "two")]
    assert len(drawn[0]) == 2 and drawn[0] == drawn[1]
    alone = study.frame(folders[1:])
    assert {v.word for v in study.verdicts(alone)} == {"not testable here"}


def test_recall_of_a_tiny_model_through_the_command(tmp_path: Path) -> None:
    """A run of the study: its cell is sound, its lines are of requests of the cell, and read back as written."""
    asked = Asked(tokens=16, k=8, ages=(1, 4), offsets=(1, 9), counts=(1, 2, 9))
    study = study_of("recall").model_copy(update={"asked": asked})
    assert isinstance(study, MassRecall)
    words = [word for word in TINY if not word.startswith("protocol.")]
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        (record,) = study.measure("embedded", [*words, "protocol.repeats=1", "benchmark.source.requests=3"], tmp_path)
    assert record.error is None
    (folder,) = find_records(tmp_path)
    check(folder)
    lines = study.read(folder)
    assert [line.id for line in lines] == [r.id for r in read_requests(folder) if len(r.output_ids) > 16]
    assert lines and {line.tokens for line in lines} == {16}
    found = lines[0].positions["all"]
    assert [*found.age] == [1, 4] and [*found.offset] == [1] and [*found.refresh] == [1, 2]  # of three layers
    assert len(found.source) == 3 and all(0 < x <= 1 for x in (*found.source, *found.source_old))
    rows = study.frame([folder])
    assert f"{rows['same layer, earlier token: 1 ago'].item():.3f}" in study.table(rows)
    assert len(study.figure(rows, tmp_path / "figure")) == 2
    assert study.columns(lines)["one layer for all, a token old: layer N-2"] == pytest.approx(
        sum(line.positions["all"].source_old[1] for line in lines) / len(lines)
    )
    with pytest.raises(ValueError, match="raise benchmark.max_new_tokens"):
        study.model_copy(update={"asked": asked.model_copy(update={"tokens": 500})}).derive(folder)
    (folder / RECALL).write_text('{"id": "a"}\n')
    with pytest.raises(ValueError, match=f"{RECALL}:1"):
        study.read(folder)
    (folder / RECALL).unlink()
    with pytest.raises(ValueError, match="run the study again"):
        study.frame([folder])


def test_layers_that_look_alike_serve_each_other() -> None:
    """Two layers of the same weights: recall 1 wherever one serves the other at the same token, less when it is old."""
    weights = torch.rand(1, 12, 40, generator=torch.Generator().manual_seed(0)).expand(2, -1, -1)
    found = curves(weights, Asked(tokens=12, k=5, ages=(1, 2), offsets=(1,), counts=(1,)))
    assert found.offset == {1: 1.0} and found.source == [1.0, 1.0] and found.refresh == {1: 1.0}
    assert found.age[1] == found.source_old[0] == found.refresh_old[1] < 0.8


def test_verdicts_of_rounds() -> None:
    """Accepted drafts stand, the first refused one does not, what follows was not judged; nor was a bonus token."""
    line = request([(4, 2), (2, 2), (3, 0)])
    assert verdicts_of(line) == [True, True, False, True, True, False]
    drafts = drafts_of([line, request([(2, 1)], "b"), request([(0, 0)], "plain")], 700)
    assert drafts.count.tolist() == [6, 2] and drafts.prompt.tolist() == [700, 700]
    with pytest.raises(ValueError, match="record a method that drafts"):
        drafts_of([request([(0, 0)])], 700)


def mixed(rounds: int = 3) -> list[RequestLine]:
    return [line for alpha in (0.3, 0.7, 0.95) for line in requests(alpha, 20, count=2, rounds=rounds)]


def test_a_modelled_gap_from_committed_costs(tmp_path: Path) -> None:
    """Under a cost model of an H200 record: the order of policies, what the page says, and that it is marked."""
    study = study_of("oracle").model_copy(update={"costs": ("results/records/h200/shapes/qwen3_1p7b-90000-fit-equal",)})
    assert isinstance(study, OracleGap)
    folder = cell(tmp_path, study, mixed(), "drafts a round")
    study.derive(folder)
    (line,) = study.read(folder)
    (scenario,) = study.scenarios()
    assert line.context == 90000 and line.requests == 6 and line.batch == scenario.record.cell.batch
    tok_s = {name: speed.tok_s for name, speed in line.speeds.items()}
    assert tok_s[ORACLE] > tok_s[OWN] > tok_s[FIXED] > tok_s[PLAIN] and tok_s[ORACLE] > tok_s[CLOSED] > tok_s[PLAIN]
    assert line.gap(CLOSED, ORACLE) == 1 - tok_s[CLOSED] / tok_s[ORACLE]
    rows = study.frame([folder])
    text = study.table(rows)
    assert f"{100 * line.gap(CLOSED, ORACLE):.1f} %" in text and "modelled" in text and "position alone" in text
    verdicts = study.verdicts(rows)
    assert {v.value for v in verdicts} == {line.gap(CLOSED, ORACLE)}
    assert all(v.evidence.startswith("modelled") for v in verdicts)
    drawn = [[path.read_bytes() for path in study.figure(rows, tmp_path / name)] for name in ("one", "two")]
    assert len(drawn[0]) == 2 and drawn[0] == drawn[1]


def test_an_oracle_without_costs_says_what_to_run() -> None:
    study = study_of("oracle").model_copy(update={"costs": ("results/records/nowhere",)})
    assert isinstance(study, OracleGap)
    with pytest.raises(ValueError, match="no record of method=aspire"):
        study.scenarios()


@pytest.mark.parametrize("name", ["recall", "oracle"])
def test_a_failed_cell_has_no_lines(tmp_path: Path, name: str) -> None:
    study = study_of(name)
    assert isinstance(study, Traced)
    rows = study.frame([cell(tmp_path, study, None, "plain decoding")])
    assert rows["lines"].isna().all() and study.figure(rows, tmp_path / "figure") == []
    assert {v.word for v in study.verdicts(rows)} == {"not testable here"}


def test_g04_requests_of_one_batch_draft_as_their_acceptance_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G04: two types of requests, drafts that stand with .9 and with .2, in one batch: requests.jsonl shows each
    one's draft lengths round by round, long for the first and short for the second."""

    def alphas(self: Emulation, seed: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
        return torch.where(seed % 2 == 0, 0.9, 0.2)

    monkeypatch.setattr(Emulation, "alphas", alphas)
    cost: dict[str, Any] = {"model": 1.0, "mlp": 0.01, "attn": 0.01, "layers": 100, "dense_layers": 1}
    fields = ",".join(f"{key}:{value}" for key, value in cost.items())
    made = shapes_configs(
        tmp_path, ["aspire"], batch="6", benchmark__max_new_tokens="80", benchmark__source__context="400",
        protocol__replay="drain", protocol__repeats="1",
        method__speculation__cost=f"{{_target_:aspire.policies.CostModel,{fields}}}",
    )  # fmt: skip
    (record,) = run(made, tmp_path / "cells")
    assert record.error is None
    (folder,) = find_records(tmp_path / "cells")
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for line in read_requests(folder):
        assert len(line.rounds) > 4
        lengths[line.seed % 2 == 0] += [drafted for drafted, _ in line.rounds[4:-1]]  # once the estimate has settled
    likely, unlikely = (sum(each) / len(each) for each in (lengths[True], lengths[False]))
    assert likely > 4 and unlikely < 2
    assert read_record(folder).cell.acceptance.startswith("emulated")
