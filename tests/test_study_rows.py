"""Do the rows of a study stand in a readable order, and does each say how its cell is run alone?"""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir

from experiments.config import CONF, check_overrides, for_method, plain, register
from experiments.records import find_records, write_record
from experiments.studies.pages import redraw_studies
from experiments.studies.study import study_of
from experiments.studies.sweep import Sweep
from tests.fake_records import METHODS, requests, timed, write_comparison

OWN = ("study", "run_id", "output_dir", "calibration")  # what a cell alone has not, or has otherwise


def sweep(name: str) -> Sweep:
    study = study_of(name)
    assert isinstance(study, Sweep)
    return study


def cell(root: Path, study: Sweep, part: str, place: int, x: Any = None, batch: int = 8, fits: bool = False) -> None:
    """A made-up cell of series number `place`."""
    series = study.series[place]
    lines = requests(0.7, 0 if place == 0 else 4, seed=place)
    own = {"name": study.name, "profile": "shapes", "part": part, "series": series.label, "x": x, "place": place}
    config = {"run_id": "fake", "study": own, "engine": {"dtype": "float32"}}
    record = timed(lines, [1.0 / (place + 1)], series.method, series.label, config=config, batch=batch)
    if fits:
        record = record.model_copy(update={"protocol": {**(record.protocol or {}), "batch_mode": "max_fit"}})
    write_record(root / part / series.method, record, lines)


def test_parts_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    study = sweep("map")
    for part in ("17k x 16", "4k x 64", "4k x 16", "90k x 12"):
        cell(tmp_path, study, part, 0)
    assert [*study.frame(find_records(tmp_path))["part"]] == ["4k x 16", "4k x 64", "17k x 16", "90k x 12"]


def test_batches_are_one_line_that_ends_where_the_memory_is_full(tmp_path: Path) -> None:
    """G14: at full memory each method stands at its own batch, beside plain decoding at plain decoding's."""
    study = sweep("batch")
    for part in ("4", "16", "64"):
        for place in (0, 1):
            cell(tmp_path, study, part, place)
    cell(tmp_path, study, "full", 0, batch=70, fits=True)
    cell(tmp_path, study, "full", 1, batch=66, fits=True)
    rows = study.frame(find_records(tmp_path))
    assert [*rows.loc[rows["series"] == "autoregressive", "x"]] == [4, 16, 64, 70]
    drafting = rows[rows["series"] == "Vegas"]
    assert [*drafting["x"]] == [4, 16, 64, 66] and drafting["decode speed-up"].notna().all()
    assert [*rows.loc[rows["x"] > 64, "note"]] == ["as many slots as fit"] * 2


def test_a_batch_that_never_came_to_be_is_no_point(tmp_path: Path) -> None:
    study = sweep("batch")
    cell(tmp_path, study, "4", 0)
    cell(tmp_path, study, "full", 0, batch=0)
    assert study.frame(find_records(tmp_path))["x"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "profile", "place"),
    [("draft_length", "embedded", -1), ("batch", "shapes", 1), ("map", "shapes", 2), ("placement", "h200", 3)],
)
def test_a_row_names_the_command_of_its_cell(name: str, profile: str, place: int, tmp_path: Path) -> None:
    """G12: copied into a shell, it composes to the config of the study's own cell."""
    study = sweep(name)
    part = [*study.where[profile].parts][-1]
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        wanted = study.configs(profile, part, [], tmp_path)[place]
        words = shlex.split(study.command(wanted["study"]) or "")
        assert words[:3] == ["python", "-m", "experiments.run"]
        check_overrides(words[3:])
        method = next(word for word in words if word.startswith("method="))
        found = plain(for_method(words[3:], method.partition("=")[2]))
    for config in (found, wanted):
        config["method"] = {key: value for key, value in config["method"].items() if key not in ("name", "label")}
    assert {k: v for k, v in found.items() if k not in OWN} == {k: v for k, v in wanted.items() if k not in OWN}


def test_a_row_that_the_config_no_longer_has_names_no_command() -> None:
    own = {"name": "batch", "profile": "shapes", "part": "4", "series": "ASPIRE", "x": None, "place": 2}
    assert sweep("batch").command(own)
    for change in ({"series": "gone"}, {"part": "5"}, {"profile": "paper"}, {"x": 3}):
        assert sweep("batch").command(own | change) is None


def test_records_of_figure_1_serve_the_main_table_until_it_has_its_own(tmp_path: Path) -> None:
    """They keep a part's name of their own, since they were not run by the study's command."""
    study, root = sweep("speedups"), tmp_path / "records" / "studies"
    write_comparison(root.parent / "fig1-embedded", ["pystdlib"])
    rows = study.frame(study.folders(root))
    assert {*rows["part"]} == {"pystdlib, of figure 1"} and {*rows["method"]} == {*METHODS}
    speed = rows.set_index("series")["decode speed-up"]
    wanted = [speed["ASPIRE"] / speed["Vegas"], speed["ASPIRE"]]
    assert [verdict.value for verdict in study.verdicts(rows)] == pytest.approx(wanted)
    assert "experiments.run" not in study.table(rows)
    page = redraw_studies(root, tmp_path)[-1].read_text("utf-8")
    assert "[records](records/fig1-embedded)" in page
    write_record(root / "speedups" / "embedded" / "own", *_own(study))
    assert [*study.frame(study.folders(root))["part"]] == ["arithmetic"]


def _own(study: Sweep) -> tuple[Any, Any]:
    own = {"name": study.name, "profile": "embedded", "part": "arithmetic", "series": "ASPIRE", "x": None, "place": 7}
    return timed(requests(0.7, 4), [1.0], config={"study": own}), requests(0.7, 4)
