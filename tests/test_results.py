"""Do the committed tables follow from the committed records? One command rebuilds them, byte for byte."""

from pathlib import Path

import pytest

from experiments.gpu_tables import GPU, write_gpu_tables
from experiments.metrics import check
from experiments.modelled import MODELLED, write_modelled
from experiments.quality import QUALITY
from experiments.records import find_records, read_record
from experiments.redraw import find_fig1, redraw, redraw_quality
from experiments.studies.pages import STUDIES, redraw_studies
from experiments.tables import write_tables

RESULTS = Path(__file__).parents[1] / "results"
RECORDS = find_records(RESULTS / "records")


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_committed_record_follows_from_its_requests(folder: Path) -> None:
    """Every summary is recomputed exactly, and the cell was measured on a clean tree."""
    check(folder)
    record = read_record(folder)
    assert record.status == "ok" and record.environment.dirty is False


def test_committed_tables_are_rebuilt_byte_for_byte(tmp_path: Path) -> None:
    """All of them: a table that no record asks for any more is not left behind."""
    written = [
        *write_tables(find_fig1(RESULTS / "records"), tmp_path / "tables"),
        *write_gpu_tables(RESULTS / "records" / GPU, tmp_path / "tables"),
        *redraw_quality(RESULTS / "records" / QUALITY, tmp_path),
    ]
    pages = redraw_studies(RESULTS / "records" / STUDIES, tmp_path)
    pages += write_modelled(RESULTS / "records" / MODELLED, tmp_path)
    written += [path for path in pages if path.parent.name == "tables"]
    for path in written:
        assert path.read_bytes() == (RESULTS / "tables" / path.name).read_bytes(), path.name
    assert (tmp_path / "README.md").read_bytes() == (RESULTS / "README.md").read_bytes()
    assert {path.name for path in (RESULTS / "tables").iterdir()} == {path.name for path in written}


def test_no_records_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make reproduce-fig1"):
        redraw(tmp_path)
