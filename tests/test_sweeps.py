"""Does a sweep survive kills, failing jobs, full disks and simultaneous starts, and say how far it is?"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_records import requests, timed
from hydra import initialize_config_dir
from test_runs import ROOT, TINY, configs

from experiments.check import main as check_records
from experiments.config import CONF, register
from experiments.hold import claim_dir
from experiments.metrics import speedup
from experiments.records import JOURNAL, find_records, read_record, read_requests, write_record
from experiments.summary import main as summarise_folder
from experiments.summary import over_seeds
from experiments.sweep import plan_of

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
    words = ["-m", *QUALITY, "method=autoregressive,vegas", "seed=1,2,3", "benchmark.max_new_tokens=12"]
    words += [f"output_dir={root}", f"calibration.dir={tmp_path}"]
    before = kill_when(words, root / "2", 6)
    assert 6 <= len(before) < 20
    assert [job["status"] for job in index_of(root)] == ["ok", "ok", "running", "pending", "pending", "pending"]
    done = {f: f.stat().st_mtime_ns for n in "01" for f in (root / n).rglob("record.json")}
    torn = next((root / "2").rglob(JOURNAL))
    torn.write_bytes(torn.read_bytes() + b'{"repeat":0,"decode_s":0.1,"req')

    refused = cli(*[w.replace("max_new_tokens=12", "max_new_tokens=11") for w in words], "resume=true")
    assert refused.returncode == 2 and "max_new_tokens=12, now it has benchmark.max_new_tokens=11" in refused.stderr

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

    words = [w for w in QUALITY if w != "batch=1"] + [
        "batch=2",
        "benchmark.source.requests=4",
        "benchmark.max_new_tokens=12",
    ]
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
    with pytest.raises(ValueError, match="benchmark.max_new_tokens: 12 there, 30 asked"):
        run(configs(tmp_path, ["vegas"], *words, "resume=true", "benchmark.max_new_tokens=30"), tmp_path / "two")
    (two,) = run(configs(tmp_path, ["vegas"], *words, "resume=true"), tmp_path / "two")
    assert (two.status, two.timing.resumed) == ("ok", "3 of 8 requests ran in an earlier process")
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


SMALL = [*TINY, "protocol.repeats=1", "protocol.window_tokens=12", "method=autoregressive"]


def test_a_dry_run_lists_the_jobs_and_makes_nothing(tmp_path: Path) -> None:
    """E07: count, values and folder; a comma in a value is quoted, a list is a value of its own."""
    (tmp_path / "a,b.jsonl").write_text("{}\n")
    words = ["-m", "batch=1,2", "method=vegas", "benchmark=math500", "source=local", "dry_run=true"]
    words += [f"path='{tmp_path}/a,b.jsonl'", "comparison.methods=[autoregressive,vegas],[vegas]"]
    done = cli(*words, f"output_dir={tmp_path}/out")
    assert done.returncode == 0 and not (tmp_path / "out").exists(), done.stderr
    head, *jobs = done.stdout.strip().splitlines()
    assert head.startswith(f"4 jobs in {tmp_path}/out, launcher hydra._internal.core_plugins.basic_launcher")
    assert [job.split(":")[0] for job in jobs] == ["0", "1", "2", "3"]
    assert "comparison.methods=[autoregressive,vegas]" in jobs[0] and "batch=2" in jobs[3]
    assert all("a,b.jsonl" in job for job in jobs)


def test_a_missing_path_stops_the_sweep_before_its_first_job(tmp_path: Path) -> None:
    """E07: named with its job, in a few seconds and one line."""
    begun = time.perf_counter()
    done = cli(
        "-m", "batch=1,2", "benchmark=math500", "source=local", "path=/nowhere/x.jsonl", f"output_dir={tmp_path}/o"
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: job 0: path=/nowhere/x.jsonl does not exist")
    assert not (tmp_path / "o").exists() and time.perf_counter() - begun < 60  # mostly imports, on a busy machine


def test_resume_needs_a_folder_and_a_taken_folder_needs_resume(tmp_path: Path) -> None:
    done = cli("-m", *SMALL, "resume=true")
    assert done.returncode == 2 and "name it: output_dir=FOLDER" in done.stderr
    (tmp_path / "0").mkdir()
    done = cli("-m", *SMALL, f"output_dir={tmp_path}")
    assert done.returncode == 2 and "resume=true to continue it" in done.stderr


@pytest.mark.parametrize("folder", ["/proc/nowhere", "/dev/null/out"])
def test_an_unwritable_folder_is_one_line(folder: str) -> None:
    """Before any work, for a run and for a sweep."""
    for mode in ([], ["-m"]):
        done = cli(*mode, *SMALL, f"output_dir={folder}")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"error: cannot write to {folder}: ")


@pytest.mark.slow
def test_eight_simultaneous_starts_get_eight_folders(tmp_path: Path) -> None:
    """E04: the same command at once; and of eight that want the same folder, one gets it."""
    here = [command(*SMALL)] * 8
    fixed = [command("-m", *SMALL, f"output_dir={tmp_path}/fixed")] * 8
    for commands, good in ((here, 8), (fixed, 1)):
        children = [
            subprocess.Popen(c, cwd=tmp_path, env=surroundings(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for c in commands
        ]
        ends = [(child.communicate()[1].decode(), child.returncode) for child in children]
        assert [code for _, code in ends].count(0) == good, ends
        assert all("choose another folder" in said for said, code in ends if code)
    assert len({folder.parent for folder in find_records(tmp_path / "runs")}) == 8
    assert len(find_records(tmp_path / "fixed")) == 1


@pytest.mark.slow
def test_one_failing_job_among_six(tmp_path: Path) -> None:
    """E01, G13: the others run, the index and the last line say which failed and why, the exit code is not 0."""
    words = [word for word in SMALL if "method=" not in word and "budget=" not in word]
    odd = "method.speculation.longest=2,3,4,5,6,-1"
    done = cli("-m", *words, "budget=embedded", "method=vegas", odd, f"output_dir={tmp_path}/s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1] == f"ok 5 / failed 1: {tmp_path}/s"
    jobs = index_of(tmp_path / "s")
    assert [job["status"] for job in jobs] == ["ok"] * 5 + ["failed"]
    assert "draft length" in jobs[5]["cells"][0]["error"] and odd.split("=")[0] + "=-1" in jobs[5]["overrides"]
    assert all((tmp_path / "s" / cell["record"] / "record.json").exists() for job in jobs for cell in job["cells"])
    page = (tmp_path / "s" / "index.md").read_text()
    assert page.count("| ok |") == 5 and page.count("| failed |") == 1


FULL = """
import sys
from experiments import records, run
whole = records.write_whole
def write_whole(path, text):
    if path.name in ("record.json", "requests.jsonl") and "/1/" in str(path):
        raise OSError(28, "No space left on device", str(path))
    whole(path, text)
records.write_whole = write_whole
sys.argv[0] = "run.py"
run.main()
"""


def test_a_disk_that_fills_up_keeps_what_was_finished(tmp_path: Path) -> None:
    """The job that could not write says so in one line; those before and after it stay, the exit code is not 0."""
    words = ["-m", *SMALL, "seed=1,2,3", f"output_dir={tmp_path}/s"]
    done = subprocess.run(
        [sys.executable, "-c", FULL, *words], cwd=ROOT, env=surroundings(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "job 1: OSError: [Errno 28] No space left on device" in errors[0]
    assert "Traceback" not in done.stderr
    assert done.stdout.strip().splitlines()[-1] == f"ok 2 / failed 1: {tmp_path}/s"
    assert [job["status"] for job in index_of(tmp_path / "s")] == ["ok", "failed", "ok"]
    assert check_records([f"{tmp_path}/s"]) == 0


def test_a_folder_in_use_is_not_resumed(tmp_path: Path) -> None:
    """Two processes may not go on with the same cell: requests would run twice."""
    hold = f"from experiments.hold import claim_dir; claim_dir({str(tmp_path / 'x')!r}); print(1, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", hold], env=surroundings(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == b"1\n"
    with pytest.raises(ValueError, match="is being written by another run"):
        claim_dir(tmp_path / "x", resume=True)
    child.kill()
    child.wait()
    claim_dir(tmp_path / "x", resume=True)
    claim_dir(tmp_path / "x", resume=True)  # by the process that has it


def test_nothing_of_a_cell_is_left_for_the_next(tmp_path: Path) -> None:
    """Pools, engines and prompts go when a comparison ends; a cell after another does the passes it does alone."""
    from aspire.cache import KVPool
    from aspire.engine import Engine
    from experiments.job import run

    def held() -> list[object]:
        gc.collect()
        return [x for x in gc.get_objects() if isinstance(x, KVPool | Engine)]

    one, two = configs(tmp_path, ["autoregressive"]), configs(tmp_path, ["vegas"], "verification=coupled")
    others = held()  # of tests before
    (alone,) = run(two, tmp_path / "alone")
    run(one, tmp_path / "before")
    assert not [x for x in held() if all(x is not other for other in others)]
    (after,) = run(two, tmp_path / "after")
    kinds = [
        [
            json.loads(line)["kinds"]
            for line in (tmp_path / name / after.cell_id / "passes.jsonl").read_text().splitlines()
        ]
        for name in ("alone", "after")
    ]
    assert kinds[0] == kinds[1] and alone.tokens == after.tokens


def test_seeds_are_pooled_only_when_asked(tmp_path: Path, capsys) -> None:
    """E14: three runs, three lines; with over=seed one line, sums divided by sums; another setting stays apart."""
    for seed, seconds in ((1, 1.0), (2, 2.0), (3, 3.0)):
        lines = requests(0.8, 4, seed=seed)
        write_record(tmp_path / str(seed), timed(lines, [seconds], seed=seed, config={"seed": seed}), lines)
    other = timed(lines, [1.0], seed=1, config={"seed": 1, "budget": {"ratio": 0.5}})
    write_record(tmp_path / "other", other, lines)
    records = [read_record(folder) for folder in find_records(tmp_path)]
    pooled, apart = over_seeds(records)
    assert (pooled[4], apart[4]) == ("1, 2, 3", "1")
    assert pooled[5].startswith(f"{sum(r.tokens.committed for r in records[:3]) / 6:.1f} (")
    assert summarise_folder([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("pystdlib") == 4
    assert summarise_folder([str(tmp_path), "over=seed"]) == 0
    assert capsys.readouterr().out.count("pystdlib") == 2


@pytest.mark.slow
def test_a_job_whose_time_is_up_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    """E03: what submitit does at a job's time limit, it signals; what was finished stays in the journal."""
    root = tmp_path / "s"
    words = ["-m", *QUALITY, "method=autoregressive", "benchmark.source.requests=10,2", f"output_dir={root}"]
    child = subprocess.Popen(
        command(*words), cwd=ROOT, env=surroundings(SUBMITIT_EXECUTOR="local"), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    while child.poll() is None and not any(lines_of(path) for path in (root / "0").rglob(JOURNAL)):
        time.sleep(0.01)
    child.send_signal(signal.SIGUSR2)
    said, _ = child.communicate(timeout=400)
    assert child.returncode == 1 and said.strip().splitlines()[-1] == f"ok 1 / failed 1: {root}"
    late, good = index_of(root)
    assert (late["status"], good["status"]) == ("timeout", "ok") and "timeout_min" in late["error"]
    assert any(lines_of(path) for path in (root / "0").rglob(JOURNAL))


def test_an_experiment_file_that_asks_for_a_launcher_gets_it_or_an_error(tmp_path: Path) -> None:
    """E05: in force where the sweep has one experiment; refused where Hydra would ignore it."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: joblib\nbatch: 2\n"
    )
    register()
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        assert plan_of(["-m", "experiment=mine", "seed=1,2"]).launcher.endswith("JoblibLauncher")
        assert plan_of(["-m", "experiment=mine,fig1_embedded", "hydra/launcher=joblib"]).launcher.endswith(
            "JoblibLauncher"
        )
        with pytest.raises(ValueError, match="experiment=mine asks for .*Joblib.*hydra/launcher=NAME"):
            plan_of(["-m", "experiment=fig1_embedded,mine"])


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_launchers_run_every_job_and_collect_a_failing_one(launcher: str, tmp_path: Path) -> None:
    """E03, E15: jobs go to other processes as plain config; the parent has no torch, so no CUDA context."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    words = ["-m", *SMALL, f"hydra/launcher={launcher}", "method=vegas", "method.speculation.longest=-1,2"]
    parent = "import sys; from experiments import run\ntry:\n run.main()\nfinally:\n print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", parent, *words, f"output_dir={tmp_path}/s"], cwd=ROOT, env=surroundings(),
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-2:] == [f"ok 1 / failed 1: {tmp_path}/s", "False"]
    assert [job["status"] for job in index_of(tmp_path / "s")] == ["failed", "ok"]
