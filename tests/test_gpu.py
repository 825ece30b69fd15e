"""Does a GPU say what a CPU says? Texts in fp32, near ties in bf16, graphs against eager, row against batch.

Every test compiles its own kernels: `pytest -m gpu -n 8` spreads that over processes, which may share one GPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from methods import EVERY_METHOD, EVERY_SPECULATIVE, METHODS, WARM, prompts, requests
from on_gpu import (
    BY_NAME,
    CUDA,
    DEVICE,
    GPU,
    NEEDS_CUDA,
    GuardedPool,
    answers,
    build,
    fixed,
    mixed_requests,
    model_on,
    on_cpu,
    point_nowhere,
    spec_of,
    steps,
)
from scipy import stats
from torch import Tensor

from aspire.kernels.attention import Rows, mixed_attention_triton, tuning
from aspire.kernels.noise import DRAFT_OR_TARGET
from aspire.kernels.work import plan_work
from aspire.model import Decoder
from aspire.policies import Method
from aspire.sampling import Filtered, filter_and_pick
from aspire.settings import Sampling
from aspire.verify import Drafts, Verification, judge
from experiments.gate import near_tie_gate, parting

pytestmark = GPU
Record = Callable[[str, Any], None]  # of a test, into pytest's report
PROMPTS = prompts(10, seed=31)
TEN, NEW = len(PROMPTS), 14
BF16 = {"layers": 3, "head_dim": 64, "vocab": 509}
ASYNC = [BY_NAME[name] for name in ("vegas", "sparsespec", "aspire")]
ASYNC_AND_PLAIN = {**EVERY_METHOD, "argvalues": [METHODS[0], *ASYNC]}


@cache
def plain(kind: str, new: int = NEW) -> list[list[int]]:
    """Plain decoding on the CPU, greedy and sampled requests in turn."""
    return on_cpu(spec_of(kind), mixed_requests(PROMPTS, new))


# -- fp32: the same text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(**EVERY_METHOD)
def test_text_is_that_of_autoregressive_decoding_on_the_cpu(kind: str, method: Method) -> None:
    """Gate 1 across devices: batch 1, 5 and 8, requests entering and leaving, eager and graphs, greedy and coupled.

    Noise is keyed, so that even sampled text is the same. A poisoned pool waits for each step; only one that is not
    poisoned launches the next step ahead.
    """
    model, mismatches = model_on(spec_of(kind)), []
    for slots in (1, 5, 8):
        count = 3 if slots == 1 else TEN
        for graphs, poison in ((False, True), (True, True), (True, False)):
            batch = mixed_requests(PROMPTS[:count], NEW)
            got = answers(build(model, method, slots, graphs=graphs, poison=poison), batch)
            mismatches += [(slots, graphs, poison, i) for i in range(count) if got[i] != plain(kind)[i]]
    greedy = build(model, method, 5, "greedy")
    got = answers(greedy, requests(PROMPTS[::2], new=NEW))
    mismatches += [("greedy", i) for i, text in enumerate(got) if text != plain(kind)[2 * i]]
    assert mismatches == []
    assert not CUDA or greedy.launcher.graphs is not None


@pytest.mark.parametrize(**EVERY_METHOD)
def test_requests_that_end_with_the_next_pass_in_flight(method: Method) -> None:
    """End ids that nobody foresees, more requests than slots: the text is that of plain decoding on the CPU."""
    spec = spec_of("llama")
    batch = lambda: requests(prompts(9, seed=4), WARM, 44, end_ids=(5, 17, 50, 95))  # noqa: E731
    want, ours = on_cpu(spec, batch()), batch()
    assert answers(build(model_on(spec), method, 3), ours) == want
    assert {request.finish_reason for request in ours} == {"stop", "length"}


@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_a07_a_repeated_word(method: Method) -> None:
    """A07: one word 48 times, 32 tokens, greedy, fp32: the text is that of plain decoding."""
    spec, prompt = spec_of("qwen3"), [[17] * 48]
    want = on_cpu(spec, requests(prompt, new=32))
    assert answers(build(model_on(spec), method, 1), requests(prompt, new=32)) == want


@pytest.mark.parametrize(**ASYNC_AND_PLAIN)
def test_a16_rows_equal_their_solo_run(method: Method) -> None:
    """A16: greedy and sampled rows with seeds of their own finish at different steps and are replaced, at every B."""
    spec = spec_of("llama")
    batch = lambda: mixed_requests(PROMPTS[:8], 6, step=3)  # noqa: E731
    want = [on_cpu(spec, [request])[0] for request in batch()]
    for slots in (1, 2, 3, 4, 5, 8):
        assert answers(build(model_on(spec), method, slots), batch()) == want, slots


@pytest.mark.parametrize("name", ["vegas", "aspire_fixed"])
def test_a16_rejection_says_the_same_alone_and_in_a_batch(name: str) -> None:
    """A16: fixed draft lengths do not depend on the batch, so neither does sampled text; graphs as eager."""
    model, texts = model_on(spec_of("llama")), []
    for slots, graphs in ((1, True), (5, True), (5, False)):
        engine = build(model, BY_NAME[name], slots, "rejection", graphs=graphs)
        texts.append(answers(engine, mixed_requests(PROMPTS[:6], 12, step=2)))
    assert texts[0] == texts[1] == texts[2]


def test_a27_every_method_starts_from_the_same_logits() -> None:
    """A27: the logits of the first token are the same bits for all methods, bf16."""
    model, seen = model_on(spec_of("qwen3", **BF16), torch.bfloat16), []
    for method in METHODS:
        engine, logits = build(model, method, 2, page_size=16), []
        first = engine._first_token
        engine._first_token = lambda r, p, first=first, logits=logits: logits.append(p.logits) or first(r, p)  # type: ignore
        answers(engine, requests(PROMPTS[:3], new=2))
        seen.append(torch.stack(logits))
    assert all(torch.equal(logits, seen[0]) for logits in seen) and seen[0].isfinite().all()


class Recording:
    """A model that keeps the first row of the logits of every pass with more than one."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.spec, self.embed = model, model.spec, model.embed
        self.seen: list[Tensor] = []

    def __call__(self, *args: object) -> Tensor:
        return self.model(*args)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        if len(logits) > 1:
            self.seen.append(logits[0].clone())
        return logits


@pytest.mark.parametrize("name", ["autoregressive", "vegas", "aspire_fixed"])
def test_a28_the_neighbours_content_does_not_matter(name: str) -> None:
    """A28: two batches of the same shape that share row 0: its logits are equal to the last bit, bf16."""
    model, seen = model_on(spec_of("qwen3", **BF16), torch.bfloat16), []
    for seed in (1, 2):
        others = prompts(3, shortest=40, longest=40, seed=seed)
        recorded = Recording(model)
        engine = build(recorded, BY_NAME[name], 4, page_size=16, graphs=False)  # type: ignore[arg-type]
        for request in requests([PROMPTS[0], *others], new=60):
            engine.submit(request)
        for _ in range(20):
            engine.step()
        engine.close()
        seen.append(recorded.seen)
    assert min(map(len, seen)) >= 20  # one more where a pass was launched ahead
    assert all(torch.equal(a, b) for a, b in list(zip(*seen))[:20])


@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a29_low_bits_follow_from_the_split_alone(dtype: torch.dtype) -> None:
    """A29: 8k tokens at B = 1, 7, 33, one query and five: bit-equal where rows are cut alike, else up to rounding.

    How a row is cut depends on all rows of the batch: the share of work that a piece takes is what fills the device.
    """
    page, context, kv_heads, dim, tile = 16, 8192, 2, 64, tuning(1, 5, 2, 2, True, torch.finfo(dtype).bits // 8).tile
    pages = context // page
    rng = torch.Generator(DEVICE).manual_seed(0)
    k, v = torch.randn(2, 33 * pages * page, kv_heads, dim, device=DEVICE, dtype=dtype, generator=rng)
    queries = torch.randn(33 * 5, 2 * kv_heads, dim, device=DEVICE, dtype=dtype, generator=rng)
    table = torch.randperm(33 * pages, device=DEVICE, generator=rng).view(33, pages)
    found: dict[tuple[bool, int], list[Tensor]] = {}
    for wide in (1, 5):
        for batch in (1, 7, 33):
            width = torch.full((batch,), wide, device=DEVICE)
            rows = Rows(width.cumsum(0) - width, width, context - width, table[:batch], page, widest=wide)
            q = queries[: batch * wide].contiguous()
            alike = plan_work(rows.width, rows.position, tile, 16 * batch)[0]
            for same, call in ((True, replace(rows, work=alike)), (False, rows)):
                out = torch.full_like(q, float("nan"))
                mixed_attention_triton(q, k, v, call, out)
                found.setdefault((same, wide), []).append(out[:wide])
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    for wide in (1, 5):
        first, *rest = found[True, wide]
        assert all(torch.equal(first, other) for other in rest)
        for other in found[False, wide]:
            torch.testing.assert_close(other, first, **close)


# -- bf16: near ties ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(**{**EVERY_METHOD, "argvalues": ASYNC})
def test_bf16_passes_the_near_tie_gate(method: Method, record_property: Record) -> None:
    """Every token is the argmax of full attention or a near tie; one token changed by hand is not."""
    model = model_on(spec_of("qwen3", **BF16), torch.bfloat16)
    run = lambda m: answers(build(m[0], m[1], 8, "greedy", page_size=16), requests(PROMPTS[:8], new=40))  # noqa: E731
    baseline, texts = run((model, METHODS[0])), run((model, method))
    width = method.speculation.longest + 1
    gate = near_tie_gate(model, PROMPTS[:8], texts, width, baseline, chunk=16)
    record_property("gate", gate.as_record())
    print(method.name, gate)
    assert gate.passed and gate.tokens == 8 * 40 and gate.near_ties < 0.1 * gate.tokens
    texts[3][11] = (texts[3][11] + 250) % 509
    assert not near_tie_gate(model, PROMPTS[:8], texts, width, baseline, chunk=16).passed


@pytest.mark.parametrize("name", ["vegas", "aspire"])
def test_a07_a_repeated_word_in_bf16(name: str) -> None:
    """A07: where bf16 text parts from plain decoding there is a near tie, and after it every token passes as well."""
    model, prompt = model_on(spec_of("qwen3", **BF16), torch.bfloat16), [[17] * 48]
    run = lambda m: answers(build(model, m, 1, "greedy", page_size=16), requests(prompt, new=32))  # noqa: E731
    baseline, text = run(METHODS[0]), run(BY_NAME[name])
    gate = near_tie_gate(model, prompt, text, BY_NAME[name].speculation.longest + 1, baseline, chunk=16)
    print(name, gate, "parts at", parting(text[0], baseline[0]))
    assert gate.passed


@pytest.mark.parametrize(**EVERY_METHOD)
def test_rejection_runs_in_bf16(method: Method) -> None:
    """Every method finishes its requests in the paper's dtype and sampling."""
    model = model_on(spec_of("qwen3", **BF16), torch.bfloat16)
    batch = requests(PROMPTS[:5], WARM)
    answers(build(model, method, 3, "rejection", page_size=16), batch)
    assert all(len(r.output_ids) == r.max_new_tokens for r in batch)


# -- draws -------------------------------------------------------------------------------------------------------------

TARGET, DRAFT = [8.00, 8.02, 8.05, 0.0], [8.05, 7.90, 8.00, 1.0]


def distribution(logits: Tensor, n: int, seed: int, key: int) -> tuple[Filtered, Tensor]:
    """The filtered distribution of n rows of the same logits, and a pick of each."""
    row = torch.arange(n, device=DEVICE)
    options = (torch.ones(n, device=DEVICE), torch.zeros_like(row), torch.ones(n, device=DEVICE), 4)
    return filter_and_pick(
        logits.expand(n, 4).contiguous(), *options, row + seed, torch.full_like(row, key), DRAFT_OR_TARGET
    )


def pvalue(counts: Tensor, probs: Tensor) -> float:
    """Of the chi-square test; scipy wants the sums to agree more closely than fp32 does."""
    share, seen = (x.double().cpu().numpy() for x in (probs, counts))
    return float(stats.chisquare(seen, share / share.sum() * seen.sum()).pvalue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a13_a_million_draws_follow_the_fp32_target(dtype: torch.dtype) -> None:
    """A13: draft and target are filtered from bf16 logits in fp32, and the same numbers are drawn from and compared.

    Logits that bf16 rounds are another distribution; so many draws would show it.
    """
    target, draft = (torch.tensor(x, device=DEVICE).to(dtype) for x in (TARGET, DRAFT))
    want, q_want = target.float().softmax(0), draft.float().softmax(0)
    piece, pieces = (2**17, 8) if CUDA else (2**14, 1)
    drawn, drafted = (torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2))
    for seed in range(0, piece * pieces, piece):
        q, tokens = distribution(draft, piece, seed, 7)
        p, _ = distribution(target, 2 * piece, seed, 7)
        row = torch.arange(piece, device=DEVICE) + seed
        ones = torch.ones_like(row)
        own = Filtered(q.ids[:, None], q.probs[:, None])
        drafts = Drafts(tokens[:, None], ones, row, 7 * ones, 0 * ones, own)
        verdict = judge(Verification("rejection"), p, drafts)
        drawn += verdict.tokens[:, 0].bincount(minlength=4)
        drafted += tokens.bincount(minlength=4)
    assert pvalue(drafted, q_want) > 1e-4 and pvalue(drawn, want) > 1e-4
    rounded = torch.tensor(TARGET).bfloat16().float().softmax(0)
    assert pvalue(1e6 * rounded.double(), torch.tensor(TARGET).softmax(0)) < 1e-9


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["autoregressive", "vegas", "aspire"])
def test_d01_graphs_say_what_eager_passes_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D01: captured at a short length, replayed for 300 tokens past pages, 1k and split thresholds, with rejections.

    Unused entries of the page table are -1, and what lies there is NaN.
    """
    monkeypatch.setattr("aspire.attention.budget", lambda *_: 6)  # a piece takes more tiles as contexts grow
    spec, new = spec_of("qwen3", max_len=2048), 300 if CUDA else 24
    three = [prompts(1, shortest=n, longest=n, seed=n)[0] for n in (12, 800, 90)]
    batch = lambda: mixed_requests(three, new)  # noqa: E731
    want = on_cpu(spec, batch(), max_len=1280, page_size=16, prefill_chunk=512)
    for graphs in (True, False):
        pool, made = GuardedPool(spec, 120, 16), batch()
        engine = build(
            model_on(spec), BY_NAME[name], 3, pool=pool, max_len=1280, page_size=16, prefill_chunk=512, graphs=graphs
        )
        assert steps(engine, made, lambda e=engine: point_nowhere(e)) == want  # type: ignore[misc]
        assert pool.untouched()
        rounds = [pair for r in made for pair in r.rounds]
        assert name == "autoregressive" or any(accepted < drafted for drafted, accepted in rounds)
        assert not CUDA or graphs == (engine.launcher.graphs is not None)


@pytest.mark.parametrize("name", ["vegas", "aspire", "sparsespec"])
def test_d02_a_batch_smaller_than_the_captured_one(name: str) -> None:
    """D02: captured with eight rows, run with five, three and one: the others advance nothing and touch nothing."""
    spec = spec_of("llama")
    pool = GuardedPool(spec, 420, 4)
    engine = build(model_on(spec), BY_NAME[name], 8, pool=pool)
    for active in (8, 5, 3, 1):
        made = mixed_requests(PROMPTS[:active], NEW)

        def check(active: int = active) -> None:
            point_nowhere(engine)
            empty = [slot for slot, seat in enumerate(engine.seats) if seat is None]
            assert len(empty) >= 8 - active
            assert not engine.state.active[empty].any() and not engine.state.length[empty].any()

        assert steps(engine, made, check) == plain("llama")[:active]
        assert pool.untouched()


@NEEDS_CUDA
def test_d02_graphs_are_told_apart_by_kind_tokens_and_width() -> None:
    """D02: draft and verify passes of the same batch are different graphs, and so are mixed ones."""
    for name, kinds in (("vegas", {"draft", "verify"}), ("aspire", {"draft", "mixed"})):
        engine = build(model_on(spec_of("llama")), BY_NAME[name], 8)
        answers(engine, mixed_requests(PROMPTS[:8], NEW))
        graphs = engine.launcher.graphs
        assert graphs is not None
        assert {shape.kind for shape in graphs.captured} == kinds  # type: ignore[attr-defined]
        assert all(shape.tokens >= 8 and shape.widest >= 1 for shape in graphs.captured)  # type: ignore[attr-defined]


@NEEDS_CUDA
@pytest.mark.parametrize("longest", [1, 2, 3, 4, 6])
def test_d03_every_batch_size_hits_its_graphs(longest: int, record_property: Record) -> None:
    """D03: k drafts at B in 1 .. 16: the text is right, misses are captures and are counted, a second run has none."""
    spec, lines = spec_of("llama"), []
    want = plain("llama")
    for slots in (1, 2, 3, 5, 7, 8, 16):
        engine = build(model_on(spec), fixed("vegas", longest), slots)
        count = min(slots, TEN)
        for run in range(2):
            before, missed = len(engine.passes), engine.graph_misses
            assert answers(engine, mixed_requests(PROMPTS[:count], NEW)) == want[:count]
            passes, misses = len(engine.passes) - before, engine.graph_misses - missed
            lines.append({"k": longest, "B": slots, "run": run, "hits": passes - misses, "misses": misses})
            graphs = engine.launcher.graphs
            assert graphs is not None and engine.graph_misses == len(graphs.captured)
            assert run == 0 or misses == 0
    record_property("graphs", lines)
    print(*lines, sep="\n")


def test_temperature_zero_is_argmax_beside_sampled_rows() -> None:
    """A greedy row's text does not depend on what its neighbours sample with."""
    spec, texts = spec_of("qwen3"), []
    for others in (Sampling(1.5, 40, 0.8), Sampling(0.3, 3, 1.0)):
        batch = requests(PROMPTS[:4], others, NEW)
        batch[0].sampling = Sampling()
        texts.append(answers(build(model_on(spec), BY_NAME["aspire"], 4), batch))
    assert texts[0][0] == texts[1][0] == plain("qwen3")[0] and texts[0][1:] != texts[1][1:]


def test_the_helpers_see_a_stray_write() -> None:
    """The guard reports a write outside the pages handed out."""
    pool = GuardedPool(spec_of("llama"), 8, 4)
    assert pool.untouched()
    pool.k[0, 3] = 1.0
    assert not pool.untouched()
    assert point_nowhere(SimpleNamespace(state=SimpleNamespace(page_table=torch.zeros(2, 3)), seats=[None])) is None  # type: ignore
