"""What do the GPU tests share? The device, models with the same numbers on both devices, pools with a guard around.

ASPIRE_REHEARSE=1 runs the tests marked `gpu` on a CPU, without graphs, as far as they can: to try a test before a GPU
is at hand.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from methods import METHODS, MODELS, WARM, requests
from tiny import tiny_spec
from torch import Tensor

from aspire.cache.pages import PageList
from aspire.cache.pool import KVPool
from aspire.engine import Engine
from aspire.model import Decoder, ModelSpec, random_weights
from aspire.policies import Method
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Verification

CUDA = torch.cuda.is_available()
REHEARSING = bool(os.environ.get("ASPIRE_REHEARSE")) and not CUDA
DEVICE = "cuda" if CUDA else "cpu"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not (CUDA or REHEARSING), reason="torch finds no GPU")]
NEEDS_CUDA = pytest.mark.skipif(not CUDA, reason="measures a GPU")
BY_NAME = {m.name: m for m in METHODS}
NAN = float("nan")


def spec_of(kind: str, **kw: object) -> ModelSpec:
    """The tiny models of the CPU tests, with other sizes where wanted."""
    sizes = {name: value for name, value in MODELS[kind].items() if name != "seed"}
    return tiny_spec(kind, **{**sizes, **kw})  # type: ignore[arg-type]


@cache
def model_on(spec: ModelSpec, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Decoder:
    """Weights drawn on the CPU in fp32, so that they are the same on every device."""
    return random_weights(spec, torch.float32, "cpu", 5).to(device, dtype)


def mixed_requests(prompts: list[list[int]], new: int = 24, step: int = 0) -> list[Request]:
    """Every second request greedy, the others sampled, each with its own seed; request i has new + i * step tokens."""
    batch = requests(prompts, WARM, new)
    for i, request in enumerate(batch):
        request.max_new_tokens = new + i * step
        if i % 2 == 0:
            request.sampling = Sampling(seed=request.sampling.seed)
    return batch


def build(
    model: Decoder, method: Method, slots: int, mode: str = "coupled", pool: KVPool | None = None, **kw: object
) -> Engine:
    """An engine on the model's device; kw: fields of EngineSettings."""
    fields = {"max_len": 160, "page_size": 4, "prefill_chunk": 16, "device": str(model.embed.device.type), **kw}
    if not CUDA:
        fields["graphs"] = None
    settings = EngineSettings(slots=slots, dtype=model.embed.dtype, **fields)  # type: ignore[arg-type]
    return Engine(model, settings, method, Verification(mode), pool)


def answers(engine: Engine, batch: list[Request]) -> list[list[int]]:
    """The texts of the requests; every page comes back."""
    free = engine.pool.allocator.free_pages
    engine.generate(batch)
    assert engine.pool.allocator.free_pages == free
    return [r.output_ids for r in batch]


def on_cpu(spec: ModelSpec, batch: list[Request], **kw: object) -> list[list[int]]:
    """Plain decoding of the requests on the CPU in fp32."""
    return answers(build(model_on(spec, device="cpu"), METHODS[0], len(batch), **kw), batch)  # type: ignore[arg-type]


def steps(engine: Engine, batch: list[Request], after: Callable[[], None]) -> list[list[int]]:
    """`answers`, with a look at the engine after every step."""
    free = engine.pool.allocator.free_pages
    for request in batch:
        engine.submit(request)
    while engine.busy:
        engine.step()
        after()
    assert engine.pool.allocator.free_pages == free
    return [r.output_ids for r in batch]


class GuardedPool(KVPool):
    """A pool that is NaN wherever nobody wrote, with NaN before its first layer and behind its last.

    Page -1 of a layer lies in the layer before it, on that layer's last page, which is never handed out. So a read
    through an unused entry of the page table, which holds -1, shows in the text, and a write shows in `untouched`.
    """

    def __init__(self, spec: ModelSpec, pages: int, page_size: int, device: str = DEVICE) -> None:
        super().__init__(spec.layers, spec.kv_heads, spec.head_dim, pages, page_size, device=device)
        layers, *rest = self.k.shape
        self.whole = [torch.full((layers + 2, *rest), NAN, device=device) for _ in "kv"]
        self.k, self.v = (whole[1:-1] for whole in self.whole)
        self.allocator._free.remove(pages - 1)
        self.used: set[int] = set()
        reserve = self.allocator.reserve

        def reserved(owner: PageList, tokens: int) -> list[int]:
            new = reserve(owner, tokens)
            self.used.update(new)
            return new

        self.allocator.reserve = reserved  # type: ignore[method-assign]

    def untouched(self) -> bool:
        """Whether all that nobody was given is still NaN."""
        others = torch.tensor(sorted(set(range(self.pages)) - self.used), device=self.k.device)
        for whole, part in zip(self.whole, (self.k, self.v)):
            paged = part.unflatten(1, (self.pages, self.page_size))
            if not (whole[[0, -1]].isnan().all() and paged[:, others].isnan().all()):
                return False
        return True


def point_nowhere(engine: Engine) -> None:
    """-1 in every entry of the page table that stands for no page; those of pages to come are written when they do."""
    table: Tensor = engine.state.page_table
    for slot, seat in enumerate(engine.seats):
        table[slot, len(seat.pages.pages) if seat else 0 :] = -1


def fixed(name: str, longest: int) -> Method:
    """A method of the table with another speculation: always so many drafts."""
    method = BY_NAME[name]
    return replace(method, speculation=replace(BY_NAME["vegas"].speculation, longest=longest))
