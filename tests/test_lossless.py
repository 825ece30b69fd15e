"""Gate 1: is the text of every method that of plain autoregressive decoding, token for token, in fp32?"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from methods import (
    EVERY_METHOD,
    EVERY_SPECULATIVE,
    METHODS,
    MODELS,
    WARM,
    AtRandom,
    ids,
    model_of,
    prompts,
    requests,
    run,
)
from tiny import to_hf

from aspire.policies import Method
from aspire.settings import Sampling

NEW = 16
PROMPTS = prompts(8, seed=5)
SAMPLINGS = {
    "top_p": Sampling(temperature=1.3, top_p=0.8),  # every token a candidate
    "top_k_top_p": WARM,
}


@cache
def hugging_face(kind: str) -> list[list[int]]:
    """Greedy `generate` of all prompts, padded on the left."""
    width = max(map(len, PROMPTS))
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    padded = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    model = to_hf(model_of(kind))
    how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(padded, attention_mask=mask, **how)
    return out[:, width:].tolist()


@cache
def plain(kind: str, sampling: Sampling) -> list[list[int]]:
    """Autoregressive decoding, one request at a time."""
    return [ids(run(kind, METHODS[0], [r]))[0] for r in requests(PROMPTS, sampling, NEW)]


@pytest.mark.parametrize("kind", MODELS)
def test_the_oracle_is_worth_comparing_with(kind: str) -> None:
    """Gate 1 would be empty on answers that repeat one token."""
    answers = hugging_face(kind)
    assert len({tuple(a) for a in answers}) == len(PROMPTS)
    assert min(len(set(a)) for a in answers) >= 4


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), ("qwen3", 3), ("llama", 8), ("qwen3", 8)])
@pytest.mark.parametrize(**EVERY_METHOD)
def test_greedy_equals_hugging_face(method: Method, kind: str, batch: int) -> None:
    """Gate 1: ragged prompts, shuffled pages, poisoned pool, batch 1, 3 and 8; autoregressive is one of the methods."""
    count = {1: 2, 3: 3, 8: 8}[batch]
    done = run(kind, method, requests(PROMPTS[:count], new=NEW), slots=batch)
    assert ids(done) == hugging_face(kind)[:count]


@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_tiny_budgets_are_neither_perfect_nor_hopeless(method: Method) -> None:
    """Gate 1 shows nothing where every draft is accepted, or none: both verdicts occur with the table's budgets."""
    rounds = [pair for r in run("llama", method, requests(PROMPTS, new=NEW)) for pair in r.rounds]
    assert 0 < sum(accepted for _, accepted in rounds) < sum(drafted for drafted, _ in rounds)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_coupled_sampling_equals_autoregressive(method: Method, name: str) -> None:
    """Gate 1 at temperature > 0: the same seed gives the same text in every method."""
    done = run("qwen3", method, requests(PROMPTS[:5], SAMPLINGS[name], NEW), slots=4)
    assert ids(done) == plain("qwen3", SAMPLINGS[name])[:5]


def test_coupled_sampling_follows_its_seed() -> None:
    """Gate 1 at temperature > 0 would be empty if sampling were greedy or deaf to the seed."""
    greedy, warm = plain("qwen3", Sampling()), plain("qwen3", WARM)
    assert all(g != w for g, w in zip(greedy, warm))
    assert ids(run("qwen3", METHODS[0], requests(PROMPTS[::-1], WARM, NEW)))[::-1] != warm


@pytest.mark.parametrize("salt", range(2))
@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_random_verify_schedules(method: Method, salt: int) -> None:
    """Gate 1 for any verify schedule: rounds of random lengths, slots out of phase, late joiners."""
    kind, sampling = ("llama", Sampling()) if salt % 2 else ("qwen3", WARM)
    schedule = AtRandom(longest=5 + 6 * salt, chance=0.3 - 0.2 * salt, salt=salt)
    done = run(kind, replace(method, speculation=schedule), requests(PROMPTS[:5], sampling, NEW), slots=4 + salt)
    assert ids(done) == plain(kind, sampling)[:5]


@pytest.mark.parametrize("page_size", [1, 7])
@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_page_size_row_order_and_chunk_do_not_matter(method: Method, page_size: int) -> None:
    """Gate 1: blocks and pages are independent, rows may come in any order, prompts in chunks of any size."""
    batch = requests(PROMPTS[4:], new=NEW)
    run("llama", method, batch[::-1], slots=4, page_size=page_size, prefill_chunk=page_size + 2)
    assert ids(batch) == hugging_face("llama")[4:]


@pytest.mark.parametrize(**EVERY_SPECULATIVE)
def test_late_joiners_of_different_length(method: Method) -> None:
    """Gate 1: more requests than slots, each with its own cap, so that slots are refilled at odd times."""
    batch = requests(PROMPTS, WARM, NEW)
    for i, request in enumerate(batch):
        request.max_new_tokens = 1 + 2 * i
    run("qwen3", method, batch, slots=3)
    assert ids(batch) == [answer[: 1 + 2 * i] for i, answer in enumerate(plain("qwen3", WARM))]
