"""Do the tables and figures of GPU runs show what lies there, divided within a comparison only, and nothing else?"""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pandas as pd
import pytest

from experiments import gpu_figures, gpu_tables
from experiments.check import main as check
from experiments.records import PASSES, failed_record, read_record, write_record
from experiments.redraw import redraw
from experiments.tables import BASELINE
from tests.fake_records import METHODS, requests, timed, write_comparison

FIXED = "aspire.policies.Fixed"
DEVICE = {"device": "FAKE GPU", "copy_tb_s": 4.0, "dirty": False, "commit": "0123456789abcdef"}
SIZES = {"pass_bytes": 1e9, "kv_bytes": 1e5}
# method -> (acceptance, drafts, seconds a token, passes)
SHAPES = {BASELINE: (0.0, 0, 0.010, 40), "aspire": (0.95, 12, 0.004, 10)}


def comparison(
    folder: Path, model: str, context: int, batch: int, methods: dict[str, tuple[float, int, float, int]],
    mode: str = "equal", acceptance: str = "emulated:iid(0.95)", prompt_kv: str = "random", failing: str = "",
) -> None:  # fmt: skip
    """A cell a method, as experiments/bench_gpu.py leaves them."""
    for name, (alpha, drafts, per_token, passes) in methods.items():
        lines = requests(alpha, drafts)
        total = sum(line.committed for line in lines) * per_token
        speculation = {"_target_": FIXED if "fixed" in name else "aspire.policies.ClosedForm", "longest": drafts}
        record = timed(
            lines, [total, 0.9 * total, 1.2 * total], name, label=name.replace("_", " "), environment=DEVICE,
            model=model, benchmark="shapes", batch=batch, evidence="shapes", acceptance=acceptance,
            config={
                "run_id": folder.parent.name, "comparison": {"methods": None, "batch_mode": mode},
                "method": {"name": name, "label": name.replace("_", " "), "speculation": speculation},
                "benchmark": {"name": "shapes", "source": {"context": context}},
            },
        )  # fmt: skip
        record.workload.prompt_tokens.max = context
        record.timing.host_gap, record.metrics.hbm_efficiency = 0.0125, 0.8765
        protocol = {"batch_mode": mode, "prompt_kv": prompt_kv, "planned_gib": 2.5, **SIZES}
        record = record.model_copy(update={"protocol": protocol})
        cell = folder / f"{model}-shapes-{name}-b{batch}-s123"
        if name == failing:
            write_record(cell, failed_record(record.cell, record.config, "out of memory"))
            continue
        write_record(cell, record, lines)
        one = {"kinds": "V" * batch, "ms": 1.0, "tokens": record.tokens.committed / passes, "fed": 0, "kv_tokens": 0.0}
        (cell / PASSES).write_text("".join(json.dumps(one) + "\n" for _ in range(passes)))


ATTENTION: dict[str, Any] = {"gb": 4.0, "us": 1000.0, "tb_s": 4.0, "share": 1.0}
KERNELS = {
    "environment": DEVICE | {"torch": "2", "triton": "3", "driver": "5"},
    "copy_tb_s": 4.0,
    "attention": [
        ATTENTION | {"cell": "dense 12 x 90,000", "bound": 1.0, "ok": True},
        ATTENTION | {"cell": "dense 128 x 7,000", "bound": None, "ok": None},
        ATTENTION | {"cell": "draft 12 x 90,000", "share": 0.8, "bound": 0.85, "ok": False},
        ATTENTION | {"cell": "mixed 12 x 90,000", "over_dense": 1.1, "bound": 1.12, "ok": True},
        {"cell": "scores of dense", "us": 1000.0, "tapped_us": 1010.0, "reduced_us": 1020.0, "taps_add": 0.01,
         "scores_add": 0.02, "bound": 0.03, "ok": True},
    ],
    "flash": [{"cell": "dense 12 x 90,000", "module": "m", "tb_s": 3.6, "share": 0.9},
              {"cell": "dense 128 x 7,000", "error": "ImportError: a|b"}],
    "kernels_us": {"sample": 12.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All suites, written in an order that no table has."""
    root = tmp_path_factory.mktemp("records")
    gpu = root / gpu_tables.GPU
    plain = {BASELINE: SHAPES[BASELINE]}
    for model, batch, context in (("qwen3_8b", 7, 90000), ("qwen3_1p7b", 32, 32768), ("qwen3_1p7b", 64, 4096)):
        kv, failing = ("random", "") if context == 4096 else ("prefill", BASELINE if batch == 7 else "")
        comparison(gpu / "autoregressive" / f"{model}-{context}-{batch}", model, context, batch, plain,
                   acceptance="measured", prompt_kv=kv, failing=failing)  # fmt: skip
    for model in ("qwen3_8b", "qwen3_1p7b"):
        for mode, batch in (("max_fit", 9), ("equal", 8)):
            comparison(gpu / "shapes" / f"{model}-17000-fit-{mode}", model, 17000, batch, SHAPES, mode)
    lost = next((gpu / "shapes" / "qwen3_8b-17000-fit-equal").glob(f"*aspire*/{PASSES}"))
    lost.unlink()
    fixed = {f"aspire_fixed_{n}": (0.9, n, 0.005 + 0.001 * abs(n - 3), 20) for n in (10, 2, 3)}
    comparison(gpu / "hetero" / "qwen3_1p7b-90000-12", "qwen3_1p7b", 90000, 12, {**fixed, **SHAPES},
               acceptance="emulated:hetero(0.8,0.3)")  # fmt: skip
    for batch in (64, 8):
        write_comparison(gpu / "smollm2" / f"smollm2_135m-7000-{batch}", ["pystdlib"], batch=batch, environment=DEVICE)
    (gpu / gpu_tables.KERNELS).write_text(json.dumps(KERNELS))
    theirs = {"model": "qwen3-1.7b", "step_ms": 11.0, "tok_s": 200.0, "kv_gb": 30.0}
    lines = [
        theirs | {"batch": 64, "context": 4096, "prefill_s": 1.0},
        theirs | {"batch": 32, "context": 32768, "prefill_s": 4.0},
    ]
    (gpu / gpu_tables.VLLM).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture(scope="module")
def out(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    redraw(root, out)
    return out


def table(out: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(out / "tables" / f"{name}.csv")


def test_everything_that_lies_there_is_written_and_figure_1_is_left_alone(out: Path) -> None:
    names = ["autoregressive", "hetero", "kernels", "shapes", "smollm2"]
    assert sorted(path.name for path in (out / "tables").iterdir()) == [
        f"gpu_{name}.{suffix}" for name in names for suffix in ("csv", "md")
    ]
    assert sorted(path.name for path in (out / "figures").iterdir()) == [
        f"gpu_{name}.{suffix}" for name in ("shapes", "smollm2") for suffix in ("pdf", "png")
    ]


def test_nothing_is_written_where_there_are_no_gpu_runs(tmp_path: Path) -> None:
    write_comparison(tmp_path / "records" / "fig1", ["pystdlib"])
    written = redraw(tmp_path / "records", tmp_path / "out")
    assert {path.name.split(".")[0] for path in written} == {"fig1"}
    assert not list((tmp_path / "out").rglob("gpu_*"))
    assert gpu_tables.write_gpu_tables(tmp_path / "none", tmp_path / "t") == []
    assert gpu_figures.write_gpu_figures({}, tmp_path / "f") == []
    assert not (tmp_path / "t").exists() and not (tmp_path / "f").exists()


def test_kernels_alone_are_enough(root: Path, tmp_path: Path) -> None:
    gpu = tmp_path / "records" / gpu_tables.GPU
    gpu.mkdir(parents=True)
    (gpu / gpu_tables.KERNELS).write_bytes((root / gpu_tables.GPU / gpu_tables.KERNELS).read_bytes())
    assert {path.stem for path in redraw(tmp_path / "records", tmp_path / "out")} == {"gpu_kernels"}


def test_gpu_runs_stay_out_of_figure_1(root: Path, tmp_path: Path) -> None:
    both = tmp_path / "records"
    write_comparison(both / "fig1", ["arithmetic"])
    alone = redraw(both, tmp_path / "alone")
    copytree(root / gpu_tables.GPU, both / gpu_tables.GPU)
    redraw(both, tmp_path / "both")
    for path in alone:
        assert path.read_bytes() == (tmp_path / "both" / path.relative_to(tmp_path / "alone")).read_bytes()
    assert (tmp_path / "both" / "tables" / "gpu_shapes.md").exists()


def test_the_same_files_give_the_same_bytes(root: Path, out: Path, tmp_path: Path) -> None:
    for path in redraw(root, tmp_path):
        assert path.read_bytes() == (out / path.relative_to(tmp_path)).read_bytes(), path.name


def test_plain_decoding_stands_beside_vllm(out: Path) -> None:
    rows = table(out, "gpu_autoregressive")
    assert list(zip(rows["model"], rows["context"])) == [
        ("qwen3_1p7b", 4096), ("qwen3_1p7b", 32768), ("qwen3_8b", 90000)
    ]  # fmt: skip
    filled, prefilled, failed = rows.to_dict("records")
    assert filled["decode tok/s"] == pytest.approx(100) and filled["tok/s / vLLM's"] == pytest.approx(0.5)
    assert (filled["decode tok/s min"], filled["decode tok/s max"]) == pytest.approx((100 / 1.2, 100 / 0.9), rel=1e-5)
    assert filled["HBM efficiency"] == 0.8765 and filled["host gap"] == 0.0125 and filled["planned GiB"] == 2.5
    assert filled["step ms"] == pytest.approx(8 * 12 * 10 / 120)  # ms of 96 tokens in 120 passes
    assert pd.isna(filled[gpu_tables.PREFILL]) and pd.isna(filled["prefill / vLLM's"])
    assert filled["note"] == "no prefill: prompt KV is random"
    assert prefilled[gpu_tables.PREFILL] == pytest.approx(2.0 / 8) and pd.isna(prefilled["note"])
    assert prefilled["prefill / vLLM's"] == pytest.approx((2.0 / 8) / (4.0 / 32))
    assert (
        pd.isna(failed["decode tok/s"])
        and failed["note"] == "autoregressive failed: out of memory; vLLM not measured at this batch"
    )


def test_shapes_are_predicted_measured_and_marked(out: Path) -> None:
    rows = table(out, "gpu_shapes")
    assert list(rows["model"]) == ["qwen3_1p7b"] * 4 + ["qwen3_8b"] * 4
    assert list(rows["batch mode"]) == ["equal", "equal", "max_fit", "max_fit"] * 2
    assert list(rows["method"]) == [BASELINE, "aspire"] * 4
    assert set(rows["acceptance source"]) == {"emulated:iid(0.95)"}
    aspire = rows[rows["method"] == "aspire"]
    assert list(aspire["decode speed-up"]) == pytest.approx([2.5] * 4)
    allowed = 4 * rows.iloc[1][gpu_tables.ROUND]  # 40 passes against 10, and as many rounds of more tokens
    assert rows.iloc[1]["predicted speed-up"] == pytest.approx(allowed, rel=1e-4)
    assert rows.iloc[1]["measured / predicted"] == pytest.approx(2.5 / allowed, rel=1e-4)
    lost = rows[(rows["model"] == "qwen3_8b") & (rows["batch mode"] == "equal")].iloc[1]
    assert pd.isna(lost["predicted speed-up"]) and lost["note"] == f"no prediction: aspire has no {PASSES}"
    text = (out / "tables" / "gpu_shapes.md").read_text()
    assert "acceptance emulated: drawn" in text and "† emulated acceptance" in text
    assert all("†" in line for line in text.splitlines() if line.startswith("| qwen3"))
    assert "acceptance (accepted/drafted)" not in text


def test_the_best_fixed_length_is_marked_and_the_method_divided_by_it(out: Path) -> None:
    rows = table(out, "gpu_hetero")
    assert list(rows["method"]) == [BASELINE, *(f"aspire_fixed_{n}" for n in (2, 3, 10)), "aspire"]
    assert list(rows["draft length"].dropna()) == [2, 3, 10]
    assert list(rows.loc[rows["best fixed length"] == "best", "method"]) == ["aspire_fixed_3"]
    assert rows.iloc[-1]["tok/s / best fixed length's"] == pytest.approx(5 / 4)


def test_real_text_has_all_methods_by_batch_with_acceptance(out: Path) -> None:
    rows = table(out, "gpu_smollm2")
    ordered = sorted(METHODS, key=lambda name: gpu_tables.METHODS.index(name))
    assert list(rows["batch"]) == [8] * 9 + [64] * 9 and list(rows["method"]) == ordered * 2
    vegas = rows[rows["method"] == "vegas"].iloc[0]
    low, high = vegas["acceptance 95 % low"], vegas["acceptance 95 % high"]
    assert low < vegas["acceptance (accepted/drafted)"] < high
    positions = [float(x) for x in vegas["acceptance by position"].split()]
    assert len(positions) == 6 and positions == sorted(positions, reverse=True)
    assert "evidence: real; acceptance: measured" in (out / "tables" / "gpu_smollm2.md").read_text()


def test_emulated_acceptance_cannot_enter_the_table_of_real_text(tmp_path: Path) -> None:
    comparison(tmp_path / "smollm2" / "a", "smollm2_135m", 100, 8, SHAPES)
    with pytest.raises(ValueError, match="not real evidence"):
        gpu_tables.read(tmp_path)


def test_a_suite_that_no_table_shows_is_refused(tmp_path: Path) -> None:
    comparison(tmp_path / "shape" / "a", "qwen3_8b", 100, 8, SHAPES)
    with pytest.raises(ValueError, match="name the folder as its suite: autoregressive, shapes"):
        gpu_tables.read(tmp_path)


def test_a_baseline_of_another_comparison_is_none(tmp_path: Path) -> None:
    for name, methods in (("a", {BASELINE: SHAPES[BASELINE]}), ("b", {"aspire": SHAPES["aspire"]})):
        comparison(tmp_path / "shapes" / name, "qwen3_8b", 100, 8, methods)
    row = gpu_tables.read(tmp_path)["shapes"].table.set_index("method").loc["aspire"]
    assert (
        pd.isna(row["decode speed-up"]) and pd.isna(row["predicted speed-up"]) and row["note"] == "no baseline record"
    )
    assert gpu_figures.write_gpu_figures(gpu_tables.read(tmp_path), tmp_path / "out")  # drawn as words


def test_kernels_have_a_verdict_where_they_have_a_bound(out: Path) -> None:
    rows = table(out, "gpu_kernels").set_index("kernel")
    assert list(rows["verdict"].fillna("")) == ["ok", "", "below", "ok", "ok", "", "", ""]
    assert rows.loc["draft 12 x 90,000", "reached"] == 0.8 and rows.loc["mixed 12 x 90,000", "reached"] == 1.1
    assert rows.loc["scores of dense", "us"] == 1020 and rows.loc["scores of dense", "bound"] == 0.03
    assert rows.loc["sample", "us"] == 12.5 and pd.isna(rows.loc["sample", "share of copy"])
    text = (out / "tables" / "gpu_kernels.md").read_text()
    assert "ImportError: a\\|b" in text and "commit: 0123456789ab." not in text and "copy: 4.00 TB/s" in text


def test_check_walks_gpu_runs_and_passes_over_other_files(root: Path, tmp_path: Path, capsys: Any) -> None:
    assert check([str(root)]) == 0
    assert "34 records, 0 that differ, 1 failed" in capsys.readouterr().out
    comparison(tmp_path / gpu_tables.GPU / "shapes" / "a", "qwen3_8b", 100, 8, SHAPES)
    (tmp_path / gpu_tables.GPU / gpu_tables.KERNELS).write_text("{}")
    folder = next(tmp_path.rglob("*aspire*"))
    record = read_record(folder)
    record.tokens.accepted = 0
    (folder / "record.json").write_text(record.model_dump_json())
    assert check([str(tmp_path)]) == 1
    assert "tokens.accepted is 0 in the record" in capsys.readouterr().err
