"""Which layer, how many tokens ago, tells best where a layer will look? Mass recall@k of predictor sources.

aspire/recall.py has the definition, and what of it is our reading of the paper. A cell of plain decoding is run by the
harness; its texts are then fed once more with full attention, and what is kept of that is a line of curves a prompt,
never the weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from aspire.cache import KVPool
from aspire.model import Decoder
from aspire.recall import Recall, earlier_layer, one_for_all, refreshed, same_layer
from aspire.trace import Trace, trace
from experiments.layout import build_items, resolve
from experiments.loading import Config, load_model, spec_of
from experiments.records import Section, read_record, read_requests

Share = Annotated[float, Field(ge=0, le=1)]


class Asked(Section):
    """What is traced of each text: its first tokens, tops of k positions, tokens ago, layers below, refresh layers."""

    tokens: int
    k: int
    ages: tuple[int, ...]
    offsets: tuple[int, ...]
    counts: tuple[int, ...]


class Curves(Section):
    """Recall of predictor sources over some positions. Keys are ages, offsets, numbers of refresh layers.

    age: the layer itself, tokens ago. offset: a layer so many below, same token. source: each layer for all others,
    same token; source_old: a token old. refresh: the refresh layer at or below, same token; refresh_old: the nearest
    one, a token old.
    """

    age: dict[int, Share]
    offset: dict[int, Share]
    source: list[Share]
    source_old: list[Share]
    refresh: dict[int, Share]
    refresh_old: dict[int, Share]


class RecallLine(Section):
    """One prompt. tokens: traced of its answer; k: of the tops. positions: `all`, or `prompt` = without the answer's,
    which every draft row reads as its tail and no older token can know."""

    id: str
    tokens: int
    k: int
    positions: dict[str, Curves]


def curves(weights: torch.Tensor, asked: Asked) -> Curves:
    """weights [N, T, P] of aspire/trace.py. Raises ValueError for too few tokens or positions."""
    recall = Recall(weights, asked.k, max(asked.ages))
    now, old = recall.matrix(0), recall.matrix(1)
    layers = len(weights)
    offsets = [offset for offset in asked.offsets if offset < layers]
    counts = [count for count in asked.counts if count < layers]

    def keyed(keys: Sequence[int], values: list[float]) -> dict[int, float]:
        return dict(zip(keys, rounded(values), strict=True))

    return Curves(
        age=keyed(asked.ages, same_layer(recall.matrix, asked.ages)),
        offset=keyed(offsets, earlier_layer(now, offsets)),
        source=rounded(one_for_all(now)), source_old=rounded(one_for_all(old)),
        refresh=keyed(counts, refreshed(now, counts, nearest=False)),
        refresh_old=keyed(counts, refreshed(old, counts, nearest=True)),
    )  # fmt: skip


def rounded(values: list[float]) -> list[float]:
    """Six digits, which rounding of sums leaves alone; a top can exceed the oracle's by its last bit."""
    return [min(round(value, 6), 1.0) for value in values]


def line_of(name: str, found: Trace, asked: Asked) -> RecallLine:
    """The curves over all positions, and over those of the prompt."""
    tokens, length = found.weights.shape[1:]
    each = {"all": found.weights, "prompt": found.weights[..., : length - tokens]}
    return RecallLine(
        id=name, tokens=tokens, k=asked.k, positions={key: curves(part, asked) for key, part in each.items()}
    )


def traced(folder: Path, asked: Asked) -> list[RecallLine]:
    """Feed the answers of a finished cell once more and look: a line for each that is long enough.

    Raises ValueError where none is.
    """
    record = read_record(folder)
    config = resolve(record.config)
    items = {item.id: item.prompt_ids for item in build_items(config, spec_of(config))[0]}
    model, lines = load_model(config), []
    for line in read_requests(folder):
        if len(line.output_ids) > asked.tokens:  # an answer that ended before has no say
            prompt, text = list(items[line.id]), line.output_ids[: asked.tokens]
            pool = pool_for(model, len(prompt) + len(text), config)
            found = trace(model, pool, prompt, text, config["engine"]["prefill_chunk"])
            lines.append(line_of(line.id, found, asked))
    if not lines:
        raise ValueError(f"no answer has more than {asked.tokens} tokens; raise benchmark.max_new_tokens")
    return lines


def pool_for(model: Decoder, tokens: int, config: Config) -> KVPool:
    """Room for one sequence."""
    spec, page = model.spec, config["engine"]["page_size"]
    dtype, device = model.embed.dtype, config["engine"]["device"]
    return KVPool(spec.layers, spec.kv_heads, spec.head_dim, -(-tokens // page), page, dtype, device)


def mean(lines: Sequence[RecallLine], positions: str) -> Curves:
    """The mean over prompts, each weighing alike."""
    each = [line.positions[positions].model_dump() for line in lines]

    def over(key: str) -> dict[int, float] | list[float]:
        first = each[0][key]
        if isinstance(first, dict):
            return {at: float(np.mean([one[key][at] for one in each])) for at in first}
        return np.mean([one[key] for one in each], axis=0).tolist()

    return Curves.model_validate({key: over(key) for key in each[0]})
