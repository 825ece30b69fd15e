"""Do tables and figures show every record, marked for what it is, with the same bytes each time?"""

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments import figures, tables
from tests.fake_records import METHODS, write_comparison

GPU = {"environment": {"device": "NVIDIA H200"}, "config": {"engine": {"device": "cuda", "dtype": "bfloat16"}}}


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("cpu")
    return write_comparison(root, ["arithmetic", "pystdlib"], failing=("pystdlib", "sparsespec"))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root, names = tmp_path_factory.mktemp("gpu"), ["aime25", "longbench_16k", "longbench2_80k"]
    shapes = write_comparison(root, names, "qwen3_1p7b", evidence="shapes", acceptance="emulated:hetero", **GPU)
    return shapes + write_comparison(
        root / "m", names, "qwen3_8b", evidence="modelled", acceptance="emulated:replay", **GPU
    )


def test_a_row_for_every_record_in_the_order_of_the_comparison(cpu: list[Path]) -> None:
    table = tables.frame(tables.load(cpu))
    assert list(table["method"]) == [*METHODS, *METHODS]
    assert list(table["benchmark"]) == ["arithmetic"] * 9 + ["pystdlib"] * 9
    ones = table[table["method"] == "autoregressive"]
    assert list(ones["decode speed-up"]) == [1.0, 1.0]
    assert ones[tables.ACCEPTANCE].isna().all()


def test_a_failed_cell_is_a_row_with_its_error(cpu: list[Path]) -> None:
    shown = tables.display(tables.frame(tables.load(cpu)))
    failed = shown[shown["status"] == "failed"]
    assert list(failed["method"]) == ["SparseSpec"]
    assert failed["decode tok/s"].item() == failed["decode speed-up"].item() == "–"
    assert "out of memory: ask less" in failed["note"].item()


def test_time_is_split_beside_acceptance_and_headers_name_the_metric(cpu: list[Path]) -> None:
    """B14, B03: why a method is slow stands in its row."""
    shown = tables.display(tables.frame(tables.load(cpu)))
    for name in ("decode tok/s", "decode speed-up", "draft pass ms", "verify pass ms", "mixed pass ms", "prefill s"):
        assert name in shown
    assert shown.iloc[1]["draft pass ms"] == "4.20"
    assert {"acceptance (accepted/drafted)", "tokens per round (committed/rounds)"} <= set(shown)


def test_a_baseline_of_another_run_gives_a_reason(tmp_path: Path) -> None:
    """B13 in the table: no number, and why."""
    first = write_comparison(tmp_path / "a", ["pystdlib"])
    second = write_comparison(tmp_path / "b", ["pystdlib"], config={"run_id": "other"})
    table = tables.frame(tables.load([first[0], second[-1]]))
    assert pd.isna(table["decode speed-up"].iloc[0]) or pd.isna(table["decode speed-up"].iloc[1])
    assert table["note"].str.contains("run differs from the baseline's", na=False).sum() == 1


def test_published_numbers_stand_where_they_exist(cpu: list[Path], gpu: list[Path]) -> None:
    table = tables.frame(tables.load(gpu)).set_index(["model", "benchmark", "method"])
    assert table.loc[("qwen3_1p7b", "longbench2_80k", "aspire"), figures.PAPER] == 4.58
    assert table.loc[("qwen3_8b", "longbench2_80k", "aspire_fixed"), figures.PAPER] == 2.22
    assert pd.isna(table.loc[("qwen3_8b", "aime25", "sparsespec"), figures.PAPER])
    shown = tables.display(tables.frame(tables.load(cpu)))
    assert set(shown[figures.PAPER]) == {"–"}


def test_emulated_and_modelled_rows_are_marked_and_explained(gpu: list[Path], tmp_path: Path) -> None:
    markdown = tables.write_tables(gpu, tmp_path)[0].read_text()
    rows = [line for line in markdown.splitlines() if line.startswith("| qwen3")]
    assert all("†" in line for line in rows if "qwen3_1p7b" in line)
    assert all("‡" in line for line in rows if "qwen3_8b" in line)
    assert "† emulated acceptance" in markdown
    assert "‡ modelled" in markdown


def test_published_means_are_those_the_source_states() -> None:
    table = pd.read_csv(tables.RESULTS / "paper" / "fig1_speedups.csv")
    means = table[table["method"] != "aspire_fixed"].groupby(["model", "method"])["speedup"].mean().round(2)
    assert means["qwen3_1p7b"].to_dict() == {"magicdec_stream": 2.62, "vegas": 2.62, "aspire": 3.34}
    assert means["qwen3_8b"].to_dict() == {"magicdec_stream": 1.51, "vegas": 1.63, "aspire": 2.08}
    assert means["ds_r1_llama_8b"].to_dict() == {"aspire": 2.14}


def test_the_same_records_give_the_same_bytes(cpu: list[Path], gpu: list[Path], tmp_path: Path) -> None:
    def build(name: str) -> list[bytes]:
        out = tmp_path / name
        paths = [*tables.write_tables(cpu, out / "t"), *figures.fig1(cpu, out / "f"), *figures.fig1(gpu, out / "g")]
        return [path.read_bytes() for path in paths]

    assert build("once") == build("again")


def test_the_figure_says_what_a_cpu_cannot_show(cpu: list[Path], gpu: list[Path]) -> None:
    assert "printed as measured" in figures._words(tables.load(cpu))
    assert "printed as measured" not in figures._words(tables.load(gpu))


def test_every_method_has_its_own_colour() -> None:
    assert set(METHODS) <= set(figures.COLOURS)
    assert len(set(figures.COLOURS.values())) == len(figures.COLOURS)


def test_the_timeline_reads_recorded_passes(tmp_path: Path) -> None:
    passes = [{"kinds": "DDV.", "ms": 2.0, "tokens": 3}, {"kinds": "DVD.", "ms": None, "tokens": 2}]
    path = tmp_path / "passes.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in passes))
    assert figures.read_passes(path) == passes
    both = {"lockstep": passes[:1], "asynchronous": figures.read_passes(path)}
    first = [made.read_bytes() for made in figures.timeline(both, tmp_path / "timeline")]
    assert first == [made.read_bytes() for made in figures.timeline(both, tmp_path / "timeline")]
    path.write_text('{"kinds": "DX", "ms": 1.0, "tokens": 0}\n')
    with pytest.raises(ValueError, match="write one of D V"):
        figures.read_passes(path)


def test_no_records_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="run an experiment first"):
        tables.frame([])
