"""What do the record, table and figure tests read? FIXTURES: made-up cells, never results of a run."""

import random
from pathlib import Path
from statistics import median
from typing import Any

from experiments.metrics import summarise
from experiments.records import (
    Cell,
    Environment,
    PromptTokens,
    Record,
    Repeats,
    RequestLine,
    SamplingUsed,
    Timing,
    Workload,
    failed_record,
    write_record,
)

# name -> (label, acceptance of one draft, drafts a round, seconds a committed token)
METHODS: dict[str, tuple[str, float, int, float]] = {
    "autoregressive": ("Autoregressive", 0.0, 0, 0.0100),
    "magicdec_stream": ("MagicDec-Stream", 0.71, 4, 0.0074),
    "magicdec_snapkv": ("MagicDec-SnapKV", 0.73, 4, 0.0072),
    "vegas": ("Vegas", 0.80, 6, 0.0055),
    "vegas_async": ("Vegas-async", 0.80, 6, 0.0049),
    "sparsespec": ("SparseSpec", 0.74, 8, 0.0063),
    "aspire_fixed": ("ASPIRE-Fixed", 0.76, 5, 0.0050),
    "aspire_fsm": ("ASPIRE-FSM", 0.76, 8, 0.0045),
    "aspire": ("ASPIRE", 0.76, 12, 0.0037),
}


def request(rounds: list[tuple[int, int]], name: str = "r0", stopped: bool = False, prompt: int = 100) -> RequestLine:
    """A line that obeys the counting rules; stopped: its last accepted draft was the stop."""
    committed = sum(accepted + 1 for _, accepted in rounds) - stopped
    return RequestLine(
        id=name,
        prompt_ids_sha1="0" * 40,
        prompt_tokens=prompt,
        output_ids=list(range(committed + 1)),
        finish_reason="stop" if stopped else None,
        seed=123,
        rounds=rounds,
    )


def requests(acceptance: float, drafts: int, count: int = 8, rounds: int = 12, seed: int = 0) -> list[RequestLine]:
    """Lines whose drafts are accepted one by one with the same probability."""
    dice = random.Random(seed)

    def accepted() -> int:
        return next((j for j in range(drafts) if dice.random() > acceptance), drafts)

    return [request([(drafts, accepted()) for _ in range(rounds)], f"r{i}") for i in range(count)]


def timed(
    lines: list[RequestLine],
    decode_s: list[float],
    method: str = "aspire",
    label: str | None = None,
    prefill_s: float = 2.0,
    config: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **cell: Any,
) -> Record:
    """A finished record over the lines; cell, config and environment take overrides."""
    timing = Timing(
        prefill_s=prefill_s,
        decode_s=median(decode_s),
        passes=120,
        draft_pass_ms=4.2 if method != "autoregressive" else None,
        verify_pass_ms=9.8,
        repeats=Repeats(decode_s=decode_s),
    )
    tokens, metrics = summarise(lines, timing, peak_gib=1.5)
    base: dict[str, Any] = {"model": "smollm2_135m", "benchmark": "pystdlib", "batch": 8, "seed": 123}
    made = Cell(**(base | {"method": method} | cell))
    return Record(
        cell_id=f"{made.model}-{made.benchmark}-{method}",
        status="ok",
        cell=made,
        environment=Environment(**({"device": "FAKE CPU", "torch": "0"} | (environment or {}))),
        config={
            "run_id": "fixture",
            "engine": {"device": "cpu", "dtype": "float32", "slots": made.batch},
            "model": {"name": made.model, "revision": "main"},
            "benchmark": {"name": made.benchmark, "max_new_tokens": 64},
            "method": {"name": method, "label": label or method},
            "comparison": {"methods": list(METHODS)},
        }
        | (config or {}),
        workload=Workload(
            requests=len(lines), prompt_tokens=PromptTokens(min=100, mean=100, max=100), data_hash="d0", truncated=0
        ),
        sampling=SamplingUsed(temperature=0.7, top_k=50, top_p=0.9, seed=123, verification="coupled"),
        protocol={"window_tokens": 512, "replay": "cyclic", "warmup_passes": 3, "repeats": len(decode_s)},
        tokens=tokens,
        timing=timing,
        metrics=metrics,
    )


def write_comparison(
    root: Path, benchmarks: list[str], model: str = "smollm2_135m", failing: tuple[str, str] | None = None, **cell: Any
) -> list[Path]:
    """Every method on every benchmark under root; failing is one (benchmark, method) whose cell failed."""
    folders = []
    for place, benchmark in enumerate(benchmarks):
        for name, (label, alpha, drafts, per_token) in METHODS.items():
            lines = requests(alpha, drafts, seed=place)
            seconds = per_token / (1 + 0.4 * place * (name != "autoregressive"))
            total = sum(line.committed for line in lines) * seconds
            turns = [total * (1 + 0.03 * ((turn * len(name)) % 5 - 2)) for turn in range(3)]
            record = timed(lines, turns, name, label, model=model, benchmark=benchmark, **cell)
            if (benchmark, name) == failing:
                record, lines = failed_record(record.cell, record.config, RuntimeError("out of memory:\nask less")), []
            folders.append(root / f"{model}-{benchmark}-{name}")
            write_record(folders[-1], record, lines)
    return folders
