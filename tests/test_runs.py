"""Does a run leave what the contract says, and does bad input get one clear error? Cells, sweeps, resumption, CLI."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import initialize_config_dir

from experiments import compare
from experiments.check import check
from experiments.config import CONF, check_overrides, for_method, plain, register
from experiments.fig1 import METHODS
from experiments.metrics import speedup
from experiments.records import find_records, read_record, read_requests
from experiments.run import run

ROOT = CONF.parent
SHAPE = (
    "{model_type:llama,vocab_size:49152,hidden_size:32,num_hidden_layers:3,num_attention_heads:4,num_key_value_heads:2,"
    "head_dim:8,intermediate_size:64,rms_norm_eps:1e-5,rope_theta:10000.0,max_position_embeddings:512,"
    "tie_word_embeddings:true}"
)
TINY = [
    "model.weights=random", f"model.shape={SHAPE}", "model.tokenizer=embedded", "benchmark=arithmetic",
    "benchmark.max_new_tokens=24", "benchmark.source.requests=3", "batch=2", "budget=embedded",
    "protocol.window_tokens=60", "protocol.warmup_passes=2", "protocol.repeats=2", "calibration.passes=24",
    "engine.device=cpu",
]  # fmt: skip


def configs(tmp_path: Path, methods: list[str], *more: str) -> list[dict]:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = [plain(for_method([*TINY, f"calibration.dir={tmp_path}/calibration", *more], m)) for m in methods]
    return [config | {"run_id": "test"} for config in made]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All nine methods on a tiny random model; the folder of their records."""
    out = tmp_path_factory.mktemp("comparison")
    made = configs(out, list(METHODS), "acceptance=measured")
    run(made, out / "cells")
    return out / "cells"


def test_every_method_of_the_figure_leaves_a_sound_record(comparison: Path) -> None:
    """Summaries recomputed from requests.jsonl equal the record exactly, for every method."""
    folders = find_records(comparison)
    records = {r.cell.method: r for r in map(read_record, folders)}
    assert {m: r.error for m, r in records.items()} == dict.fromkeys(METHODS)
    for folder in folders:
        check(folder)
        assert sum(line.committed for line in read_requests(folder)) >= 60
    base = records["autoregressive"]
    for record in records.values():
        value, reason = speedup(record, base)
        assert value is not None and reason is None
        assert record.workload.data_hash == base.workload.data_hash


def test_asynchronous_methods_mix_rows_and_lockstep_ones_do_not(comparison: Path) -> None:
    """With equal fixed draft lengths no pass is mixed, also when slots are refilled; staggered ones mix."""
    mixed = {}
    for folder in find_records(comparison):
        kinds = [json.loads(line)["kinds"] for line in (folder / "passes.jsonl").read_text().splitlines()]
        mixed[read_record(folder).cell.method] = sum({"D", "V"} <= set(k) for k in kinds)
    for method in ("autoregressive", "magicdec_stream", "magicdec_snapkv", "vegas", "aspire_fixed"):
        assert mixed[method] == 0, method
    assert mixed["sparsespec"] > 0 and mixed["aspire_fsm"] > 0


def test_every_draft_of_a_round_is_counted(comparison: Path) -> None:
    """Drafted counts the D rows of the window, save those of open rounds and those past a request's end."""
    for folder in find_records(comparison):
        passes = [json.loads(line) for line in (folder / "passes.jsonl").read_text().splitlines()]
        record = read_record(folder)
        lines = read_requests(folder)
        rows = sum(one["kinds"].count("D") for one in passes)
        longest = 16  # drafts that a request's last round, or one that the window cut, may hold beyond those counted
        assert rows - longest * (len(lines) + record.cell.batch) <= record.tokens.drafted <= rows
        refusing = [r for line in lines for r in line.rounds[:-1] if r[1] < r[0]]
        if record.cell.method in ("vegas", "aspire_fixed", "magicdec_stream"):
            fixed = {"vegas": 6, "aspire_fixed": 5, "magicdec_stream": 4}[record.cell.method]
            assert refusing and all(drafted == fixed for line in lines for drafted, _ in line.rounds[:-1])
        assert sum(one["tokens"] for one in passes) == record.tokens.committed


def test_the_seed_changes_prompts_and_noise(tmp_path: Path) -> None:
    """`seed` reaches the benchmark and the sampling of every request."""
    one, two = (run(configs(tmp_path, ["autoregressive"], f"seed={seed}"), tmp_path / str(seed))[0] for seed in (1, 2))
    assert one.workload.data_hash != two.workload.data_hash
    seeds = [[x.seed for x in read_requests(tmp_path / str(s) / r.cell_id)] for s, r in ((1, one), (2, two))]
    assert not set(seeds[0]) & set(seeds[1])


def test_a_pool_with_room_for_one_slot_preempts_and_still_finishes(tmp_path: Path) -> None:
    """The prefilled prompts stay shared when a request is preempted, so a small pool costs time, not the cell."""
    (full,) = run(configs(tmp_path, ["vegas"], "verification=coupled"), tmp_path / "full")
    pages = full.config["engine"]["pages"] - 3
    (tight,) = run(configs(tmp_path, ["vegas"], "verification=coupled", f"engine.pages={pages}"), tmp_path / "tight")
    assert tight.error is None
    texts = [
        {x.id: x.output_ids[:10] for x in read_requests(tmp_path / name / full.cell_id)[:2]}
        for name in ("full", "tight")
    ]
    assert texts[0] == texts[1]


def test_a_calibrated_method_records_its_cost_model(comparison: Path) -> None:
    """Rank, coefficients and MAPE are in the record, the file is on disk and is used again."""
    record = read_record(next(f for f in find_records(comparison) if read_record(f).cell.method == "aspire"))
    assert record.calibration is not None and record.calibration["rank"] == 3
    assert all(record.calibration["cost"][k] >= 0 for k in ("model", "mlp", "attn"))
    assert record.calibration["mape"] < 1
    assert len(list((comparison.parent / "calibration").glob("*.json"))) == 2  # aspire and vegas_async


def test_a_calibration_of_another_machine_is_refused(comparison: Path, tmp_path: Path) -> None:
    """Bad input: the file's key is checked, and the error says what differs."""
    shutil.copytree(comparison.parent / "calibration", tmp_path / "calibration")
    for path in (tmp_path / "calibration").glob("*.json"):
        content = json.loads(path.read_text())
        content["key"]["device"] = "another machine"
        path.write_text(json.dumps(content))
    (record,) = run(configs(tmp_path, ["aspire"]), tmp_path / "cells")
    assert record.status == "failed" and record.error is not None
    assert "device: file 'another machine'" in record.error


def test_emulated_acceptance_is_marked(tmp_path: Path) -> None:
    """Shapes evidence with drawn acceptance says so in its cell."""
    (record,) = run(configs(tmp_path, ["vegas"], "acceptance=iid", "acceptance.alpha=0.8"), tmp_path / "cells")
    assert (record.cell.evidence, record.cell.acceptance) == ("shapes", "emulated:iid(0.8)")
    assert 0.3 < record.metrics.acceptance_rate < 0.95


def test_emulation_on_real_weights_is_refused(tmp_path: Path) -> None:
    (record,) = run(configs(tmp_path, ["vegas"], "acceptance=iid", "model.weights=real"), tmp_path / "cells")
    assert record.status == "failed" and "weights=random" in str(record.error)


def test_a_failing_cell_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E01 within a comparison: the failed cell is a failed record, the others are measured."""
    healthy = compare.run_window

    def faulty(session, entry):
        if entry.cell.method == "vegas":
            raise RuntimeError("out of memory")
        return healthy(session, entry)

    monkeypatch.setattr(compare, "run_window", faulty)
    records = run(configs(tmp_path, ["autoregressive", "vegas", "aspire_fsm"]), tmp_path / "cells")
    assert [r.status for r in records] == ["ok", "failed", "ok"]
    assert "out of memory" in str(records[1].error) and records[1].metrics.decode_tok_s is None


def test_drain_runs_every_request_to_its_end(tmp_path: Path) -> None:
    (record,) = run(configs(tmp_path, ["vegas"], "protocol.replay=drain"), tmp_path / "cells")
    lines = read_requests(tmp_path / "cells" / record.cell_id)
    assert len(lines) == 3 and all(line.finish_reason for line in lines)


def test_an_existing_folder_is_refused_unless_resumed_or_overwritten(tmp_path: Path) -> None:
    """Bad input; G07: resume skips finished cells, and refuses those of another config naming what differs."""
    out = tmp_path / "cells"
    (first,) = run(configs(tmp_path, ["autoregressive"]), out)
    with pytest.raises(ValueError, match="resume=true"):
        run(configs(tmp_path, ["autoregressive"]), out)
    (again,) = run(configs(tmp_path, ["autoregressive"], "resume=true"), out)
    assert again == read_record(out / first.cell_id)
    with pytest.raises(ValueError, match="sampling.temperature: 0.7 there, 0.0 asked"):
        run(configs(tmp_path, ["autoregressive"], "resume=true", "sampling=greedy"), out)
    (new,) = run(configs(tmp_path, ["autoregressive"], "overwrite=true", "sampling=greedy"), out)
    assert new.status == "ok" and new.sampling.temperature == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["protocol.repeat=3"], "unknown key 'protocol.repeat' - did you mean 'protocol.repeats'"),
        (["metod=vegas"], "unknown key 'metod' - did you mean 'method'"),
        (["method=vegsa"], "unknown method 'vegsa' - did you mean 'vegas'"),
        (["method=autoregressive,aspier"], "unknown method 'aspier' - did you mean 'aspire'"),
        (["method.selection.flor=3"], "unknown key 'method.selection.flor' - did you mean 'method.selection.floor'"),
        (["method=magicdec_stream", "method.selection.probe=3"], "unknown key 'method.selection.probe'"),
        (["batch=many"], "batch"),
    ],
)
def test_a_misspelt_override_names_the_nearest_match(words: list[str], message: str) -> None:
    """E05: refused before any work; a key of one method given to another counts as unknown."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(ValueError) as caught:
        check_overrides(words)
    assert message in str(caught.value)


def test_overrides_of_every_group_are_accepted() -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(["method=vegas,aspire", "method/speculation=stepped", "sampling=greedy", "batch=1,8", "seed=1"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["benchmark=pystdlib", "benchmark.source.prompt_tokens=600"], ["600", "512"]),
        (["engine.pages=4"], ["pages", "engine.pages"]),
        (["model.weights=real", "model.path=/nowhere/model"], ["/nowhere/model"]),
        (["method.speculation.longest=-1", "method=vegas"], ["draft length"]),
        (["verification=greedy"], ["greedy", "temperature"]),
        (["protocol.replay=drian"], ["protocol.replay", "'drian'", "'drain'"]),
        (["batch=0"], ["slots"]),
        (["comparison.methods=[autoregressive,vegs]"], ["vegs", "vegas"]),
    ],
)
def test_bad_input_gets_one_clear_error(words: list[str], parts: list[str], tmp_path: Path, capsys) -> None:
    """The message names the numbers or files at fault; the record, if the cell got that far, keeps it."""
    from experiments.run import configs_of

    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            from hydra import compose

            overrides = [*TINY, f"calibration.dir={tmp_path}", *words, "output_dir=."]
            records = run(configs_of(compose("config", overrides), overrides, "test"), tmp_path / "cells")
            message = str(records[0].error)
            assert records[0].status == "failed"
        except ValueError as error:
            message = str(error)
    assert all(part in message for part in parts), message


def cli(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "experiments.run", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def test_a_sweep_with_failing_cells_exits_non_zero_and_counts_them(tmp_path: Path) -> None:
    """E01: the cells that can run do run; the last line counts both kinds and names the folder."""
    wide = SHAPE.replace("head_dim:8", "head_dim:64").replace("num_key_value_heads:2", "num_key_value_heads:4")
    words = [w if "model.shape" not in w else f"model.shape={wide}" for w in TINY if "batch" not in w]
    done = cli(ROOT, "-m", *words, "method=autoregressive,vegas", "batch=2,9999999", f"output_dir={tmp_path}/sweep")
    assert done.returncode != 0
    assert done.stdout.strip().splitlines()[-1] == f"ok 2 / failed 2: {tmp_path}/sweep", done.stdout + done.stderr
    errors = [read_record(f).error for f in find_records(tmp_path / "sweep")]
    assert sum("GiB" in str(e) for e in errors) == 2


def test_a_misspelt_key_on_the_command_line_is_one_line_and_no_folder(tmp_path: Path) -> None:
    done = cli(ROOT, "metod=vegas", f"output_dir={tmp_path}/out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.strip() == "error: unknown key 'metod' - did you mean 'method'?"


POLICY = '''"""Keep every other block before the tail: a method of one's own in a few lines."""

from dataclasses import dataclass

import torch

from aspire.policies import Selected, Selection


@dataclass(frozen=True)
class EveryOther(Selection):
    block: int = 16

    def capacity(self, max_len):
        return max_len // self.block + 1

    def select(self, scores, seen, length):
        blocks = torch.arange(0, 1024, 2).expand(1, len(length), -1)
        return Selected(blocks, (length // 32)[None], length // 32 * 32)
'''
YAML = """defaults:
  - speculation: fixed
  - refresh: every_row
  - _self_
_target_: aspire.policies.Method
name: every_other
label: Every other block
selection:
  _target_: baselines.every_other.EveryOther
"""


def test_a_reader_adds_a_method_in_two_small_files(tmp_path: Path) -> None:
    """A policy of at most 20 lines and a YAML, nothing else touched; it runs from the command line."""
    assert len(POLICY.splitlines()) <= 20
    for folder in ("aspire", "baselines", "experiments", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "baselines" / "every_other.py").write_text(POLICY)
    (tmp_path / "conf" / "method" / "every_other.yaml").write_text(YAML)
    done = cli(tmp_path, *TINY, "method=every_other", "verification=coupled", f"output_dir={tmp_path}/out")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = find_records(tmp_path / "out")
    record = read_record(folder)
    assert record.cell.method == "every_other" and record.tokens.drafted > 0 and record.metrics.acceptance_rate < 1
