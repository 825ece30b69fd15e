"""Are the parts of a profiled pass counted once, whatever runs beside what?"""

import pytest

from aspire.engine import PassRecord
from experiments.bench_pass import by_kind, covered, main, part_of, shares, timed

KERNELS = [
    ("_attention_kernel", 0.0, 60.0),
    ("_top_blocks", 50.0, 70.0),  # beside attention for half of its time
    ("void cublasLt::splitKreduce_kernel<32>", 70.0, 80.0),
    ("void at::native::vectorized_elementwise_kernel<4, add>", 90.0, 100.0),
]


def test_kernels_belong_to_parts() -> None:
    assert [part_of(name) for name, *_ in KERNELS] == ["attention", "selection", "products", "scheduling"]


def test_time_beside_the_model_is_not_counted_twice() -> None:
    found = shares(KERNELS)
    assert found["kernels"] == {"attention": 0.6, "products": 0.1, "scheduling": 0.1, "selection": 0.2}
    assert found["beside_no_model"] == pytest.approx(0.2) and found["idle"] == pytest.approx(0.1)


def test_passes_of_each_kind_are_apart() -> None:
    """Two draft passes of 100 and 120 us, one that verifies of 60, and the beginning of a fourth."""
    draft = [("_attention_kernel", 0.0, 60.0), ("_report_kernel", 80.0, 100.0)]
    longer = [("_attention_kernel", 200.0, 300.0), ("_report_kernel", 310.0, 320.0)]
    verifying = [("_merge_kernel", 400.0, 430.0), ("_judge_kernel", 440.0, 445.0), ("_report_kernel", 450.0, 460.0)]
    found = by_kind([*longer, *draft, *verifying, ("_attention_kernel", 500.0, 900.0)])
    assert list(found) == ["draft", "verifying"]
    assert found["draft"] == {
        "passes": 2, "window": 110.0, "attention": 80.0, "scheduling": 15.0, "beside_no_model": 15.0, "idle": 15.0,
    }  # fmt: skip
    assert found["verifying"]["merging"] == 30.0 and found["verifying"]["verification"] == 5.0


def test_overlapping_and_nested_spans_count_once() -> None:
    assert covered([(5, 6), (0, 10), (8, 12), (20, 21)]) == 13


def test_passes_are_held_against_their_bytes() -> None:
    """2 TB of weights and KV at 4 TB/s take half a second."""
    passes = [PassRecord("DD", 2, 998.0, 0.75, 0), PassRecord("DV", 4, 996.0, 1.0, 3)]
    found = timed(passes, (10**12, 10**9), 4.0)
    assert found["draft"] == {"passes": 1, "ms": 750.0, "over_bytes": 1.5}
    assert found["mixed"]["over_bytes"] == 2.0 and "verify" not in found


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="finds none"):
        main([])
