"""Does a study run what its config says, show what ran, and judge each claim by its own rule?"""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hydra import initialize_config_dir

from experiments import study as command
from experiments.config import CONF, register
from experiments.metrics import speedup
from experiments.records import failed_record, find_records, read_record, write_record
from experiments.redraw import find_fig1, redraw
from experiments.studies import At, Difference, Mean, Ratio, Spread, Untestable
from experiments.studies.claims import AGREES, DIFFERS, NOT_RUN, UNTESTABLE, judge, published
from experiments.studies.study import Study, names, study_of
from experiments.studies.sweep import Sweep
from experiments.tables import ACCEPTANCE, BASELINE
from tests.fake_records import requests, timed
from tests.test_runs import TINY

ROWS = pd.DataFrame(
    [
        {"part": "16k", "series": "plain", "x": None, "tok": 10.0},
        {"part": "16k", "series": "swept", "x": 1.0, "tok": 20.0},
        {"part": "16k", "series": "swept", "x": 8.0, "tok": 25.0},
        {
            "part": "32k",
            "series": "swept",
            "x": 8.0,
            "tok": float("nan"),
            "shown evidence": "real, CPU",
            "on GPU": False,
        },
    ]
).assign(**{"shown evidence": "real, CPU", "on GPU": False})


def at(series: str, x: Any = None, part: str | None = None) -> At:
    return At(series=series, column="tok", x=x, part=part)


@pytest.mark.parametrize("name", names())
def test_every_study_composes_and_has_its_claims(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cells of one comparison have names of their own, plain decoding first; every claim is in the published file."""
    study = study_of(name)
    assert {*study.claims} == {*published(name)} != set()
    for profile in study.profiles if isinstance(study, Sweep) else []:
        variants = study.variants(profile)
        cells = [cell for _, _, cell, _ in variants]
        assert len({*cells}) == len(cells) and (len(cells) == 1 or cells[0] == BASELINE)
        monkeypatch.setattr(Sweep, "variants", lambda *_, last=variants[-1]: [last])  # composing takes its time
        register()
        with initialize_config_dir(str(CONF), version_base="1.3"):
            for part in study.where[profile].parts:
                (config,) = study.configs(profile, part, [], tmp_path)
        monkeypatch.undo()
        assert config["method"]["name"] == cells[-1] and config["study"]["profile"] == profile
        shapes = config["model"]["weights"] == "random"
        assert shapes == (profile == "shapes") == (config["acceptance"]["profile"] != "measured")


@pytest.mark.parametrize("name", names())
def test_measures_name_series_that_are_run(name: str) -> None:
    """A claim about a series or an x that no profile runs could never be judged."""
    study = study_of(name)
    if not isinstance(study, Sweep):
        return
    xs = {series.label: {*series.xs} for series in study.series}
    parts = {part for profile in study.where.values() for part in profile.parts}
    for claim in map(dict, study.model_dump()["claims"].values()):
        for measure in (claim, *(v for v in claim.values() if isinstance(v, dict))):
            if "series" in measure:
                assert measure["series"] in xs
                assert measure.get("x") is None or measure["x"] in xs[measure["series"]]
                assert measure.get("part") is None or measure["part"] in parts


def test_measures_read_the_rows() -> None:
    assert at("plain").value(ROWS) == 10 and at("swept", 8, "16k").value(ROWS) == 25
    assert at("swept", 8, "32k").value(ROWS) is None and at("swept", part="16k").value(ROWS) is None
    assert Ratio(top=at("swept", 1), bottom=at("plain")).value(ROWS) == 2
    assert Difference(top=at("swept", 1), bottom=at("plain"), per=at("plain")).value(ROWS) == 1
    assert Spread(series="swept", column="tok").value(ROWS) == pytest.approx(0.25)
    assert Spread(series="plain", column="tok").value(ROWS) is None
    assert Mean(series="swept", column="tok").value(ROWS) == 22.5


@pytest.mark.parametrize(
    ("measure", "low", "high", "word"),
    [
        (at("plain"), 9, 11, AGREES), (at("plain"), 11, None, DIFFERS), (at("plain"), None, 9, DIFFERS),
        (at("plain"), None, None, AGREES), (at("swept", 3), 0, 1, UNTESTABLE),
        (Untestable(reason="no such GPU"), None, None, UNTESTABLE),
    ],
)  # fmt: skip
def test_a_claim_is_held_against_its_interval(measure: Any, low: Any, high: Any, word: str) -> None:
    claim = {"text": "t", "published": "p", "source": "s", "low": low, "high": high}
    assert judge("study", claim, measure, ROWS, "embedded").word == word
    if not isinstance(measure, Untestable):
        assert judge("study", claim, measure, ROWS.iloc[:0], "embedded").word == NOT_RUN


def test_a_cpu_says_nothing_about_the_speed_of_a_gpu() -> None:
    claim = {"text": "t", "published": "p", "source": "s", "low": 9, "high": 11}
    measure = At(series="plain", column="tok", speed=True)
    found = judge("study", claim, measure, ROWS, "embedded")
    assert (found.value, found.word) == (10, UNTESTABLE) and "GPU" in found.reason
    assert judge("study", claim, measure, ROWS.assign(**{"on GPU": True}), "h200").word == AGREES


def fake(root: Path, study: Study, profile: str = "embedded", failing: str = "") -> None:
    """Made-up cells of all variants of a profile's first part, by the study's own configs."""
    assert isinstance(study, Sweep)
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        part = next(iter(study.where[profile].parts))
        configs = study.configs(profile, part, [], root)
    for place, config in enumerate(configs):
        name, drafts = config["method"]["name"], 0 if place == 0 else 4
        lines = requests(0.7 + 0.01 * place, drafts, seed=place)
        seconds = sum(line.committed for line in lines) * 0.01 / (1 + 0.1 * place)
        own = {key: config[key] for key in ("study", "method")} | {"run_id": "fake"}
        record = timed(lines, [seconds, 1.1 * seconds], name, config["method"]["label"], config=own)
        folder = root / study.name / profile / part / name
        if name == failing:
            record, lines = failed_record(record.cell, record.config, "out of memory | ask less"), []
        write_record(folder, record, lines)


def test_pages_follow_from_records_alone(tmp_path: Path) -> None:
    """A failed cell is a row with its error, twice the same bytes, and figure 1 keeps out of it."""
    study, records = study_of("draft_length"), tmp_path / "records"
    fake(records / "studies", study, failing="aspire_fixed_refreshed_by_verification_6")
    first, again = (redraw(records, tmp_path / name) for name in ("first", "again"))
    assert [path.name for path in first] == [
        "study_draft_length.md", "study_draft_length.pdf", "study_draft_length.png", "README.md"
    ]  # fmt: skip
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    table = first[0].read_text("utf-8")
    assert table.count("| refreshed") == 10 and "out of memory \\| ask less" in table
    page = first[-1].read_text("utf-8")
    assert page.count(DIFFERS) + page.count(AGREES) >= 4 and "make study NAME=draft_length PROFILE=embedded" in page
    assert NOT_RUN in page  # the other studies
    assert find_fig1(records) == []


def test_what_differs_between_comparisons_is_drawn_over_their_parts(tmp_path: Path) -> None:
    study = study_of("batch")
    fake(tmp_path, study)
    rows = study.frame(find_records(tmp_path))
    assert [*rows["x"]] == [1.0, 1.0, 1.0] and {*rows["part"]} == {"all"}
    assert [path.suffix for path in study.figure(rows, tmp_path / "figure")] == [".pdf", ".png"]


def test_a_map_shows_where_drafting_loses(tmp_path: Path) -> None:
    """G03: draft length by context and batch; no drafts at all (k = 0) is a cell like the others."""
    study = study_of("map")
    fake(tmp_path, study)
    rows = study.frame(find_records(tmp_path))
    assert rows["decode speed-up"].notna().all()
    assert [path.suffix for path in study.figure(rows, tmp_path / "figure")] == [".pdf", ".png"]


def test_a_study_runs_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On a tiny model: cells, table, figure, verdicts; one file of costs for all variants; and it can be resumed."""
    out, words = tmp_path / "out", [w for w in TINY if not w.startswith("calibration.dir")]
    words += ["protocol.repeats=1", f"output_dir={out}"]
    assert command.main(["stale_cost", "profile=embedded", *words]) == 0
    said = capsys.readouterr().out
    assert "ok 6 / failed 0" in said and "make study NAME=stale_cost" in said
    assert len([*(out / "calibration").glob("*.json")]) == 1
    records = {r.cell.method: r for r in map(read_record, find_records(out))}
    assert records["aspire_a_kv_token_s_cost_4"].config["calibration"]["scale"]["attn"] == 4
    assert all(speedup(r, records[BASELINE])[0] for r in records.values())
    assert (out / "study_stale_cost.md").exists() and (out / "study_stale_cost.png").exists()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("record.json")}
    assert command.main(["stale_cost", "profile=embedded", *words, "resume=true"]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("record.json")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budgt"], "did you mean 'budget'"),
        (["budget", "profile=shapes"], "no profile 'shapes'"),
        (["budget", "metod=vegas"], "did you mean 'method'"),
    ],
)
def test_bad_words_get_one_clear_error(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        command.main(words)


def test_without_words_it_lists_the_studies(capsys: pytest.CaptureFixture) -> None:
    assert command.main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names()) and ACCEPTANCE not in said
