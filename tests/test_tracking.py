"""Do records reach the tracker one run each, and can a broken tracker harm a cell?"""

import sys
import types

import pytest
from fake_records import requests, timed

from experiments.records import Record
from experiments.tracking import track


def fake_record() -> Record:
    return timed(requests(0.8, 4), [1.0])


class Run:
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name, self.summary = log, name, {}

    def finish(self, exit_code: int = 0) -> None:
        self.log.append((self.name, exit_code, self.summary))


def stub(monkeypatch: pytest.MonkeyPatch, log: list, broken: bool = False) -> None:
    """A module in wandb's place."""

    def init(**arguments):
        if broken:
            raise ConnectionError("no network")
        log.append(("init", arguments["name"], arguments["group"], arguments["mode"]))
        return Run(log, arguments["name"])

    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)


ONLINE = {"mode": "offline", "project": "aspire", "entity": None, "group": None}


def test_every_record_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """E09: opened and closed in turn, one group, the failed one closed as failed."""
    log: list = []
    stub(monkeypatch, log)
    good = fake_record()
    bad = good.model_copy(update={"cell_id": "bad", "status": "failed"})
    for one in (good, bad):
        track(one, ONLINE, "sweep")
    assert [entry[:2] for entry in log] == [
        ("init", good.cell_id), (good.cell_id, 0), ("init", "bad"), ("bad", 1),
    ]  # fmt: skip
    assert log[1][2]["metrics/decode_tok_s"] == good.metrics.decode_tok_s
    assert {entry[2] for entry in log if entry[0] == "init"} == {"sweep"}


def test_disabled_tracking_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """E11: whatever the environment says."""
    log: list = []
    stub(monkeypatch, log, broken=True)
    monkeypatch.setenv("WANDB_MODE", "online")
    track(fake_record(), ONLINE | {"mode": "disabled"}, "sweep")
    assert log == []


def test_a_broken_tracker_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, [], broken=True)
    with pytest.warns(UserWarning, match="the record on disk is complete: no network"):
        track(fake_record(), ONLINE, "sweep")
