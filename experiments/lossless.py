"""Is every method exact on the real model? Greedy text against Hugging Face, sampled text against autoregressive.

SmolLM2 in fp32, prompts of real text from 20 to 2,000 tokens, several batch sizes; prints mismatching requests.
    python -m experiments.lossless [prompts=16] [new_tokens=64] [batches=1,3,8]
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from aspire.engine import Engine, make_pool
from aspire.memory import pool_pages
from aspire.model import load
from aspire.model.tokenizer import load_tokenizer
from aspire.policies import CostModel, Method
from aspire.prefill import Prompt, prefill
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Verification
from experiments import oracle
from experiments.benchmarks import PyStdlib
from experiments.config import CONF, for_method, plain, register, script
from experiments.fig1 import METHODS
from experiments.layout import make_method

Texts = list[list[int]]  # output ids of every prompt
MODES = ("greedy", "coupled")
SHORTEST, LONGEST = 20, 2000
SAMPLED = Sampling(0.7, 50, 0.9, seed=123)
# Whatever the lengths, the text must not change; these make the closed form draft, also on a CPU.
COST = CostModel(10.0, 1.0, 0.001, 30, 1)


def methods() -> list[Method]:
    """All methods with the embedded budget, so that selections are sparse at these lengths."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        configs = [plain(for_method(["budget=embedded"], name)) for name in METHODS]
        compose("config", ["output_dir=."])
    made = [make_method(config) for config in configs]
    return [m.with_cost_model(COST) if m.needs_cost_model else m for m in made]


def prompts(count: int) -> list[list[int]]:
    """Real text, the i-th prompt cut at the i-th of `count` geometric steps from 20 to 2,000 tokens."""
    items = PyStdlib(count, LONGEST).build(load_tokenizer("embedded"), 8192, 64)
    steps = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / max(count - 1, 1))) for i in range(count)]
    return [list(item.prompt_ids)[:n] for item, n in zip(items, steps, strict=True)]


def texts(engine: Engine, ids: list[list[int]], kept: list[Prompt], new_tokens: int, sampling: Sampling) -> Texts:
    """Output ids of every prompt, each with its own seed."""
    requests = [
        Request(str(i), x, replace(sampling, seed=sampling.seed + i), new_tokens, engine.model.spec.end_ids)
        for i, x in enumerate(ids)
    ]
    for request, prompt in zip(requests, kept, strict=True):
        engine.submit(request, prompt)
    while engine.busy:
        engine.step()
    return [r.output_ids for r in requests]


def outputs(mode: str, ids: list[list[int]], new_tokens: int, batches: list[int]) -> dict[tuple[str, int], Texts]:
    """The texts of every method at every batch size; runs in a process of its own, on one thread."""
    torch.set_num_threads(1)
    model, made, sampling = load("embedded"), methods(), Sampling() if mode == "greedy" else SAMPLED
    longest = max(m.speculation.longest for m in made)
    pages = pool_pages(16, [*map(len, ids)], max(batches), new_tokens, longest)
    settings = EngineSettings(max(batches), LONGEST + new_tokens, pages=pages)
    pool = make_pool(model, settings, longest)
    kept = [prefill(model, pool, x, settings.prefill_chunk) for x in ids]
    found = {}
    runs = [(method, batch) for batch in batches for method in made]
    for method, batch in tqdm(runs, mode, position=MODES.index(mode)):
        engine = Engine(model, replace(settings, slots=batch), method, Verification(mode), pool)
        found[method.name, batch] = texts(engine, ids, kept, new_tokens, sampling)
    return found


def mismatches(ids: list[list[int]], new_tokens: int, batches: list[int]) -> dict[tuple[str, str, int], int]:
    """Requests whose ids differ from the reference, by (method, mode, batch).

    The reference of greedy text is Hugging Face, that of coupled text autoregressive decoding at the first batch size.
    """
    with ProcessPoolExecutor(len(MODES), get_context("spawn")) as processes:
        jobs = {mode: processes.submit(outputs, mode, ids, new_tokens, batches) for mode in MODES}
        found = {mode: job.result() for mode, job in jobs.items()}
    hf, end_ids = oracle.huggingface_model(), load("embedded").spec.end_ids
    wanted = {
        "greedy": [oracle.generate(hf, [x], new_tokens, end_ids)[0] for x in tqdm(ids, "Hugging Face")],
        "coupled": found["coupled"][METHODS[0], batches[0]],
    }
    return {
        (method, mode, batch): sum(a != b for a, b in zip(out, wanted[mode], strict=True))
        for mode in MODES
        for (method, batch), out in found[mode].items()
    }


def show(counts: dict[tuple[str, str, int], int], batches: list[int], requests: int) -> None:
    table = Table(
        title=f"requests out of {requests} whose ids differ (greedy: from Hugging Face, coupled: from autoregressive)"
    )
    table.add_column("method")
    for mode in MODES:
        for batch in batches:
            table.add_column(f"{mode} B={batch}", justify="right")
    for method in dict.fromkeys(name for name, _, _ in counts):
        row = [str(counts[method, mode, batch]) for mode in MODES for batch in batches]
        table.add_row(method, *row)
    Console(width=120).print(table)


def main(arguments: list[str]) -> int:
    own = {"prompts": "16", "new_tokens": "64", "batches": "1,3,8"}
    for word in arguments:
        key, _, value = word.partition("=")
        if key not in own or not value:
            raise ValueError(f"unknown argument {word!r}; there are {', '.join(own)}")
        own[key] = value
    count, new_tokens, batches = (
        int(own["prompts"]),
        int(own["new_tokens"]),
        [int(b) for b in own["batches"].split(",")],
    )
    counts = mismatches(prompts(count), new_tokens, batches)
    show(counts, batches, count)
    total = sum(counts.values())
    print(f"{total} mismatches in {len(counts) * count} texts of up to {new_tokens} tokens")
    return total


if __name__ == "__main__":
    script(main)
