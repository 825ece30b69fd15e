"""Do the metrics mean what their names say? Hand-counted cases, identities, and when a speed-up may be formed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import metrics
from experiments.check import main
from experiments.records import Record, Timing, read_record, read_requests, write_record
from tests.fake_records import request, requests, timed, write_comparison

ROUNDS = st.lists(
    st.integers(0, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), min_size=1, max_size=20
)


def test_a_stop_inside_a_draft_counts_only_what_was_emitted() -> None:
    """B01: rounds of 5, 5 and then [a, b, E, d, bonus], of which 3 are emitted."""
    line = request([(4, 4), (4, 4), (3, 3)], stopped=True)
    assert metrics.tokens_per_round([line]) == 13 / 3
    assert 1 + metrics.tokens([line]).committed == len(line.output_ids) == 14
    assert metrics.broken_rules(line) == []


def test_a_counter_with_the_whole_block_is_caught() -> None:
    line = request([(4, 4), (4, 4), (3, 3)], stopped=True)
    assert metrics.broken_rules(line.model_copy(update={"rounds": [(4, 4), (4, 4), (4, 4)]}))
    assert metrics.broken_rules(line.model_copy(update={"finish_reason": None}))
    assert metrics.broken_rules(line.model_copy(update={"rounds": [(4, 5), (4, 4), (3, 2)]}))


def test_the_four_numbers_called_acceptance() -> None:
    """B03: 100 rounds of 3 drafts, accepted at position 1, 2, 3 in 90, 60 and 30 of them."""
    accepted = [0] * 10 + [1] * 30 + [2] * 30 + [3] * 30
    lines = [request([(3, a) for a in accepted[i::4]], f"r{i}") for i in range(4)]
    assert metrics.acceptance_rate(lines) == 0.6
    assert metrics.mean_accepted_drafts(lines) == 1.8
    assert metrics.tokens_per_round(lines) == 2.8
    assert metrics.acceptance_by_position(lines) == [0.9, 0.6, 0.3]
    assert metrics.conditional_acceptance_by_position(lines) == pytest.approx([0.9, 60 / 90, 0.5])
    assert metrics.histogram(lines) == [10, 30, 30, 30]


@given(ROUNDS)
def test_histogram_identities(rounds: list[tuple[int, int]]) -> None:
    """G05: the histogram sums to the rounds and, weighted, to the accepted drafts; per request too."""
    lines = [request(rounds), request([(0, 0), (2, 1)], "r1")]
    count, histogram = metrics.tokens(lines), metrics.histogram(lines)
    assert sum(histogram) == count.rounds
    assert sum(j * rounds for j, rounds in enumerate(histogram)) == count.accepted
    assert count.committed == count.accepted + count.rounds
    each = [metrics.request_summary(line) for line in lines]
    assert sum(one["accepted"] for one in each) == count.accepted
    assert all(sum(j * n for j, n in enumerate(one["histogram"])) == one["accepted"] for one in each)


def test_nothing_counted_is_none_never_zero_or_one() -> None:
    plain = [request([(0, 0)] * 5)]
    for lines in ([], plain):
        assert metrics.acceptance_rate(lines) is None
        assert metrics.mean_request_acceptance(lines) is None
        assert metrics.acceptance_by_position(lines) == []
        assert metrics.bootstrap_ci(lines) is None
    assert metrics.tokens_per_round([]) is None
    assert metrics.tokens_per_round(plain) == 1.0
    assert metrics.decode_tok_s(10, Timing()) is None
    assert metrics.e2e_tok_s(10, Timing(decode_s=1.0)) is None
    assert metrics.tpot_ms([], []) is None


def test_decode_and_end_to_end_speedup_are_told_apart() -> None:
    """B06: prefill 60 s; decode 1.0 s without and 0.4 s with speculation, by a fake clock."""
    plain = timed([request([(0, 0)] * 60)], [1.0], "autoregressive", prefill_s=60.0)
    spec = timed([request([(5, 5)] * 10)], [0.4], "aspire", prefill_s=60.0)
    assert f"{metrics.speedup(spec, plain)[0]:.2f}" == "2.50"
    assert f"{metrics.speedup(spec, plain, 'e2e_tok_s')[0]:.3f}" == "1.010"


def pair(**cell: object) -> tuple[Record, Record]:
    lines = requests(0.8, 4)
    return timed(lines, [2.0, 2.2, 2.1], "aspire", **cell), timed(lines, [4.0, 4.4, 4.1], "autoregressive")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"environment": {"device": "GPU Y"}}, "device"),
        ({"environment": {"device": None}}, "device not recorded"),
        ({"batch": 16}, "batch"),
        ({"model": "qwen3_8b"}, "model"),
        ({"evidence": "shapes"}, "evidence"),
        ({"config": {"run_id": "yesterday"}}, "run"),
        ({"config": {"benchmark": {"name": "pystdlib", "max_new_tokens": 128}}}, "max_new_tokens: 128 against 64"),
        ({"config": {"engine": {"device": "cpu", "dtype": "bfloat16", "slots": 8}}}, "dtype"),
        ({"config": {"engine": {"device": "cpu", "dtype": "float32", "slots": 8, "page_size": 4}}}, "engine settings"),
        ({"config": {"model": {"name": "smollm2_135m", "revision": "other"}}}, "revision"),
    ],
)
def test_no_speedup_across_unlike_runs(change: dict, name: str) -> None:
    """B13: the cell stays empty and says which fact differs."""
    record, baseline = pair(**change)
    value, reason = metrics.speedup(record, baseline)
    assert value is None
    assert name in reason


def test_no_speedup_with_other_requests_or_sampling() -> None:
    record, baseline = pair()
    other = record.model_copy(update={"workload": record.workload.model_copy(update={"data_hash": "d1"})})
    assert metrics.speedup(other, baseline) == (None, "requests differs from the baseline's (d1 against d0)")
    other = record.model_copy(update={"sampling": record.sampling.model_copy(update={"top_k": 20})})
    assert metrics.speedup(other, baseline)[1] == "sampling differs from the baseline's (top_k: 20 against 50)"
    assert metrics.speedup(record, None) == (None, "no baseline record")


def test_a_speedup_below_one_is_not_clipped() -> None:
    record, baseline = pair()
    assert metrics.speedup(record, baseline)[0] == pytest.approx(4.1 / 2.1)
    assert metrics.speedup_spread(record, baseline) == pytest.approx((4.1 / 2.1, 2.0))
    assert metrics.speedup(baseline, record)[0] == pytest.approx(2.1 / 4.1)


def test_the_bootstrap_holds_the_pooled_rate_and_repeats() -> None:
    lines = requests(0.8, 4, count=30)
    low, high = metrics.bootstrap_ci(lines)
    assert low < metrics.acceptance_rate(lines) < high
    assert metrics.bootstrap_ci(lines) == (low, high)
    low, high = metrics.bootstrap_ci(lines, "tokens_per_round")
    assert low < metrics.tokens_per_round(lines) < high
    with pytest.raises(ValueError, match="choose one of"):
        metrics.bootstrap_ci(lines, "speed")


def test_tpot_is_per_request() -> None:
    lines = [request([(0, 0)] * 10, f"r{i}") for i in range(3)]
    tpot = metrics.tpot_ms(lines, [0.1, 0.2, 0.3])
    assert tpot.p50 == pytest.approx(20.0)
    assert tpot.p95 == pytest.approx(29.0)


def test_the_summary_follows_from_the_requests_exactly(tmp_path: Path) -> None:
    """B05: what the record says is what one function computes from its trace; a wrong field is named."""
    folders = write_comparison(tmp_path, ["pystdlib"], failing=("pystdlib", "vegas"))
    assert main([str(tmp_path)]) == 0
    record, lines = read_record(folders[-1]), read_requests(folders[-1])
    assert record.metrics.tokens_per_round == metrics.tokens_per_round(lines)
    wrong = record.metrics.model_copy(update={"tokens_per_round": 5.0})
    write_record(folders[-1], record.model_copy(update={"metrics": wrong}), lines[:-1])
    with pytest.raises(ValueError, match=r"run the cell again") as error:
        metrics.check(folders[-1])
    for name in ("tokens.committed", "tokens.prompt", "metrics.tokens_per_round is 5.0", "metrics.decode_tok_s"):
        assert name in str(error.value)
    assert main([str(tmp_path)]) == 1
    assert main([]) == 2
