"""Where does the time of a pass go on this GPU? One engine under the profiler, ending in one JSON line.

python -m experiments.bench_pass [model=qwen3_1p7b batch=12 benchmark.source.context=90000 method=aspire] [passes=96]
Random weights, random prompts and emulated acceptance unless overrides say otherwise. Of the profiled passes, of all
and of each kind: the time of each part's kernels, and the time in which no kernel of the model runs but one of the
sampler, the verification, the selection or the scheduling does, for these may run beside the model; the rest is idle.
Passes are timed without the profiler, against their fewest bytes at copy bandwidth.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import initialize_config_dir

from aspire.engine import PassRecord
from experiments.bench_gpu import IID, Bench, words_for
from experiments.compare import cell_of, fill, prepare
from experiments.config import CONF, check_overrides, for_method, plain, register, script, split
from experiments.environment import copy_tb_s
from experiments.layout import lay_out, make_method, resolve
from experiments.metrics import fewest_bytes
from experiments.outcome import Entry, weight_bytes_read
from experiments.session import open_session

# Part of a pass -> what the names of its kernels contain. What is in none is scheduling: small operations on slots.
PARTS = {
    "attention": ("_attention_kernel",),
    "merging": ("_merge_kernel",),
    "products": ("_skinny_kernel", "nvjet", "gemm", "gemv", "splitKreduce", "cutlass"),
    "layers": ("_rms_norm", "_store_heads", "_silu_mul", "cos_kernel", "sin_kernel", "gather_kernel"),
    "sampler": ("_filter_kernel",),
    "verification": ("_judge_kernel",),
    "selection": ("_reduce_scores", "_top_blocks", "_resolve_kernel", "_count_kernel"),
}
MODEL = ("attention", "merging", "products", "layers")
JUDGED, LAST = "_judge_kernel", "_report_kernel"  # kernels of a pass that verifies, and the last one of any
Span = tuple[float, float]  # begin and end, us


def part_of(kernel: str) -> str:
    return next((part for part, names in PARTS.items() if any(name in kernel for name in names)), "scheduling")


def covered(spans: Iterable[Span]) -> float:
    """Time in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def shares(kernels: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Shares of the window of (name, begin, end): each part's kernels, what is not beside the model, idle."""
    spans = [(begin, end) for _, begin, end in kernels]
    window = max(end for _, end in spans) - min(begin for begin, _ in spans)
    of_part: dict[str, float] = defaultdict(float)
    for name, begin, end in kernels:
        of_part[part_of(name)] += end - begin
    busy, model = covered(spans), covered((b, e) for name, b, e in kernels if part_of(name) in MODEL)
    return {
        "kernels": {part: round(time / window, 4) for part, time in sorted(of_part.items())},
        "beside_no_model": round((busy - model) / window, 4), "idle": round(1 - busy / window, 4),
    }  # fmt: skip


def by_kind(kernels: list[tuple[str, float, float]]) -> dict[str, dict[str, float]]:
    """Mean microseconds a pass of each kind, as `shares` divides them; what follows the last report is left out."""
    passes: list[list[tuple[str, float, float]]] = [[]]
    for kernel in sorted(kernels, key=lambda kernel: kernel[1]):
        passes[-1].append(kernel)
        if LAST in kernel[0]:
            passes.append([])
    kinds = defaultdict(list)
    for own in passes[:-1]:
        window, found = max(end for _, _, end in own) - own[0][1], shares(own)
        parts = found.pop("kernels") | found
        kind = "verifying" if any(JUDGED in name for name, _, _ in own) else "draft"
        kinds[kind].append({"window": window} | {part: window * share for part, share in parts.items()})
    return {
        kind: {"passes": len(each)}
        | {part: round(sum(x.get(part, 0.0) for x in each) / len(each), 1) for part in {p: 0 for x in each for p in x}}
        for kind, each in kinds.items()
    }


def timed(passes: list[PassRecord], sizes: tuple[int, int], copy: float) -> dict[str, Any]:
    """Median milliseconds and multiple of the fewest bytes by kind of pass."""
    found = {}
    for kind in ("draft", "mixed", "verify"):
        if own := [p for p in passes if p.kind == kind]:
            over = median(p.seconds / (fewest_bytes(p.tokens, p.kv_tokens, *sizes) / copy / 1e12) for p in own)
            ms = 1e3 * median(p.seconds for p in own)
            found[kind] = {"passes": len(own), "ms": round(ms, 3), "over_bytes": round(over, 3)}
    return found


def profile(step: Callable[[], Any], passes: int) -> list[tuple[str, float, float]]:
    """Kernels and copies of some steps: name, begin and end in us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(passes):
            step()
        torch.cuda.synchronize()
    on_gpu = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.start, e.time_range.end) for e in on_gpu]


def main(arguments: list[str]) -> None:
    """Raises ValueError for bad arguments, or where there is no GPU."""
    register()
    own, words = split(arguments, {"model": "qwen3_1p7b", "method": "aspire", "batch": "12", "passes": "96"})
    if not torch.cuda.is_available():
        raise ValueError("kernels are timed on a GPU, and torch finds none")
    passes, out = int(own["passes"]), Path("runs/bench-pass")
    # Twice: first without the profiler. No request may end before.
    bench = Bench(own["model"], int(own["batch"]), 90_000, (own["method"],), IID, window=2 * passes)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = words_for(bench, words, out)
        check_overrides(words)
        config = resolve(plain(for_method(words, own["method"])) | {"run_id": out.name})
    copy = copy_tb_s("cuda")
    entry = Entry(config, cell_of(config), make_method(config))
    session = open_session(lay_out(config, [entry.method]))  # type: ignore[list-item]
    prepare(entry, session, print)
    assert entry.engine is not None and copy is not None
    with closing(entry.engine) as engine:
        fill(engine, session, itertools.count(), [])
        engine.passes = []
        for _ in range(passes):
            engine.step()
        sizes = weight_bytes_read(session), session.model.spec.kv_bytes_per_token(session.settings.dtype)
        result = {"cell": bench.name, "method": own["method"], "passes": timed(engine.passes, sizes, copy)}
        kernels = profile(engine.step, passes)
        result |= shares(kernels) | {"us_by_kind": by_kind(kernels)}
    for key, value in result.items():
        print(f"{key}: {value}")
    print(json.dumps(result | {"copy_tb_s": copy}))


if __name__ == "__main__":
    script(main)
