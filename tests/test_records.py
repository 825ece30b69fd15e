"""Is a record complete, strict and whole on disk, and does an output folder belong to one run?"""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from experiments.hold import claim_dir
from experiments.records import (
    RECORD,
    REQUESTS,
    Cell,
    Record,
    RequestLine,
    Timing,
    failed_record,
    find_records,
    read_record,
    read_requests,
    write_record,
)
from tests.fake_records import requests, timed

SECTIONS = {
    "cell": "model benchmark method batch seed evidence acceptance",
    "environment": "device driver torch triton transformers commit dirty copy_tb_s",
    "model": "source revision context rope end_ids suggested_sampling",
    "workload": "requests prompt_tokens data_hash truncated original_tokens template_hash first_ids tasks",
    "sampling": "temperature top_k top_p seed verification",
    "tokens": "committed drafted accepted rounds prompt",
    "timing": "prefill_s decode_s passes draft_pass_ms verify_pass_ms mixed_pass_ms host_gap repeats resumed",
    "metrics": "decode_tok_s e2e_tok_s acceptance_rate acceptance_by_position tokens_per_round tpot_ms peak_gib "
    "hbm_efficiency",
}
CELL = Cell(model="smollm2_135m", benchmark="pystdlib", method="aspire", batch=8, seed=1)


def written(folder: Path) -> tuple[Record, list[RequestLine]]:
    lines = requests(0.8, 4)
    record = timed(lines, [2.0, 2.2, 2.1])
    write_record(folder, record, lines)
    return record, lines


def test_a_record_comes_back_equal_and_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    record, lines = written(tmp_path / "a")
    assert read_record(tmp_path / "a") == read_record(tmp_path / "a" / RECORD) == record
    assert read_requests(tmp_path / "a") == lines
    tree = json.loads((tmp_path / "a" / RECORD).read_text())
    assert tree["schema"] == 1
    assert {name: set(tree[name]) for name in SECTIONS} == {name: set(keys.split()) for name, keys in SECTIONS.items()}
    others = "schema cell_id status error config protocol quality calibration"
    assert set(tree) - set(SECTIONS) == set(others.split())
    line = json.loads((tmp_path / "a" / REQUESTS).read_text().splitlines()[0])
    assert list(line) == [
        "id", "prompt_ids_sha1", "prompt_tokens", "output_ids", "finish_reason", "seed", "rounds", "original_tokens",
        "graded", "parting",
    ]  # fmt: skip


def test_missing_is_null_and_unknown_is_refused() -> None:
    assert Timing(draft_pass_ms=float("nan")).draft_pass_ms is None
    assert json.loads(failed_record(CELL, {}, "x").model_dump_json())["metrics"]["acceptance_rate"] is None
    with pytest.raises(ValueError, match="extra_forbidden"):
        Timing.model_validate({"decode_secs": 1.0})
    with pytest.raises(ValueError, match="set evidence to 'shapes'"):
        Cell.model_validate(CELL.model_dump() | {"acceptance": "emulated:hetero"})


def test_a_failed_cell_is_a_record(tmp_path: Path) -> None:
    write_record(tmp_path, failed_record(CELL, {"run_id": "r"}, RuntimeError("out of memory")))
    record = read_record(tmp_path)
    assert (record.status, record.error) == ("failed", "RuntimeError: out of memory")
    assert record.tokens.committed is None
    assert read_requests(tmp_path) == []


def test_a_write_that_dies_leaves_no_record_of_mixed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    replace = os.replace

    def dies(source: str, target: Path) -> None:
        if target.name == RECORD:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(OSError, match="disk full"):
        written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [REQUESTS]


def test_reading_names_the_file_at_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run the cell first"):
        read_record(tmp_path)
    (tmp_path / RECORD).write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="does not follow record schema 1"):
        read_record(tmp_path)
    with pytest.raises(ValueError, match="copy it there"):
        read_requests(tmp_path)
    (tmp_path / REQUESTS).write_text("{}\n")
    with pytest.raises(ValueError, match=r"requests.jsonl:1 is not"):
        read_requests(tmp_path)


def test_records_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b/y", "a/z", "a/b"):
        write_record(tmp_path / name, failed_record(CELL, {}, "x"))
    assert find_records(tmp_path) == [tmp_path / name for name in ("a/b", "a/z", "b/y")]


def claims(path: str, ready: multiprocessing.Barrier, answers: multiprocessing.Queue) -> None:
    ready.wait()
    try:
        claim_dir(path)
        answers.put("mine")
    except ValueError as error:
        answers.put(str(error))


def test_of_eight_processes_one_gets_the_folder_and_seven_are_told(tmp_path: Path) -> None:
    """E04: nothing is overwritten or mixed, however close the starts."""
    context = multiprocessing.get_context("fork")
    ready, answers = context.Barrier(8), context.Queue()
    workers = [context.Process(target=claims, args=(str(tmp_path / "out"), ready, answers)) for _ in range(8)]
    for worker in workers:
        worker.start()
    said = [answers.get(timeout=20) for _ in workers]
    for worker in workers:
        worker.join()
    assert said.count("mine") == 1
    assert sum("resume=true" in text and "overwrite=true" in text for text in said) == 7


def test_a_folder_with_results_needs_resume_or_overwrite(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "run.log").touch()
    claim_dir(tmp_path)
    written(tmp_path / "cell")
    with pytest.raises(ValueError, match="choose another folder"):
        claim_dir(tmp_path)
    with pytest.raises(ValueError, match="set one of them"):
        claim_dir(tmp_path, resume=True, overwrite=True)
    claim_dir(tmp_path, resume=True)
    assert find_records(tmp_path) == [tmp_path / "cell"]
    claim_dir(tmp_path, overwrite=True)
    assert find_records(tmp_path) == []
    assert not (tmp_path / "cell" / REQUESTS).exists()
    with pytest.raises(ValueError, match="is a file"):
        claim_dir(tmp_path / "run.log")
