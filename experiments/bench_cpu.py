"""How fast is plain autoregressive decoding on this CPU, next to Hugging Face `generate` in the same run?

SmolLM2, fp32, two threads, batch 8, prompts of 512 tokens, 64 new tokens; prefill is outside of both times.
    python -m experiments.bench_cpu
"""

import json
import time
from statistics import median

import torch
from transformers import PreTrainedModel

from aspire.engine import Engine
from aspire.model import load
from aspire.model.decoder import Decoder
from aspire.model.tokenizer import load_tokenizer
from aspire.request import Request
from aspire.settings import EngineSettings
from aspire.verify import Verification
from experiments import oracle
from experiments.benchmarks import PyStdlib
from experiments.environment import device_name

BATCH, PROMPT, NEW, REPEATS, THREADS = 8, 512, 64, 5, 2


def ours(model: Decoder, ids: list[list[int]]) -> float:
    """Decode tokens a second of the engine."""
    engine = Engine(model, EngineSettings(BATCH, PROMPT + NEW), verification=Verification("greedy"))
    for i, prompt in enumerate(ids):
        engine.submit(Request(str(i), prompt, max_new_tokens=NEW))
    engine.fill_slots()
    start = time.perf_counter()
    while engine.busy:
        engine.step()
    return BATCH * (NEW - 1) / (time.perf_counter() - start)


def theirs(model: PreTrainedModel, ids: list[list[int]]) -> float:
    """Decode tokens a second of `generate`, from its first token to its last."""
    clock = oracle.Clock()
    oracle.generate(model, ids, NEW, (), clock)
    return BATCH * (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])


def main() -> None:
    torch.set_num_threads(THREADS)
    model, hf = load("embedded"), oracle.huggingface_model()
    ids = [list(item.prompt_ids) for item in PyStdlib(BATCH, PROMPT).build(load_tokenizer("embedded"), 8192, NEW)]
    ids = [x[: min(map(len, ids))] for x in ids]  # one length, so that Hugging Face needs no padding
    print(f"SmolLM2-135M, fp32, {device_name('cpu')}; batch {BATCH}, prompts of {len(ids[0])}, {NEW} new tokens")
    ours(model, ids), theirs(hf, ids)  # warm-up
    rows = []
    for repeat in range(REPEATS):
        rows.append((ours(model, ids), theirs(hf, ids)))
        print(f"repeat {repeat + 1}: aspire {rows[-1][0]:6.1f} tok/s, Hugging Face {rows[-1][1]:6.1f} tok/s")
    mine, other = (median(column) for column in zip(*rows, strict=True))
    ratio = median(a / b for a, b in rows)
    print(f"median: aspire {mine:.1f} tok/s, Hugging Face {other:.1f} tok/s, ratio {ratio:.2f}")
    print(json.dumps({"aspire_tok_s": mine, "huggingface_tok_s": other, "ratio": ratio, "repeats": REPEATS}))


if __name__ == "__main__":
    main()
