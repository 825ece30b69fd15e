"""What does engine.invariant hold, and what does it cost? Every method's text, alone and in a batch, bit by bit.

python -m experiments.invariance [dtype=bfloat16] [device=auto] [prompts=8] [new_tokens=256] [methods=all] [batches=1,8]

SmolLM2, real text, greedy. With invariant rows each method has to say, in bf16 as in fp32, what plain decoding says of
each prompt alone; without, texts part at near ties. Prints the texts that differ both ways, and the slowdown. On two
cores: new_tokens=48 methods=autoregressive,vegas,aspire.
"""

import json
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from aspire.engine import Engine, make_pool
from aspire.memory import pool_pages
from aspire.model import load
from aspire.prefill import prefill
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Verification
from experiments.config import nearest, script, split
from experiments.environment import synchronise
from experiments.lossless import LONGEST, Texts, methods, prompts, texts

OWN = {
    "dtype": "bfloat16", "device": "auto", "prompts": "8", "new_tokens": "256", "methods": "all", "batches": "1,8",
}  # fmt: skip
PLAIN = "autoregressive"


@dataclass(frozen=True)
class Run:
    """One method at one batch size: texts, and tokens a second of decoding, prompts and captures aside."""

    method: str
    batch: int
    invariant: bool
    texts: Texts
    tok_s: float


def runs_of(own: dict[str, str]) -> list[Run]:
    """Every method at every batch size, with invariant rows and without; raises ValueError for an unknown method."""
    device = own["device"] if own["device"] != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    new_tokens, batches = int(own["new_tokens"]), [int(b) for b in own["batches"].split(",")]
    known = {method.name: method for method in methods()}
    names = list(known) if own["methods"] == "all" else own["methods"].split(",")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown method {unknown[0]!r}{nearest(unknown[0], list(known))}")
    names = [PLAIN, *(name for name in names if name != PLAIN)]
    ids, dtype = prompts(int(own["prompts"])), getattr(torch, own["dtype"])
    model, longest = load("embedded", dtype, device), max(known[name].speculation.longest for name in names)
    pages = pool_pages(16, [*map(len, ids)], max(batches), new_tokens, longest)
    found = []
    pool = make_pool(model, EngineSettings(1, LONGEST + new_tokens, 16, pages, device=device, dtype=dtype), longest)
    kept = [prefill(model, pool, x, 512) for x in ids]
    for invariant in (True, False):
        for batch in batches:
            for name in names:
                settings = EngineSettings(
                    batch, LONGEST + new_tokens, 16, pages, device=device, dtype=dtype, invariant=invariant
                )
                for _ in range(2 if device.startswith("cuda") else 1):  # the first compiles and captures
                    engine = Engine(model, settings, known[name], Verification("greedy"), pool)
                    synchronise(device)
                    start = time.perf_counter()
                    said = texts(engine, ids, kept, new_tokens, Sampling())
                    synchronise(device)
                    spent = time.perf_counter() - start - engine.prefill_seconds
                tokens = sum(map(len, said)) - len(said)
                found.append(Run(name, batch, invariant, said, tokens / spent))
                print(f"{name}, batch {batch}, {'invariant' if invariant else 'plain'}: {found[-1].tok_s:.1f} tok/s")
    return found


def lines_of(runs: list[Run]) -> list[dict[str, object]]:
    """A line a method and batch size: texts that differ from plain decoding's of each prompt alone, both ways."""
    by = {(run.method, run.batch, run.invariant): run for run in runs}
    least = min(run.batch for run in runs)
    lines: list[dict[str, object]] = []
    for run in (run for run in runs if run.invariant):
        loose = by[run.method, run.batch, False]
        differ = [
            sum(a != b for a, b in zip(one.texts, by[PLAIN, least, one.invariant].texts, strict=True))
            for one in (run, loose)
        ]
        lines.append(
            {
                "method": run.method, "batch": run.batch, "differ": differ[0], "differ_without": differ[1],
                "tok_s": round(run.tok_s, 1), "tok_s_without": round(loose.tok_s, 1),
                "slowdown": round(loose.tok_s / run.tok_s, 3),
            }
        )  # fmt: skip
    return lines


def main(arguments: list[str]) -> int:
    """Returns how many texts differ with invariant rows. Raises ValueError for bad arguments."""
    own, rest = split(arguments, OWN)
    if rest:
        raise ValueError(f"unknown argument {rest[0]!r}; there are {', '.join(OWN)}")
    lines = lines_of(runs_of(own))
    table = Table(title=f"texts of {own['prompts']} that are not those of plain decoding alone, {own['dtype']}, greedy")
    for name in lines[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "method" else "right")
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=120).print(table)
    print(json.dumps({"dtype": own["dtype"], "lines": lines}))
    return sum(int(str(line["differ"])) for line in lines)


if __name__ == "__main__":
    script(main)
