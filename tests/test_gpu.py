"""Does the engine run on a GPU as it does on a CPU? The torch twins there; kernels of their own come later."""

from dataclasses import replace

import pytest
import torch
from methods import METHODS, prompts, requests
from tiny import tiny_spec

from aspire.engine import Engine
from aspire.model import random_weights
from aspire.policies import Method
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Verification

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


def texts(method: Method, mode: str, sampling: Sampling, device: str = "cuda") -> list[list[int]]:
    """Answers to five ragged prompts in three slots, on a poisoned pool."""
    spec = tiny_spec("qwen3", layers=3)
    model = random_weights(spec, torch.float32, "cpu", 0).to(device)
    settings = EngineSettings(slots=3, max_len=160, page_size=4, device=device, poison=True)
    batch = requests(prompts(5), sampling)
    Engine(model, settings, method, Verification(mode)).generate(batch)
    return [r.output_ids for r in batch]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("mode", "sampling"), [("greedy", Sampling()), ("coupled", Sampling(0.7, 20, 0.9))], ids=("greedy", "coupled")
)
def test_text_on_the_gpu_is_that_of_autoregressive_decoding_on_the_cpu(
    method: Method, mode: str, sampling: Sampling
) -> None:
    """Gate 1 across devices, in fp32: noise is keyed, so that even sampled text is the same."""
    assert texts(method, mode, sampling) == texts(METHODS[0], mode, sampling, "cpu")


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_rejection_runs_in_bf16(method: Method) -> None:
    """Every method finishes its requests in the paper's dtype and sampling."""
    spec = replace(tiny_spec("qwen3", layers=3), head_dim=64)
    model = random_weights(spec, torch.bfloat16, "cuda", 0)
    settings = EngineSettings(slots=3, max_len=160, page_size=16, device="cuda", dtype=torch.bfloat16)
    batch = requests(prompts(5), Sampling(0.7, 20, 0.9))
    engine = Engine(model, settings, method, Verification("rejection"))
    free = engine.pool.allocator.free_pages
    engine.generate(batch)
    assert all(len(r.output_ids) == r.max_new_tokens for r in batch)
    assert engine.pool.allocator.free_pages == free
