"""What do all methods of a comparison share? One model, one pool, prompts that are prefilled once."""

import time
from dataclasses import dataclass, replace

from aspire.cache import KVPool
from aspire.model import Decoder
from aspire.prefill import Prompt, prefill, random_prompt
from aspire.request import Request
from aspire.settings import EngineSettings, Sampling
from aspire.verify import Verification
from experiments.benchmarks import Item, request_seed
from experiments.environment import synchronise
from experiments.layout import Config, Layout, make_verification
from experiments.loading import load_model


@dataclass
class Session:
    """A loaded model with the benchmark's prompts in its pool."""

    config: Config
    model: Decoder
    items: list[Item]
    settings: EngineSettings
    verification: Verification
    sampling: Sampling
    pool: KVPool
    prompts: list[Prompt]
    prefill_s: float
    layout: Layout

    def request(self, number: int) -> tuple[Request, Prompt]:
        """The number-th request of an endless supply: items in turn, replays with a seed of their own."""
        turn, index = divmod(number, len(self.items))
        item = self.items[index]
        seed = item.seed if turn == 0 else request_seed(item.seed, item.id, turn)
        request = Request(
            id=item.id if turn == 0 else f"{item.id}~{turn}",
            prompt_ids=list(item.prompt_ids),
            sampling=replace(self.sampling, seed=seed),
            max_new_tokens=self.config["benchmark"]["max_new_tokens"],
            # Random weights emit an end id now and then, by chance.
            end_ids=() if self.config["model"]["weights"] == "random" else self.layout.spec.end_ids,
        )
        return request, self.prompts[index]


def open_session(layout: Layout) -> Session:
    """Load the model, make the pool, prefill."""
    config, items, settings = layout.config, layout.items, layout.settings
    model, sampling = load_model(config), Sampling(**config["sampling"], seed=config["seed"])
    spec, dtype = layout.spec, settings.dtype
    assert settings.pages is not None
    pool = KVPool(spec.layers, spec.kv_heads, spec.head_dim, settings.pages, settings.page_size, dtype, settings.device)
    random = config["protocol"]["prompt_kv"] == "random"
    if pool.k.is_cuda and not random:  # the first pass of a process compiles kernels and loads libraries
        chunk = settings.prefill_chunk
        pool.release(prefill(model, pool, list(items[0].prompt_ids[:chunk]), chunk).pages)
        synchronise(settings.device)
    start = time.perf_counter()
    if random:
        prompts = [random_prompt(model, pool, len(item.prompt_ids), item.seed) for item in items]
    else:
        prompts = [prefill(model, pool, list(item.prompt_ids), settings.prefill_chunk) for item in items]
    synchronise(settings.device)
    seconds = time.perf_counter() - start
    return Session(config, model, items, settings, make_verification(config), sampling, pool, prompts, seconds, layout)
