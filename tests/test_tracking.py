"""Do records reach the tracker one run each, without secrets, and can a broken tracker harm or delay a cell?"""

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from fake_records import requests, timed

from experiments import tracking
from experiments.records import read_record, write_record
from experiments.tracking import HIDDEN, hide, rounds, send, track
from experiments.upload import main as upload

ASKED: dict[str, Any] = {"mode": "offline", "project": "aspire", "entity": None, "group": None, "timeout_s": 60}


def folder_of(root: Path, name: str = "good", **changes: Any) -> Path:
    """A record's folder; a FIXTURE, as all of fake_records."""
    lines = requests(0.8, 4)
    write_record(root / name, timed(lines, [1.0]).model_copy(update={"cell_id": name, **changes}), lines)
    return root / name


class Run:
    """Stands for wandb's run; `ends` gets what it held when it was finished."""

    def __init__(self, ends: list[Any], arguments: dict[str, Any]) -> None:
        self.ends, self.arguments = ends, arguments
        self.summary: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.files: list[str] = []

    def log(self, content: dict[str, Any]) -> None:
        self.logged |= content

    def log_artifact(self, artifact: "Artifact") -> None:
        self.files = artifact.files

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        self.ends.append(self)


class Artifact:
    def __init__(self, name: str, type: str) -> None:
        self.files: list[str] = []

    def add_file(self, path: str) -> None:
        self.files.append(Path(path).name)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """A module in wandb's place; the runs it closed."""
    closed: list[Run] = []
    module: Any = types.ModuleType("wandb")
    module.init, module.Artifact = lambda **words: Run(closed, words), Artifact
    module.Settings, module.Table = lambda **words: words, lambda columns, data: data
    monkeypatch.setitem(sys.modules, "wandb", module)
    return closed


def test_every_record_is_a_run_of_its_own(tmp_path: Path, ends: list[Run]) -> None:
    """E09: own config, summary, rounds and files, one group; the failed one is closed as failed."""
    folders = [folder_of(tmp_path), folder_of(tmp_path, "bad", status="failed", error="out of memory")]
    for folder in folders:
        send(folder, ASKED | {"group": "sweep"})
    good, bad = ends
    assert [(run.arguments["name"], run.exit_code) for run in ends] == [("good", 0), ("bad", 1)]
    assert {run.arguments["group"] for run in ends} == {"sweep"} and not any("id" in run.arguments for run in ends)
    record = read_record(folders[0])
    assert good.summary["metrics/decode_tok_s"] == record.metrics.decode_tok_s
    assert bad.summary["error"] == "out of memory"
    assert good.files == ["record.json", "requests.jsonl"]
    assert sum(count for _, _, count in good.logged["rounds"]) == record.tokens.rounds
    assert good.arguments["config"] == record.config


def test_rounds_are_counted_by_what_was_drafted_and_accepted() -> None:
    lines = requests(0.5, 2, count=3, rounds=5)
    found = {(drafted, accepted): count for drafted, accepted, count in rounds(lines)}
    assert sum(found.values()) == 15 and sum(a * n for (_, a), n in found.items()) == sum(x.accepted for x in lines)


def test_secrets_are_hidden_and_settings_are_not() -> None:
    """By name, and by look wherever they stand; token counts, commits and hashes stay."""
    secret = {
        "hf_token": "x", "wandb": {"api_key": "y"}, "password": "z", "plain": "hf_" + "a" * 20,
        "list": ["sk-" + "b" * 24], "url": "https://me:pw@host/x", "key": "0123456789" * 4,
        "Authorization": {"bearer": "q"},
    }  # fmt: skip
    hidden = json.dumps(hide(secret))
    assert hidden.count(HIDDEN) == 8
    kept = {
        "max_new_tokens": 5, "tokens_per_slot": None, "tokenizer": "embedded", "model": {"revision": "0123456789" * 4},
        "prompt_tokens": "max_fit", "path": "/data/a.jsonl", "window_tokens": 3, "sha256": "ab" * 32, "token": None,
    }  # fmt: skip
    assert hide(kept) == kept


def test_disabled_tracking_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E11: no process, so no network, folder or prompt, whatever the environment says."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(tracking.subprocess, "Popen", never)
    monkeypatch.setenv("WANDB_MODE", "online")
    assert not track(folder_of(tmp_path), ASKED | {"mode": "disabled"}, "sweep")
    assert "wandb" not in {path.name for path in tmp_path.rglob("*")}


def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None) -> None:
    """No network: a server address at which nothing listens; no key but the given one."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "short", "0123456789" * 4])
def test_no_key_a_wrong_key_and_no_network_are_one_warning(
    key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E11 with the real client: bounded in time, nothing asked of the user, the record untouched."""
    pytest.importorskip("wandb")
    unreachable(monkeypatch, tmp_path, key)
    folder = folder_of(tmp_path)
    before, begun = (folder / "record.json").read_bytes(), time.perf_counter()
    with pytest.warns(UserWarning, match="the record on disk is complete; send it with: .*upload") as caught:
        assert not track(folder, ASKED | {"mode": "online", "timeout_s": 20}, "sweep")
    assert time.perf_counter() - begun < 30 and len(str(caught[0].message).splitlines()) == 1
    assert (folder / "record.json").read_bytes() == before
    assert key is None or key not in str(caught[0].message)


@pytest.mark.slow
def test_offline_runs_of_a_resumed_sweep_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E12 with the real client: each sending is a run with an id of its own; nothing sent before is touched."""
    pytest.importorskip("wandb")
    unreachable(monkeypatch, tmp_path, None)
    monkeypatch.setenv("WANDB_MODE", "online")
    folder = folder_of(tmp_path / "runs")
    assert track(folder, ASKED, "sweep")
    (first,) = (folder / "wandb").glob("offline-run-*")
    content = {path: path.stat().st_mtime_ns for path in first.rglob("*.wandb")}
    assert upload([str(tmp_path / "runs"), "mode=offline"]) == 0
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 2
    assert content and {path: path.stat().st_mtime_ns for path in content} == content


def test_a_tracker_that_hangs_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.sys, "executable", str(tmp_path / "hang"))
    (tmp_path / "hang").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "hang").chmod(0o755)
    begun = time.perf_counter()
    with pytest.warns(UserWarning, match="no answer in 1 s"):
        assert not track(folder_of(tmp_path), ASKED | {"timeout_s": 1}, "sweep")
    assert time.perf_counter() - begun < 20


def test_upload_counts_what_was_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Bad input: no folder, no records, a misspelt mode; a record that could not be sent counts."""
    for words in ([], [str(tmp_path)], [str(tmp_path), "mode=onlin"]):
        with pytest.raises(ValueError, match="give"):
            upload(words)
    folder_of(tmp_path, "a"), folder_of(tmp_path, "b")
    monkeypatch.setattr("experiments.upload.track", lambda folder, asked, group: folder.name == "a")
    assert upload([str(tmp_path)]) == 1
    assert "sent 1 of 2 records" in capsys.readouterr().out
