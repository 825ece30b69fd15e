"""Do runs that time shapes alone leave sound records? Random weights, random prompts, one engine for all windows."""

import json
from pathlib import Path

import pytest
from hydra import initialize_config_dir

from experiments import compare
from experiments.bench_gpu import SUITES, configs_for, line_of, predict, words_for
from experiments.benchmarks import Shapes
from experiments.check import check
from experiments.config import CONF, for_method, plain, register
from experiments.gate import Gate
from experiments.layout import lay_out, make_method, resolve
from experiments.loading import Config, spec_of, unload
from experiments.metrics import compared, predicted_speedup, predicted_tok_s, speedup
from experiments.records import PASSES, find_records, read_record, read_requests
from experiments.run import run

SHAPE = (
    "{model_type:qwen3,vocab_size:509,hidden_size:32,num_hidden_layers:3,num_attention_heads:4,num_key_value_heads:2,"
    "head_dim:8,intermediate_size:64,rms_norm_eps:1e-5,rope_theta:10000.0,max_position_embeddings:4096,"
    "tie_word_embeddings:true,eos_token_id:[1,2,3,4,5,6,7,8]}"
)
WORDS = {
    "model.weights": "random", "model.shape": SHAPE, "model.tokenizer": "/nowhere", "model.dtype": "float32",
    "benchmark": "shapes", "benchmark.source.context": "150", "benchmark.max_new_tokens": "40", "batch": "2",
    "budget": "embedded", "acceptance": "iid", "acceptance.alpha": "0.8", "protocol.prompt_kv": "random",
    "protocol.tokens_per_slot": "16", "protocol.warmup_passes": "2", "protocol.repeats": "2",
    "calibration.passes": "24", "engine.device": "cpu",
}  # fmt: skip


def configs(folder: Path, methods: list[str], **words: str) -> list[Config]:
    """Configs of a shapes run without a tokenizer in reach; dots of a key are written as __."""
    given = WORDS | {"calibration.dir": f"{folder}/calibration"} | {k.replace("__", "."): v for k, v in words.items()}
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        made = [plain(for_method([f"{k}={v}" for k, v in given.items()], m)) for m in methods]
    return [config | {"run_id": "test"} for config in made]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes")
    run(configs(out, ["autoregressive", "aspire", "sparsespec"]), out / "cells")
    return out / "cells"


def test_a_comparison_of_shapes_leaves_sound_records(cells: Path) -> None:
    records = {r.cell.method: r for r in map(read_record, find_records(cells))}
    assert {m: r.error for m, r in records.items()} == dict.fromkeys(["autoregressive", "aspire", "sparsespec"])
    for folder in find_records(cells):
        check(folder)
        lines = read_requests(folder)
        assert all(line.prompt_tokens == 150 for line in lines) and len(lines) == 2
        assert all(line.finish_reason is None for line in lines), "an end id of random weights ends nothing"
    for record in records.values():
        assert (record.cell.evidence, record.cell.acceptance) == ("shapes", "emulated:iid(0.8)")
        protocol = record.protocol
        assert protocol["prompt_kv"] == "random" and protocol["window_tokens"] == 32
        assert (protocol["batch_mode"], protocol["graphs"], protocol["graph_misses"]) == ("equal", False, 0)
        assert protocol["planned_gib"] > 0 and record.timing.host_gap is None
        assert record.config["engine"]["prefill_chunk"] == 512 and record.config["engine"]["graphs"] is False
        assert speedup(record, records["autoregressive"])[0] is not None


def test_other_engine_settings_or_another_prompt_kv_have_no_speedup(cells: Path) -> None:
    """B11, B13: graphs and the prompts' KV count among what two cells must share; misses and the plan do not."""
    base = read_record(next(f for f in find_records(cells) if "autoregressive" in f.name))
    for section, key in (("engine", "graphs"), ("engine", "prefill_chunk")):
        other = base.model_copy(deep=True)
        other.config[section][key] = not base.config[section][key]
        assert f"engine settings differs from the baseline's ({key}" in str(speedup(other, base)[1])
    for key in ("prompt_kv", "graphs"):
        other = base.model_copy(deep=True)
        other.protocol[key] = "else"
        assert key in str(speedup(other, base)[1])
    other = base.model_copy(deep=True)
    other.protocol |= {"graph_misses": 3, "planned_gib": 99.0}
    assert speedup(other, base)[0] == 1.0


def test_batches_may_differ_only_where_each_method_has_its_own(cells: Path) -> None:
    base = read_record(next(f for f in find_records(cells) if "autoregressive" in f.name))
    other = base.model_copy(deep=True)
    other.cell.batch += 1
    assert "batch differs" in str(speedup(other, base)[1])
    for record in (base, other):
        record.protocol["batch_mode"] = "max_fit"
    assert compared(other)["batch"] == "max_fit" and speedup(other, base)[0] == 1.0


def test_one_engine_serves_all_windows_and_says_the_same_in_each(tmp_path: Path) -> None:
    """Repeats start from the same state: tokens, rounds and passes agree; pages come back in between."""
    for method in ("aspire_fsm", "sparsespec", "vegas"):
        made = [resolve(c) for c in configs(tmp_path, [method], acceptance="measured", verification="coupled")]
        layout = lay_out(made[0], [make_method(made[0])])
        session = compare.open_session(layout)
        entry = compare.Entry(layout.config, compare.cell_of(layout.config), make_method(made[0]))
        free = session.pool.allocator.free_pages
        compare.prepare(entry, session, lambda line: None)
        engine, windows = entry.engine, []
        for _ in range(3):
            windows.append(compare.run_window(session, entry))
            assert entry.engine is engine and session.pool.allocator.free_pages == free
        outputs = [[(r.output_ids, r.rounds) for r in w.requests] for w in windows]
        assert outputs[0] == outputs[1] == outputs[2]
        assert len({tuple(p.kinds for p in w.passes) for w in windows}) == 1


def test_a_run_at_max_fit_records_its_batches_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number stands in cell, config and prompts; a resumed run, whatever memory is free, keeps what is there."""
    unload()
    monkeypatch.setattr("experiments.layout.free_bytes", lambda device: 12 * 2**20)
    made = configs(tmp_path, ["autoregressive", "vegas"], batch="max_fit", comparison__batch_mode="max_fit")
    records = run(made, tmp_path / "cells")
    assert [r.error for r in records] == [None, None]
    batches = [r.cell.batch for r in records]
    assert batches[0] > batches[1] > 1 and [r.config["batch"] for r in records] == batches
    assert all(r.config["benchmark"]["source"]["requests"] == r.workload.requests == batches[0] for r in records)
    assert all(
        r.protocol["window_tokens"] == 16 * batches[0] and r.protocol["batch_mode"] == "max_fit" for r in records
    )
    assert speedup(records[1], records[0])[0] is not None
    monkeypatch.setattr("experiments.layout.free_bytes", lambda device: 1)
    again = run([config | {"resume": True} for config in made], tmp_path / "cells")
    assert [r.cell_id for r in again] == [r.cell_id for r in records]
    monkeypatch.setattr("experiments.layout.free_bytes", lambda device: 2**16)
    failed = run(configs(tmp_path, ["autoregressive"], batch="max_fit"), tmp_path / "small")
    assert failed[0].cell.batch == 0 and "GiB" in str(failed[0].error)


def test_random_prompts_on_real_weights_are_refused(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, ["autoregressive"], model__weights="real", acceptance="measured")
    with pytest.raises(ValueError, match=r"is for model.weights=random"):
        resolve(config)


def test_shapes_have_exactly_the_tokens_asked_for_and_follow_the_seed() -> None:
    items = Shapes(context=63, requests=3, vocab=17, seed=1).build(None, 128, 8)
    assert [len(item.prompt_ids) for item in items] == [63] * 3 and len({item.prompt_ids for item in items}) == 3
    assert all(0 <= x < 17 for item in items for x in item.prompt_ids)
    assert items == Shapes(63, 3, 17, seed=1).build(None, 128, 8) != Shapes(63, 3, 17, seed=2).build(None, 128, 8)
    with pytest.raises(ValueError, match="context"):
        Shapes(63, 1, 17).build(None, 64, 8)
    with pytest.raises(ValueError, match="requests"):
        Shapes(63, 0, 17)


def test_the_speedup_that_bytes_allow(cells: Path) -> None:
    """By hand: two draft passes and a verify against three plain passes; a record without the numbers has none."""
    base = read_record(next(f for f in find_records(cells) if "autoregressive" in f.name))
    base.environment.copy_tb_s = 1e-6  # a megabyte a second
    base.protocol |= {"pass_bytes": 1000, "kv_bytes": 10}
    plain_pass = {"tokens": 1, "fed": 1, "kv_tokens": 99.0}  # 1000 + 10 * 100 = 2000 bytes a token
    drafts = [{"tokens": 0, "fed": 1, "kv_tokens": 9.0}] * 2  # 1100 bytes each
    verify = [{"tokens": 3, "fed": 3, "kv_tokens": 97.0}]  # 2000 bytes
    assert predicted_tok_s(base, [plain_pass] * 3) == pytest.approx(1e6 / 2000)
    assert predicted_tok_s(base, drafts + verify) == pytest.approx(3e6 / 4200)
    assert predicted_speedup(base, drafts + verify, base, [plain_pass] * 3) == pytest.approx(3 / 4200 * 2000)
    assert predicted_tok_s(base, [{"tokens": 1}]) is None
    base.environment.copy_tb_s = None
    assert predicted_tok_s(base, drafts) is None


def test_the_gpu_benchmark_reads_its_cells_back(cells: Path) -> None:
    bench = SUITES["shapes"][0]
    lines = [line_of(bench, read_record(folder)) for folder in find_records(cells)]
    predict(lines, cells)
    by_method = {line["method"]: line for line in lines}
    assert by_method["aspire"]["share"] == pytest.approx(
        by_method["aspire"]["speedup"] / by_method["aspire"]["predicted"], abs=2e-3
    )
    assert "speedup" not in by_method["autoregressive"] and by_method["autoregressive"]["context"] == 150
    passes = [json.loads(x) for x in (find_records(cells)[0] / PASSES).read_text().splitlines()]
    assert all({"fed", "kv_tokens"} <= one.keys() for one in passes)


@pytest.mark.parametrize("suite", SUITES)
def test_every_cell_of_the_gpu_benchmark_composes(suite: str, tmp_path: Path) -> None:
    """Names, and architectures that reach as far as the cell: 100,000 tokens without a download."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for bench in SUITES[suite]:
            made = configs_for(bench, [], tmp_path)
            assert len({c["method"]["name"] for c in made}) == len(made) == len(bench.methods) + len(bench.fixed)
            for config in made:
                answer = config["benchmark"]["max_new_tokens"]
                assert answer > config["protocol"]["tokens_per_slot"]
                if config["model"]["weights"] == "random":
                    assert config["benchmark"]["source"]["context"] + answer <= spec_of(config).max_len
            words = words_for(bench, ["batch=3", "acceptance=measured"], tmp_path)
            assert "batch=3" in words and "acceptance=measured" in words


def test_greedy_texts_are_held_to_full_attention(tmp_path: Path) -> None:
    """The gate's counts are in the record, and a text that full attention does not say fails its cell."""
    greedy = {"sampling": "greedy", "verification": "greedy", "acceptance": "measured", "protocol__gate": "2"}
    made = configs(
        tmp_path, ["autoregressive", "vegas"], protocol__prompt_kv="prefill", protocol__repeats="1", **greedy
    )
    for record in compare.run_comparison(made, tmp_path / "cells", lambda line: None):
        assert record.status == "ok", record.error
        gate = (record.protocol or {})["gate_counts"]
        assert gate["passed"] and gate["tokens"] >= 2 * 10 and not gate["wrong"] and not gate["parted_wrong"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "judge", lambda forced: Gate(tokens=9, wrong=1))
        (record,) = compare.run_comparison(made[:1], tmp_path / "again", lambda line: None)
    assert record.status == "failed" and "full attention" in (record.error or "")


def test_the_gate_is_for_greedy_texts(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, ["vegas"], protocol__gate="2")
    with pytest.raises(ValueError, match="sampling=greedy"):
        resolve(config)
