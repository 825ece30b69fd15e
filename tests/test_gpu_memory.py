"""Does memory stay where it was planned, and time where the work is? Long runs, worst passes, sweeps, large caches.

These look at one GPU's free memory and at times: run them without other work on it, in one process.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from checkpoints import assert_same, write_folder
from methods import METHODS, WARM, prompts, requests
from on_gpu import BY_NAME, CUDA, DEVICE, GPU, NEEDS_CUDA, build, fixed, model_on, spec_of
from test_shapes import configs
from tiny import tiny_model, tiny_spec

from aspire.cache.pool import KVPool
from aspire.engine import Engine
from aspire.memory import Work, plan_memory
from aspire.model import Decoder, ModelSpec, load_folder, random_weights
from aspire.model import read as reader
from aspire.policies import Fixed, Method
from aspire.prefill import prefill, random_prompt
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Emulation, Verification
from experiments.bench_load import main as bench_load
from experiments.compare import run_comparison
from experiments.environment import synchronise

pytestmark = GPU
MIB = 2**20
BF16 = torch.bfloat16


def allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def free() -> int:
    """Bytes of the GPU that nobody holds, after a collection."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


# -- a long run --------------------------------------------------------------------------------------------------------


def endless() -> Iterator[Request]:
    """Ragged requests, greedy and sampled in turn, some that end by an end id."""
    for round_ in count():
        for i, prompt in enumerate(prompts(16, seed=round_)):
            sampling = replace(WARM, seed=16 * round_ + i) if i % 2 else Sampling()
            yield Request(f"r{round_}.{i}", prompt, sampling, 8 + 3 * (i % 5), end_ids=(5, 50))


@pytest.mark.parametrize("name", ["autoregressive", "aspire", "vegas"])
def test_two_thousand_steps_leave_nothing_behind(name: str) -> None:
    """D05 at length: requests enter and leave, a tight pool preempts; pages come back and memory does not grow.

    A captured pass keeps memory, so only samples between which nothing was captured are compared.
    """
    method, steps, first = BY_NAME[name], *((2000, 200) if CUDA else (120, 40))
    model = model_on(spec_of("llama"))
    engine = build(model, method, 8, pages=8 * 8)
    start, supply = engine.pool.allocator.free_pages, endless()
    for _ in range(8):
        engine.submit(next(supply))
    engine.submit(requests(prompts(1), WARM)[0])  # the widest sampling there will be opens the batch
    engine.fill_slots()
    engine.prepare()
    samples: list[tuple[int, int, int]] = []
    for step in range(steps):
        while len(engine.waiting) < 3:
            engine.submit(next(supply))
        engine.step()
        if step >= first and step % 50 == 0:
            samples.append((step, engine.graph_misses, allocated()))
    assert len(engine.passes) >= steps - 5
    assert engine.preemptions > 0
    # The gathered keys of the longest prompt so far are kept: a few KiB.
    grown = [b[2] - a[2] for a, b in zip(samples, samples[1:]) if a[1] == b[1]]
    assert sum(grown) < 64 * 1024, samples
    print(name, "preempted", engine.preemptions, "misses", engine.graph_misses, "bytes", samples[-1][2])
    engine.close()
    assert engine.pool.allocator.free_pages == start
    assert set(engine.pool.allocator.owners) == {0}


# -- the worst pass ----------------------------------------------------------------------------------------------------


@NEEDS_CUDA
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_d09_the_worst_verify_has_run_before_the_first_real_one(mode: str, capsys: pytest.CaptureFixture) -> None:
    """D09, D11: B = 64, k = 16, V = 151,936: `prepare` takes all that passes will take, sampler included.

    The plan made beforehand covers it within 5 %.
    """
    slots, longest, prompt, answer = 64, 16, 96, 40
    spec = tiny_spec("qwen3", layers=2, head_dim=64, vocab=151_936, max_len=512)
    method = fixed("vegas", longest)
    sampling = Sampling(0.6, 50, 0.95)
    settings = EngineSettings(slots, prompt + answer, device=DEVICE, dtype=BF16)
    how = Verification(mode, emulation=Emulation("iid", 0.9))
    before = free()
    plan = plan_memory(
        spec, replace(settings, pages=slots * 12), [(method, slots)], how, Work((prompt,) * slots, answer, 50, False)
    )
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()
    model = random_weights(spec, BF16, DEVICE, 0)
    engine = Engine(model, replace(settings, pages=slots * 12), method, how)
    kept = [random_prompt(model, engine.pool, prompt, i) for i in range(slots)]
    for i, each in enumerate(kept):
        engine.submit(Request(f"r{i}", [1] * prompt, replace(sampling, seed=i), answer), each)
    engine.fill_slots()
    engine.prepare()
    prepared = torch.cuda.max_memory_reserved() - held
    while engine.busy:
        engine.step()
    taken = torch.cuda.max_memory_reserved() - held
    device = before - torch.cuda.mem_get_info()[0]
    print(*plan.table(), f"prepared {prepared / 2**30:.3f}, taken {taken / 2**30:.3f}, device {device / 2**30:.3f} GiB",
          f"misses {engine.graph_misses}", sep="\n")  # fmt: skip
    assert {p.kind for p in engine.passes} == {"draft", "verify"}
    assert taken <= 1.02 * prepared + 64 * MIB
    assert taken <= 1.05 * plan.total + 64 * MIB, capsys.readouterr().out


@pytest.mark.parametrize("chunk", [8192, 2048])
def test_d10_prefill_applies_the_head_to_the_last_row(chunk: int) -> None:
    """D10: 32k tokens, tiny hidden size, the whole vocabulary: 64 MiB where all logits are 19 GB, in fp32."""
    length, vocab = (32_768, 151_936) if CUDA else (2048, 997)
    spec = tiny_spec("qwen3", vocab=vocab, max_len=length)
    model = random_weights(spec, torch.float32, DEVICE, 0)
    pool = KVPool(spec.layers, spec.kv_heads, spec.head_dim, 3 * length // 16, 16, device=DEVICE)
    ids = prompts(1, shortest=length, longest=length)[0]
    prefill(model, pool, ids[:64], 64)  # libraries set themselves up
    before = allocated()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    prompt = prefill(model, pool, ids, chunk)
    assert prompt.logits.shape == (vocab,) and prompt.logits.isfinite().all()
    assert not CUDA or torch.cuda.max_memory_allocated() - before < 256 * MIB
    again = prefill(model, pool, ids[:1024], 100)
    torch.testing.assert_close(prefill(model, pool, ids[:1024], chunk).logits, again.logits, rtol=1e-4, atol=1e-4)


# -- capacity ----------------------------------------------------------------------------------------------------------


def wide_model() -> Decoder:
    """Large enough that a pass is longer than a launch: four layers of Qwen3-1.7B's attention, a small vocabulary."""
    spec = ModelSpec.from_hf({
        "model_type": "qwen3", "head_dim": 128, "vocab_size": 32_000, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072, "rope_theta": 1e6, "num_key_value_heads": 8, "num_attention_heads": 16,
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "tie_word_embeddings": True,
    })  # fmt: skip
    return random_weights(spec, BF16, DEVICE, 0)


def opened(model: Decoder, method: Method, capacity: int, live: int) -> Engine:
    """Eight requests of `live` tokens in slots that could hold `capacity`; one pass has run."""
    settings = EngineSettings(8, capacity, pages=8 * (2 * live // 16 + 24), device=DEVICE, dtype=BF16)
    engine = Engine(model, settings, method, Verification("rejection", emulation=Emulation("iid", 0.9)))
    for i in range(8):
        kept = random_prompt(model, engine.pool, live, i)
        engine.submit(Request(f"r{i}", [1] * live, Sampling(0.7, 50, 0.9, seed=i), 320), kept)
    engine.fill_slots()
    engine.prepare()
    engine.step()
    engine.passes = []
    return engine


@NEEDS_CUDA
@pytest.mark.parametrize("name", ["autoregressive", "aspire_fixed"])
def test_d14_time_follows_the_live_length_not_the_capacity(name: str) -> None:
    """D14: room for 131,072 tokens with 2,048 live takes at most 10 % longer than room for 4,096; kinds apart."""
    model, method = wide_model(), BY_NAME[name]
    if name == "aspire_fixed":
        method = replace(method, selection=replace(method.selection, floor=512, recent=128))  # type: ignore[type-var]
    engines = [opened(model, method, capacity, 2048) for capacity in (131_072, 4096)]
    for _ in range(10):  # in turn, so that drift meets both
        for engine in engines:
            for _ in range(12):
                engine.step()
    kinds = {p.kind for p in engines[0].passes}
    spans = [{k: median(p.seconds for p in e.passes if p.kind == k) for k in kinds} for e in engines]
    print(name, [{k: f"{1e6 * v:.0f} us" for k, v in span.items()} for span in spans])
    for engine in engines:
        assert engine.graph_misses == 0
        engine.close()
    slower = {kind: spans[0][kind] / spans[1][kind] for kind in kinds}
    assert all(ratio <= 1.1 for ratio in slower.values()), slower


@NEEDS_CUDA
def test_b12_a_draft_length_of_zero_costs_what_plain_decoding_costs() -> None:
    """B12: the same graphs, kernels and selection-free passes, within 2 % of autoregressive decoding."""
    model = wide_model()
    never = replace(BY_NAME["aspire_fixed"], speculation=Fixed(0))
    engines = [opened(model, method, 8192, 4096) for method in (BY_NAME["autoregressive"], never)]
    for _ in range(10):
        for engine in engines:
            for _ in range(12):
                engine.step()
    plain, zero = (median(p.seconds for p in engine.passes) for engine in engines)
    shapes = [set(engine.launcher.graphs.captured) for engine in engines]  # type: ignore[union-attr]
    for engine in engines:
        engine.close()
    assert shapes[0] == shapes[1] and abs(zero / plain - 1) <= 0.02, (plain, zero)


@NEEDS_CUDA
def test_b10_the_first_timed_pass_is_like_the_others() -> None:
    """B10: after `prepare` and a few passes nothing is compiled or captured any more, and no pass stands out."""
    engine = opened(wide_model(), BY_NAME["autoregressive"], 8192, 4096)
    for run in range(2):
        for _ in range(8):
            engine.step()
        engine.passes = []
        for _ in range(40):
            engine.step()
        times = [p.seconds for p in engine.passes]
        assert engine.graph_misses == 0 and abs(times[0] / median(times) - 1) <= 0.1, (run, times[0], median(times))
    engine.close()


# -- many jobs ---------------------------------------------------------------------------------------------------------


def job(number: int, pages: int) -> list[list[int]]:
    """A model of 150 MB, a pool and captured passes of its own, and a few requests."""
    spec = tiny_spec(("llama", "qwen3")[number % 2], layers=4, head_dim=128, vocab=50_000)
    model = random_weights(spec, BF16, DEVICE, number)
    method = METHODS[number % len(METHODS)]
    settings = EngineSettings(4, 160, pages=pages, device=DEVICE, dtype=BF16)
    engine = Engine(model, settings, method, Verification("rejection"))
    return [r.output_ids for r in engine.generate(requests(prompts(4), WARM, new=12))]


@NEEDS_CUDA
def test_d15_a_sweep_leaves_the_memory_free() -> None:
    """D15: jobs that alternate methods and models in one process; one that asks for too much does not harm the next."""
    job(0, 64)  # libraries set themselves up
    before, left = free(), []
    for number in range(12):
        if number == 6:
            with pytest.raises(torch.OutOfMemoryError):
                job(number, 2**24)
        else:
            assert all(len(text) == 12 for text in job(number, 20_000))
        left.append(free())
    print([f"{(before - x) / MIB:.0f} MiB" for x in left])
    assert all(abs(before - x) < 200e6 for x in left)


ONE_KERNEL = """
import torch
from aspire.kernels.norm import rms_norm_triton
x = torch.ones(3, 64, device="cuda")
print(float(rms_norm_triton(x, torch.ones(64, device="cuda"), 0.0).sum()))
"""


SIZED = (
    "{model_type:qwen3,vocab_size:32000,hidden_size:512,num_hidden_layers:4,num_attention_heads:8,"
    "num_key_value_heads:8,head_dim:64,intermediate_size:1024,rms_norm_eps:1e-6,rope_theta:10000.0,"
    "max_position_embeddings:32768,tie_word_embeddings:true}"
)


@NEEDS_CUDA
def test_b15_a_cells_peak_is_its_own(tmp_path: Path) -> None:
    """B15: a large batch and a small one, in both orders, in one process: each peak is the same within 2 %."""
    words = {
        "model.shape": SIZED, "model.dtype": "bfloat16", "benchmark.source.context": "20000", "engine.device": "cuda",
        "protocol.repeats": "1",
    }  # fmt: skip
    peaks: dict[str, list[float]] = {"8": [], "2": []}
    for number, batch in enumerate(("8", "2", "2", "8")):
        made = configs(tmp_path, ["autoregressive"], batch=batch, **words)
        (record,) = run_comparison(made, tmp_path / str(number), lambda line: None)
        assert record.status == "ok" and record.metrics.peak_gib is not None, record.error
        peaks[batch].append(record.metrics.peak_gib)
    print(peaks)
    assert all(max(each) <= 1.02 * min(each) for each in peaks.values()) and peaks["8"][0] > 2 * peaks["2"][0]


def kernel_process(cache: Path) -> subprocess.Popen:
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    root = Path(__file__).parents[1]
    return subprocess.Popen([sys.executable, "-c", ONE_KERNEL], cwd=root, env=env, stdout=subprocess.PIPE, text=True)


@NEEDS_CUDA
def test_d16_a_killed_compilation_leaves_a_cache_that_works(tmp_path: Path) -> None:
    """D16: two processes begin with the same empty cache, one is killed as it fills it; the other and a third work."""
    doomed, other = kernel_process(tmp_path), kernel_process(tmp_path)
    deadline = time.monotonic() + 120
    while not any(tmp_path.rglob("*")) and other.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    doomed.kill()
    doomed.communicate()
    for process in (other, kernel_process(tmp_path)):
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and float(out) == pytest.approx(192)


# -- timers ------------------------------------------------------------------------------------------------------------


@NEEDS_CUDA
def test_b11_the_clock_waits_for_the_device() -> None:
    """B11: products of 8k x 8k by the project's clock and by events: within 5 %."""
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=BF16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.matmul(a, b)
    synchronise("cuda")
    start = time.perf_counter()
    begin.record()
    for _ in range(20):  # the same ones for both: a GPU under load lowers its clock from one run to the next
        torch.matmul(a, b)
    end.record()
    synchronise("cuda")
    seconds = time.perf_counter() - start
    assert seconds == pytest.approx(begin.elapsed_time(end) / 1e3, rel=0.05)


def test_a_request_that_never_fits_is_refused_before_it_runs() -> None:
    """D09: no pool can grow later, so the engine says at once what it lacks."""
    engine: Any = build(model_on(spec_of("llama")), BY_NAME["aspire"], 2, pages=8)
    with pytest.raises(ValueError, match="pages"):
        engine.submit(Request("r", [1] * 60, max_new_tokens=60))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1000, 2**20])
def test_a_sharded_checkpoint_arrives_whole_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype
) -> None:
    """Through two pinned buffers that take turns, of the stored dtype and cast, in pieces that end within a row."""
    monkeypatch.setattr(reader, "PIECE", piece)
    model = tiny_model("qwen3", layers=4)
    loaded = load_folder(write_folder(tmp_path, model, sharded=True), dtype, DEVICE)
    assert {parameter.device.type for parameter in loaded.parameters()} == {DEVICE}
    assert_same(loaded.to("cpu"), model.to(dtype))


@NEEDS_CUDA
def test_loading_takes_at_most_twice_a_plain_read() -> None:
    """Qwen3-1.7B's full shape in shards: its bounds of time and of host memory."""
    assert bench_load(["device=cuda"]) == 0
