"""Does a sweep survive kills, failing jobs, full disks and simultaneous starts, and say how far it is?"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_runs import ROOT, TINY, configs

from experiments.check import main as check_records
from experiments.metrics import speedup
from experiments.records import JOURNAL, find_records, read_record, read_requests

QUALITY = [
    *[word for word in TINY if not any(key in word for key in ("requests=", "batch=", "repeats="))],
    "protocol=quality", "benchmark.source.requests=20", "batch=1", "verification=coupled",
]  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "experiments.run", *words]


def surroundings(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | more


def cli(*words: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=cwd, env=surroundings(**more), capture_output=True, text=True, timeout=500
    )  # fmt: skip


def lines_of(path: Path) -> list[dict]:
    """The whole lines of a journal after the config."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()[1:]]


def index_of(root: Path) -> list[dict]:
    return json.loads((root / "index.json").read_text())["jobs"]


def kill_when(words: list[str], journal_of: Path, finished: int) -> list[dict]:
    """Start a sweep, kill -9 it as soon as a job's journal has that many requests; returns the journal's lines."""
    child = subprocess.Popen(
        command(*words), cwd=ROOT, env=surroundings(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    try:
        while child.poll() is None:
            found = [line for path in journal_of.rglob(JOURNAL) for line in lines_of(path)]
            if len(found) >= finished:
                break
            time.sleep(0.002)
        assert child.poll() is None, "the sweep ended before it could be killed"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    return [line for path in journal_of.rglob(JOURNAL) for line in lines_of(path)]


@pytest.mark.slow
def test_a_killed_sweep_goes_on_at_the_request_it_was_at(tmp_path: Path) -> None:
    """G07, issue 5: kill -9 in item 7 of 20 of job 3 of 6; no job and no request runs twice, metrics are over all."""
    root = tmp_path / "sweep"
    words = ["-m", *QUALITY, "method=autoregressive,vegas", "seed=1,2,3", "benchmark.max_new_tokens=60"]
    words += [f"output_dir={root}", f"calibration.dir={tmp_path}"]
    before = kill_when(words, root / "2", 6)
    assert 6 <= len(before) < 20
    assert [job["status"] for job in index_of(root)] == ["ok", "ok", "running", "pending", "pending", "pending"]
    done = {f: f.stat().st_mtime_ns for n in "01" for f in (root / n).rglob("record.json")}
    torn = next((root / "2").rglob(JOURNAL))
    torn.write_bytes(torn.read_bytes() + b'{"repeat":0,"decode_s":0.1,"req')

    refused = cli(*[w.replace("max_new_tokens=60", "max_new_tokens=50") for w in words], "resume=true")
    assert refused.returncode == 2 and "max_new_tokens=60, now it has benchmark.max_new_tokens=50" in refused.stderr

    again = cli(*words, "resume=true")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.strip().splitlines()[-1] == f"ok 6 / failed 0: {root}"
    assert [job["status"] for job in index_of(root)] == ["ok"] * 6
    assert {f: f.stat().st_mtime_ns for f in done} == done
    (folder,) = find_records(root / "2")
    record, lines = read_record(folder), read_requests(folder)
    assert len({line.id for line in lines}) == len(lines) == 20 == record.workload.requests
    kept = {one["request"]["id"]: one["request"]["output_ids"] for one in before}
    assert {line.id: line.output_ids for line in lines if line.id in kept} == kept
    assert record.timing.resumed == f"{len(before)} of 20 requests ran in an earlier process"
    assert record.tokens.committed == sum(line.committed for line in lines)
    ran = sum(json.loads(one)["tokens"] for one in (folder / "passes.jsonl").read_text().splitlines())
    assert ran == sum(line.committed for line in lines if line.id not in kept)
    assert not list(root.rglob(JOURNAL)) and check_records([str(root)]) == 0
    whole = read_record(find_records(root / "1")[0])
    assert whole.timing.resumed is None and "was resumed" in str(speedup(record, whole)[1])


def test_resumed_requests_give_the_texts_of_an_unbroken_run(tmp_path: Path, monkeypatch) -> None:
    """In one process: a fault at the third request, then resume; ids, seeds, order and texts are those of one run."""
    from experiments import journal
    from experiments.job import run

    words = [w for w in QUALITY if w != "batch=1"] + ["batch=2", "benchmark.source.requests=5"]
    (one,) = run(configs(tmp_path, ["vegas"], *words), tmp_path / "one")
    healthy, count = journal.append, iter(range(100))

    def faulty(path, finished):
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        healthy(path, finished)

    monkeypatch.setattr(journal, "append", faulty)
    (failed,) = run(configs(tmp_path, ["vegas"], *words), tmp_path / "two")
    assert failed.status == "failed" and "No space left" in str(failed.error)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="benchmark.max_new_tokens: 24 there, 30 asked"):
        run(configs(tmp_path, ["vegas"], *words, "resume=true", "benchmark.max_new_tokens=30"), tmp_path / "two")
    (two,) = run(configs(tmp_path, ["vegas"], *words, "resume=true"), tmp_path / "two")
    assert (two.status, two.timing.resumed) == ("ok", "3 of 5 requests ran in an earlier process")
    assert two.timing.passes is None and one.timing.resumed is None
    assert read_requests(tmp_path / "one" / one.cell_id) == read_requests(tmp_path / "two" / two.cell_id)


def test_a_resumed_comparison_runs_only_what_is_missing(tmp_path: Path) -> None:
    """The finished method's record stays as it is; the new one's time is marked and enters no speed-up."""
    from experiments.job import run

    out, methods = tmp_path / "out", ["autoregressive", "vegas"]
    first, second = run(configs(tmp_path, methods), out)
    (out / second.cell_id / "record.json").unlink()
    base, again = run(configs(tmp_path, methods, "resume=true"), out)
    assert base == first and again.status == "ok"
    assert again.timing.resumed == "autoregressive ran in an earlier process"
    assert speedup(again, base) == (None, "vegas was resumed: autoregressive ran in an earlier process")
    assert speedup(second, first)[0] is not None
