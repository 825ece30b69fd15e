"""Do the committed tables follow from the committed records? One command rebuilds them, byte for byte."""

from pathlib import Path

import pytest

from experiments.metrics import check
from experiments.records import find_records, read_record
from experiments.redraw import redraw
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
    for path in write_tables(RECORDS, tmp_path):
        assert path.read_bytes() == (RESULTS / "tables" / path.name).read_bytes(), path.name


def test_no_records_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make reproduce-fig1"):
        redraw(tmp_path)
