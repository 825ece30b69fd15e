"""How fast is the engine on this GPU, and what does drafting gain at the paper's sizes? Comparisons, in one JSON line.

python -m experiments.bench_gpu suite=autoregressive     # plain decoding at the sizes of the yardsticks
python -m experiments.bench_gpu suite=shapes out=runs/shapes repeats=3
Suites: autoregressive, shapes (random weights and prompts, emulated acceptance), hetero (acceptance differs between
requests, against every fixed draft length), smollm2 (real weights and text). Further words are overrides for all cells.
"""

import json
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir

from experiments.compare import run_comparison
from experiments.config import CONF, METHODS, UNIQUE, check_overrides, for_method, nearest, plain, refuse, register
from experiments.records import Record, claim_dir
from experiments.session import Config

PASSES = 64  # timed passes of a window, about
Batch = int | str


@dataclass(frozen=True)
class Bench:
    """One comparison. passes: how long a window is, in passes of plain decoding; overrides on top of all others."""

    model: str
    batch: Batch
    context: int
    methods: tuple[str, ...] = ("autoregressive",)
    overrides: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()  # of aspire_fixed, each a method of its own
    passes: int = PASSES
    group: str = field(default="")

    @property
    def name(self) -> str:
        mode = f"-{self.group}" if self.group else ""
        return f"{self.model}-{self.context}-{self.batch}{mode}"


IID = ("acceptance=iid", "acceptance.alpha=0.95")
MODELS = ("qwen3_1p7b", "qwen3_8b", "ds_r1_llama_8b")
YARDSTICKS = [
    *(Bench("qwen3_1p7b", batch, context) for batch, context in ((64, 4096), (32, 32768), (12, 90000))),
    *(Bench("qwen3_8b", batch, context) for batch, context in ((32, 4096), (20, 32768), (7, 90000))),
]
PAPER = [
    Bench(model, "max_fit", context, ("autoregressive", "aspire"), (*IID, f"comparison.batch_mode={mode}"), group=mode)
    for model in MODELS
    for context in (17000, 35000, 90000)
    for mode in ("equal", "max_fit")
]
HETERO = [
    Bench(
        "qwen3_1p7b", 12, 90000, ("autoregressive", "aspire"), ("acceptance=hetero",), tuple(range(1, 13)), 2 * PASSES
    )
]
TEXT = [
    Bench(
        "smollm2_135m", batch, 7000, METHODS,
        ("model.weights=real", "model.dtype=bfloat16", "benchmark=pystdlib", "benchmark.source.prompt_tokens=7000",
         "benchmark.source.requests=64", "benchmark.max_new_tokens=256", "protocol.prompt_kv=prefill"),
        passes=4 * PASSES,
    )  # fmt: skip
    for batch in (64, "max_fit")
]  # fmt: skip
SUITES = {"autoregressive": YARDSTICKS, "shapes": PAPER, "hetero": HETERO, "smollm2": TEXT}


def overrides_of(bench: Bench, window_batch: int) -> list[str]:
    """The words of a comparison; window_batch: the batch that sizes the window."""
    tokens = bench.passes * window_batch
    # Drafts let some requests run ahead: twice the mean, and then some, so that none ends within a window.
    answer = 2 * bench.passes + 64
    return [
        f"model={bench.model}", "model.weights=random", "benchmark=shapes", f"benchmark.source.context={bench.context}",
        f"benchmark.max_new_tokens={answer}", f"batch={bench.batch}", f"protocol.window_tokens={tokens}",
        "protocol.prompt_kv=random", "sampling=paper", "verification=rejection",
    ]  # fmt: skip


def words_for(bench: Bench, words: list[str], out: Path) -> list[str]:
    """All overrides of a comparison: those of `words` win over the cell's, and these over the suite's."""
    window_batch = bench.batch if isinstance(bench.batch, int) else 16
    given = [*overrides_of(bench, window_batch), f"calibration.dir={out / 'calibration'}", *bench.overrides, *words]
    return list({word.split("=", 1)[0]: word for word in given}.values())


def configs_for(bench: Bench, words: list[str], out: Path) -> list[Config]:
    """A config a method, and one for every fixed length."""
    words = words_for(bench, words, out)
    configs = [plain(for_method(words, method)) for method in bench.methods]
    for length in bench.lengths:
        config = plain(for_method([*words, f"method.speculation.longest={length}"], "aspire_fixed"))
        config["method"] |= {"name": f"aspire_fixed_{length}", "label": f"ASPIRE-Fixed {length}"}
        configs.append(config)
    return [config | {"run_id": out.name} for config in configs]


def line_of(bench: Bench, record: Record) -> dict[str, Any]:
    """What is printed of a cell."""
    protocol, timing, metrics = record.protocol or {}, record.timing, record.metrics
    if record.status != "ok" or timing.decode_s is None or timing.passes is None:
        return {"model": bench.model, "method": record.cell.method, "context": bench.context, "error": record.error}
    return {
        "model": bench.model, "method": record.cell.method, "batch": record.cell.batch, "context": bench.context,
        "batch_mode": protocol.get("batch_mode"), "step_ms": _round(1e3 * timing.decode_s / timing.passes, 3),
        "tok_s": _round(metrics.decode_tok_s, 1), "host_gap": _round(timing.host_gap, 4),
        "graph_misses": protocol.get("graph_misses"), "hbm_efficiency": _round(metrics.hbm_efficiency, 3),
        "peak_gib": _round(metrics.peak_gib, 2), "planned_gib": _round(protocol.get("planned_gib"), 2),
        "prefill_s": _round(timing.prefill_s, 2), "acceptance_rate": _round(metrics.acceptance_rate, 4),
        "tokens_per_round": _round(metrics.tokens_per_round, 3),
    }  # fmt: skip


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def measure(benches: list[Bench], words: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the comparisons one after another, a line each as it ends."""
    lines = []
    for bench in benches:
        for record in run_comparison(configs_for(bench, words, out), out / bench.name):
            lines.append(line_of(bench, record))
            print(json.dumps(lines[-1]), flush=True)
    return lines


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Our own keys, and the overrides for every cell."""
    own = {"suite": "autoregressive", "out": "", "repeats": "1", "only": ""}
    rest = []
    for word in arguments:
        key, _, value = word.partition("=")
        if key in own:
            own[key] = value
        else:
            rest.append(word)
    return own, rest


def main(arguments: list[str]) -> int:
    """Run a suite; returns how many cells failed. Raises ValueError for bad arguments, before any work."""
    register()
    own, words = split(arguments)
    if own["suite"] not in SUITES:
        raise ValueError(f"unknown suite {own['suite']!r}{nearest(own['suite'], list(SUITES))}")
    benches = [b for b in SUITES[own["suite"]] if own["only"] in b.name]
    if not benches:
        raise ValueError(f"no cell of suite {own['suite']} has {own['only']!r} in its name")
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{UNIQUE}"
    out = Path(own["out"] or f"runs/bench-gpu-{own['suite']}-{stamp}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = [f"protocol.repeats={own['repeats']}", *words]
        check_overrides(words_for(benches[0], words, out))
        claim_dir(out)
        lines = measure(benches, words, out)
    failed = sum("error" in line for line in lines)
    print(json.dumps({"suite": own["suite"], "failed": failed, "cells": lines}))
    return failed


if __name__ == "__main__":
    try:
        raise SystemExit(1 if main(sys.argv[1:]) else 0)
    except ValueError as error:
        refuse(error)
