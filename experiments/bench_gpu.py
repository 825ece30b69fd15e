"""How fast is the engine on this GPU, and what does drafting gain at the paper's sizes? Comparisons, in one JSON line.

python -m experiments.bench_gpu suite=autoregressive     # plain decoding at the sizes of the yardsticks
python -m experiments.bench_gpu suite=shapes out=runs/shapes repeats=3 only=qwen3_8b
Suites: autoregressive, shapes (random weights and prompts, emulated acceptance), hetero (acceptance differs between
requests, against every fixed draft length), smollm2 (real weights and text). only: cells with this in their name.
Further words are overrides for all cells.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from rich.console import Console
from rich.table import Table

from experiments.compare import run_comparison
from experiments.config import (
    CONF,
    METHODS,
    UNIQUE,
    check_overrides,
    for_method,
    nearest,
    plain,
    register,
    script,
    split,
)
from experiments.hold import claim_dir
from experiments.loading import Config
from experiments.metrics import predicted_speedup, ratio, speedup
from experiments.records import PASSES, Record, find_records, read_record

BASELINE = "autoregressive"
OWN = {"suite": "autoregressive", "out": "", "repeats": "1", "only": ""}  # words that are no overrides
WINDOW = 64  # tokens that a slot commits in a window: the passes of plain decoding


@dataclass(frozen=True)
class Bench:
    """One comparison: a row of a suite. fixed: lengths of aspire_fixed, each a method of its own."""

    model: str
    batch: int | str
    context: int
    methods: tuple[str, ...] = (BASELINE,)
    overrides: tuple[str, ...] = ()
    fixed: tuple[int, ...] = ()
    window: int = WINDOW
    mode: str = "equal"

    @property
    def name(self) -> str:
        batch = self.batch if isinstance(self.batch, int) else f"fit-{self.mode}"
        return f"{self.model}-{self.context}-{batch}"


YARDSTICKS = [
    *(Bench("qwen3_1p7b", batch, context) for batch, context in ((64, 4096), (32, 32768), (12, 90000))),
    *(Bench("qwen3_8b", batch, context) for batch, context in ((32, 4096), (20, 32768), (7, 90000))),
]
IID = ("acceptance=iid", "acceptance.alpha=0.95")
PAPER = [
    Bench(model, "max_fit", context, (BASELINE, "aspire"), IID, mode=mode)
    for model in ("qwen3_1p7b", "qwen3_8b", "ds_r1_llama_8b")
    for context in (17000, 35000, 90000)
    for mode in ("equal", "max_fit")
]
# Requests run apart under hetero, so that answers have to be longer than the mean of a window; and of a short window,
# some hundred rounds, the best of twelve lengths is a matter of luck.
UNEVEN = ("acceptance=hetero", f"benchmark.max_new_tokens={10 * WINDOW}")
HETERO = [
    Bench("qwen3_1p7b", 12, 90000, (BASELINE, "aspire"), UNEVEN, fixed=tuple(range(1, 13)), window=8 * WINDOW),
]
REAL = (
    "model.weights=real", "model.dtype=bfloat16", "protocol.prompt_kv=prefill", "benchmark=pystdlib_7k",
    "benchmark.source.requests=64", "benchmark.max_new_tokens=512",
)  # fmt: skip
TEXT = [Bench("smollm2_135m", batch, 7000, METHODS, REAL, window=2 * WINDOW) for batch in (64, "max_fit")]
SUITES = {"autoregressive": YARDSTICKS, "shapes": PAPER, "hetero": HETERO, "smollm2": TEXT}


def words_for(bench: Bench, words: list[str], out: Path) -> list[str]:
    """The overrides of a comparison: those of `words` win over the cell's, and these over the suite's."""
    own = [w for w in bench.overrides if not (w.startswith("benchmark.source") and _asks("benchmark", words))]
    given = [
        f"model={bench.model}", "model.weights=random", "benchmark=shapes", "sampling=paper", "verification=rejection",
        f"benchmark.max_new_tokens={2 * bench.window + 64}",  # so that no request ends within a window
        f"batch={bench.batch}", f"comparison.batch_mode={bench.mode}", f"protocol.tokens_per_slot={bench.window}",
        "protocol.prompt_kv=random", f"calibration.dir={out / 'calibration'}", *own, *words,
    ]  # fmt: skip
    last = {word.split("=", 1)[0]: word for word in given}
    if last["benchmark"] == "benchmark=shapes":
        last.setdefault("benchmark.source.context", f"benchmark.source.context={bench.context}")
    return list(last.values())


def _asks(group: str, words: list[str]) -> bool:
    return any(word.startswith(f"{group}=") for word in words)


def configs_for(bench: Bench, words: list[str], out: Path) -> list[Config]:
    """A config a method, and one for every fixed length."""
    words = words_for(bench, words, out)
    configs = [plain(for_method(words, method)) for method in bench.methods]
    for length in bench.fixed:
        config = plain(for_method([*words, f"method.speculation.longest={length}"], "aspire_fixed"))
        config["method"] |= {"name": f"aspire_fixed_{length}", "label": f"ASPIRE-Fixed {length}"}
        configs.append(config)
    return [config | {"run_id": out.name} for config in configs]


def line_of(bench: Bench, record: Record) -> dict[str, Any]:
    """What is printed of a cell."""
    cell, protocol, timing, metrics = record.cell, record.protocol or {}, record.timing, record.metrics
    line: dict[str, Any] = {"model": cell.model, "method": cell.method, "batch": cell.batch, "context": bench.context}
    if record.status != "ok":
        return line | {"error": record.error}
    assert timing.decode_s is not None and timing.passes is not None
    return line | {
        "context": record.workload.prompt_tokens.max, "batch_mode": protocol.get("batch_mode"),
        "acceptance": cell.acceptance, "step_ms": rounded(1e3 * timing.decode_s / timing.passes, 3),
        "tok_s": rounded(metrics.decode_tok_s, 1), "host_gap": rounded(timing.host_gap, 4),
        "hbm_efficiency": rounded(metrics.hbm_efficiency, 3), "peak_gib": rounded(metrics.peak_gib, 2),
        "planned_gib": rounded(protocol.get("planned_gib"), 2), "graph_misses": protocol.get("graph_misses"),
        "prefill_s": rounded(timing.prefill_s, 2), "tokens_per_round": rounded(metrics.tokens_per_round, 3),
        "acceptance_rate": rounded(metrics.acceptance_rate, 4),
    }  # fmt: skip


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def predict(lines: list[dict[str, Any]], folder: Path) -> None:
    """Put beside each speed-up what the bytes of the same passes allow, and the share of it that was reached."""
    runs: dict[str, tuple[Record, list[dict[str, Any]]]] = {}
    for cell in find_records(folder):
        record = read_record(cell)
        if record.status == "ok":
            text = (cell / PASSES).read_text(encoding="utf-8")
            runs[record.cell.method] = record, [json.loads(line) for line in text.splitlines()]
    base = runs.get(BASELINE)
    for line in lines:
        if base is None or line["method"] not in runs or line["method"] == BASELINE:
            continue
        record, passes = runs[line["method"]]
        measured, reason = speedup(record, base[0])
        predicted = predicted_speedup(record, passes, *base)
        line["speedup"], line["predicted"] = rounded(measured, 3), rounded(predicted, 3)
        line["share"] = rounded(ratio(measured, predicted), 3)
        if reason:
            line["reason"] = reason


def measure(benches: list[Bench], words: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the comparisons one after another; prints a line a cell as soon as it is known."""
    lines = []
    for bench in benches:
        records = run_comparison(configs_for(bench, words, out), out / bench.name)
        own = [line_of(bench, record) for record in records]
        predict(own, out / bench.name)
        for line in own:
            print(json.dumps(line), flush=True)
        lines += own
    return lines


def print_table(lines: list[dict[str, Any]]) -> None:
    """Predicted and measured speed-ups."""
    rows = [line for line in lines if line.get("speedup") is not None]
    if not rows:
        return
    keys = ("model", "method", "acceptance", "batch_mode", "batch", "context", "tokens_per_round", "predicted",
            "speedup", "share")  # fmt: skip
    table = Table(title="speed-up over autoregressive: what the bytes of the same passes allow, measured, their ratio")
    for key in keys:
        table.add_column(key)
    for line in rows:
        table.add_row(*(str(line[key]) for key in keys))
    Console(width=160).print(table)


def main(arguments: list[str]) -> int:
    """Run a suite; returns how many cells failed. Raises ValueError for bad arguments, before any work."""
    register()
    own, words = split(arguments, OWN)
    suite = own["suite"]
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}{nearest(suite, list(SUITES))}")
    benches = [bench for bench in SUITES[suite] if own["only"] in bench.name]
    if not benches:
        raise ValueError(f"no cell of suite {suite} has {own['only']!r} in its name")
    if not torch.cuda.is_available() and not any(word.startswith("engine.device=") for word in words):
        raise ValueError("no GPU found; engine.device=cpu runs the suite on the CPU all the same")
    words = [f"protocol.repeats={own['repeats']}", *words]
    out = Path(own["out"] or f"runs/bench-gpu-{suite}-{datetime.now():%Y-%m-%d_%H-%M-%S}-{UNIQUE}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(words_for(benches[0], words, out))
        claim_dir(out)
        lines = measure(benches, words, out)
    print_table(lines)
    failed = sum("error" in line for line in lines)
    print(json.dumps({"suite": suite, "failed": failed, "cells": lines}))
    return failed


if __name__ == "__main__":
    script(main)
