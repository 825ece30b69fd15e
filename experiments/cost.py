"""What does a pass cost on a card? Layers, bytes and arithmetic of measured passes, at fitted shares of a data sheet.

Terms of a pass: its layers; GB of weights and of keys and values that are read whole; bf16 arithmetic of its tokens;
GB of keys and values that draft rows pick by their selections. Weights and dense KV share a term, for within one model
weights are constant and a share of their own could not be fitted.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from experiments.records import PASSES, pick, read_record

TERMS = ("layers", "dense_gb", "feed_tflop", "draft_kv_gb")


@dataclass(frozen=True)
class Cost:
    """layer_ms: of a layer beyond its bytes and arithmetic. Shares: of a card's nominal bandwidth and compute, inverted
    (1.2 takes 1.2 times as long as the data sheet allows). gap: seconds of a window / seconds of its passes."""

    layer_ms: float
    dense: float
    feed: float
    draft: float
    gap: float

    def terms_of(self, bandwidth_tb_s: float, tflops: float) -> dict[str, float]:
        """Milliseconds of a unit of each term on a card."""
        values = (self.layer_ms, self.dense / bandwidth_tb_s, 1e3 * self.feed / tflops, self.draft / bandwidth_tb_s)
        return dict(zip(TERMS, values, strict=True))

    def ms(self, terms: np.ndarray, bandwidth_tb_s: float, tflops: float) -> np.ndarray:
        """Milliseconds of passes with those terms [T, len(TERMS)], their share of the time between passes included."""
        unit = np.array([*self.terms_of(bandwidth_tb_s, tflops).values()])
        return self.gap * (terms @ unit)


@dataclass(frozen=True)
class Priced:
    """A cell's recorded passes: terms [T, len(TERMS)], ms [T]; seconds of its window over those of its passes."""

    model: str
    group: tuple[str, int, int]  # model, prompt tokens, slots
    terms: np.ndarray
    ms: np.ndarray
    gap: float


def read_cell(folder: Path) -> Priced:
    """A measured cell of random weights. A draft row of a mixed pass picks as much as the mean one of draft passes.

    Raises ValueError for a cell that lacks what the terms need.
    """
    record = read_record(folder)
    protocol, layers = record.protocol or {}, pick(record.config, "model.shape.num_hidden_layers")
    prompt = record.workload.prompt_tokens.max
    if layers is None or prompt is None or not {"pass_bytes", "kv_bytes"} <= protocol.keys():
        raise ValueError(f"{folder} lacks sizes of its passes or prompts; name cells of random weights, run on a GPU")
    weights, kv = protocol["pass_bytes"], protocol["kv_bytes"]
    lines = [json.loads(line) for line in (folder / PASSES).read_text().splitlines()]
    dense_share = len(pick(record.config, "method.refresh.dense") or []) / layers
    context, terms = float(prompt), []
    pure = [line for line in lines if "V" not in line["kinds"]]
    rows = sum(line["kinds"].count("D") for line in pure)
    picked = sum(line["kv_tokens"] for line in pure) / rows - dense_share * context if rows else 0.0
    for line in lines:
        drafting = line["kinds"].count("D")
        if "V" in line["kinds"]:
            selected = min(drafting * picked, line["kv_tokens"])
        else:
            selected = max(line["kv_tokens"] - drafting * dense_share * context, 0.0)
        dense = line["kv_tokens"] - selected
        terms.append([layers, (weights + kv * dense) / 1e9, line["fed"] * weights / 1e12, kv * selected / 1e9])
        context += line["tokens"] / record.cell.batch
    ms = np.array([line["ms"] for line in lines])
    # passes.jsonl holds the first window, whose own seconds stand first.
    seconds = record.timing.repeats.decode_s[0] if record.timing.repeats else record.timing.decode_s
    assert seconds is not None
    group = (record.cell.model, prompt, record.cell.batch)
    return Priced(record.cell.model, group, np.array(terms, dtype=float), ms, 1e3 * seconds / float(ms.sum()))


def fit(cells: list[Priced], bandwidth_tb_s: float, tflops: float) -> Cost:
    """Non-negative least squares of the passes' relative times; the gap is the cells' median. The card's data sheet."""
    terms, ms = (np.concatenate([getattr(cell, name) for cell in cells]) for name in ("terms", "ms"))
    per_layer, dense, feed, draft = nnls(terms / ms[:, None], np.ones(len(ms)))[0]
    gap = float(np.median([cell.gap for cell in cells]))
    shares = dense * bandwidth_tb_s, feed * tflops / 1e3, draft * bandwidth_tb_s
    return Cost(float(per_layer), *map(float, shares), gap)
