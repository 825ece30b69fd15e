"""What would another batch, context or card make of recorded acceptance? A batch stepped by its policy, modelled time.

python -m experiments.simulate [OUT]   # validates on the H200 cells, then the paper's card -> results/records/modelled
python -m experiments.simulate card=h100_nvl model=qwen3_8b context=90000 batch=max_fit alpha=0.95 requests=2000
python -m experiments.simulate card=h200 model=qwen3_1p7b context=17000 batch=64 trace=results/records/h200/hetero

Policies decide as they do in the engine; which drafts stand comes from recorded rounds (trace) or from one chance for
all (alpha). A pass takes the time of its layers, of the bytes that it must move and of its arithmetic, at shares of a
card's bandwidth and compute that are fitted on measured passes; another card is taken to reach the same shares.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict

from aspire.model import ModelSpec
from aspire.policies import CostModel, Probe, Speculation, TopBlocks
from aspire.replay import Drafts, Passes, replay_batch
from experiments.config import CONF, for_method, nearest, plain, register, script, split
from experiments.cost import TERMS, Cost, fit, read_cell
from experiments.layout import make_method
from experiments.loading import spec_of
from experiments.records import RequestLine, find_records, read_record, read_requests
from experiments.studies.gap import verdicts_of

H200 = CONF.parent / "results" / "records" / "h200"
BASELINE = "autoregressive"
CARDS = Path(__file__).parent / "cards"
MODELS = ("qwen3_1p7b", "qwen3_8b", "ds_r1_llama_8b")
OWN = {
    "card": "", "model": "qwen3_8b", "method": "aspire", "context": "90000", "answer": "1024", "batch": "max_fit",
    "alpha": "0.95", "trace": "", "requests": "1000",
}  # fmt: skip


class Card(BaseModel):
    """A GPU by its data sheet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bandwidth_tb_s: float
    bf16_tflops: float
    memory_gb: float


def card_of(name: str) -> Card:
    """Raises ValueError for a card without a file in experiments/cards."""
    known = sorted(path.stem for path in CARDS.glob("*.yaml"))
    if name not in known:
        raise ValueError(f"unknown card {name!r}{nearest(name, known)}")
    return Card(**plain(OmegaConf.load(CARDS / f"{name}.yaml")))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Setting:
    """What is simulated: a model's sizes, a policy with its selection, a batch, and which drafts stand."""

    model: str
    method: str
    spec: ModelSpec
    weights: int  # bytes that a pass reads
    kv: int  # bytes of a token
    policy: Speculation
    selection: TopBlocks
    dense_share: float
    batch: int
    context: int
    drafts: Drafts
    tokens: int  # committed, after which it ends


@dataclass(frozen=True)
class Simulated:
    """Modelled figures of a setting, and the seconds that modelling them took."""

    tok_s: float
    passes: int
    mixed: float  # share of the passes
    tokens_per_round: float
    drafts_per_round: float
    took_s: float


def policy_of(setting: Setting, cost: Cost, card: Card) -> Speculation:
    """The policy, with the costs that the model has for this card if it asks for some."""
    if not hasattr(setting.policy, "cost"):
        return setting.policy
    unit = cost.terms_of(card.bandwidth_tb_s, card.bf16_tflops)
    layers = setting.spec.layers
    own = CostModel(
        model=unit["layers"] * layers + unit["dense_gb"] * setting.weights / 1e9,
        mlp=unit["feed_tflop"] * setting.weights / 1e12, attn=unit["dense_gb"] * setting.kv / 1e9,
        layers=layers, dense_layers=round(setting.dense_share * layers),
    )  # fmt: skip
    return replace(setting.policy, cost=own)  # type: ignore[type-var]


def simulate(setting: Setting, cost: Cost, card: Card) -> Simulated:
    """Step the batch to its end and price every pass."""
    start = time.perf_counter()
    passes = replay_batch(
        policy_of(setting, cost, card), setting.drafts, setting.selection, setting.dense_share, setting.batch,
        setting.tokens,
    )  # fmt: skip
    ms = cost.ms(terms(setting, passes), card.bandwidth_tb_s, card.bf16_tflops)
    rounds, committed = float(passes.verifying.sum()), float(passes.committed.sum())
    mixed = float(((passes.verifying > 0) & (passes.drafting > 0)).double().mean())
    return Simulated(
        tok_s=1e3 * committed / float(ms.sum()), passes=len(ms), mixed=mixed, tokens_per_round=committed / rounds,
        drafts_per_round=float(passes.drafting.sum()) / rounds, took_s=time.perf_counter() - start,
    )  # fmt: skip


def terms(setting: Setting, passes: Passes) -> np.ndarray:
    """The terms of each pass, as experiments/cost.py has them.  # [T, len(TERMS)]"""
    dense, selected, fed = (x.numpy() for x in (passes.dense, passes.selected, passes.fed))
    columns = {
        "layers": np.full_like(fed, setting.spec.layers), "dense_gb": (setting.weights + setting.kv * dense) / 1e9,
        "feed_tflop": fed * setting.weights / 1e12, "draft_kv_gb": setting.kv * selected / 1e9,
    }  # fmt: skip
    return np.stack([columns[name] for name in TERMS], axis=1)


def drafts_of(lines: list[RequestLine], context: int, answer: int, longest: int) -> Drafts:
    """Recorded verdicts, each request's repeated to the length of an answer; none stand where none was drafted."""
    each = [verdicts_of(line) or [False] for line in lines]
    stands = torch.from_numpy(np.stack([np.resize(verdicts, answer + longest + 1) for verdicts in each]))
    count = torch.full((len(each),), answer)
    return Drafts(stands, count, torch.full_like(count, context))


def chance(alpha: float, requests: int, context: int, answer: int, longest: int, seed: int = 0) -> Drafts:
    """Every draft stands with chance alpha."""
    drawn = np.random.default_rng(seed).random((requests, answer + longest + 1)) < alpha
    count = torch.full((requests,), answer)
    return Drafts(torch.from_numpy(drawn), count, torch.full_like(count, context))


def setting_of(folder: Path) -> Setting:
    """A measured cell as a setting: its own verdicts, batch and context; it ends where the window did."""
    record, lines = read_record(folder), read_requests(folder)
    spec = ModelSpec.from_hf(record.config["model"]["shape"])
    method, protocol = make_method(record.config), record.protocol or {}
    context = record.workload.prompt_tokens.max
    assert context is not None
    answer = record.config["benchmark"]["max_new_tokens"]
    return Setting(
        record.cell.model, record.cell.method, spec, protocol["pass_bytes"], protocol["kv_bytes"], method.speculation,
        selection_of(method), len(method.refresh.dense_layers(spec.layers)) / spec.layers, record.cell.batch, context,
        drafts_of(lines, context, answer, method.speculation.longest), protocol["window_tokens"],
    )  # fmt: skip


def selection_of(method: Any) -> TopBlocks:
    """Raises ValueError for a selection of another kind: what it costs is not in the terms."""
    if method.speculation.longest == 0:
        return TopBlocks(Probe())  # no draft row ever reads it
    if not isinstance(method.selection, TopBlocks) or method.selection.scope != "request":
        raise ValueError(f"{method.name} selects per layer or by position; its selection's cost is not modelled")
    return method.selection


@dataclass(frozen=True)
class Checked:
    """A measured cell beside what is modelled for it by costs fitted without it. held: what was held out."""

    evidence: str
    held: str
    cell: str
    model: str
    method: str
    batch: int
    context: int
    measured: float
    predicted: float
    passes: int
    passes_measured: int

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def measured_cells(root: Path = H200) -> list[Path]:
    """Cells that can be modelled: random weights, ended well, and methods whose selections are."""
    found = []
    for folder in find_records(root):
        record = read_record(folder)
        if record.status == "ok" and record.cell.evidence == "shapes" and not folder.parent.name.startswith("prefill-"):
            found.append(folder)
    return found


def validate(folders: list[Path], card: Card, only: list[Path] | None = None) -> list[Checked]:
    """Simulate measured cells, or some of them, by costs fitted on the others: without all of its (model, context,
    batch), and without all of its model. Raises ValueError where nothing is left to fit."""
    cells = {folder: read_cell(folder) for folder in folders}
    found = []
    for held, key in (("cell", lambda c: c.group), ("model", lambda c: c.model)):
        for folder in only or folders:
            others = [other for other in cells.values() if key(other) != key(cells[folder])]
            if not others:
                raise ValueError("nothing to hold out: name records of two models or two sizes")
            cost = fit(others, card.bandwidth_tb_s, card.bf16_tflops)
            setting, record = setting_of(folder), read_record(folder)
            done = simulate(setting, cost, card)
            assert record.metrics.decode_tok_s is not None and record.timing.passes is not None
            found.append(Checked(
                "modelled", held, f"{folder.parent.name}/{record.cell.method}", setting.model, setting.method,
                setting.batch, setting.context, round(record.metrics.decode_tok_s, 1), round(done.tok_s, 1),
                done.passes, record.timing.passes,
            ))  # fmt: skip
    return found


def mape(checked: list[Checked]) -> float:
    """Mean absolute error, as a share of what was measured."""
    return float(np.mean([abs(one.error) for one in checked]))


def error_lines(checked: list[Checked]) -> list[str]:
    """What the errors come to: of all cells, and of those that draft, which are the harder ones."""
    said = []
    for held, words in (("cell", "its own size of its own model"), ("model", "its model")):
        part = [one for one in checked if one.held == held]
        drafting = [one for one in part if one.method != BASELINE]
        worst = max(part, key=lambda one: abs(one.error))
        said.append(
            f"Modelled by costs fitted without {words}: MAPE {100 * mape(part):.1f} % over {len(part)} cells, "
            f"{100 * mape(drafting):.1f} % over the {len(drafting)} that draft, worst {100 * worst.error:+.1f} % "
            f"({worst.cell})."
        )
    return said


def asked(own: dict[str, str], words: list[str], card: Card, method: str) -> Setting:
    """A setting from the command line. Raises ValueError for numbers that are none, or a batch that does not fit."""
    config = plain(for_method([f"model={own['model']}", "model.weights=random", *words], method))
    spec, policies = spec_of(config), make_method(config)
    context, answer, requests = (int(own[key]) for key in ("context", "answer", "requests"))
    weights = spec.weight_bytes(torch.bfloat16)
    read = weights - (0 if spec.tied else 2 * spec.vocab_size * spec.hidden_size)
    kv, longest = spec.kv_bytes_per_token(torch.bfloat16), policies.speculation.longest
    most = int((0.95 * card.memory_gb * 1e9 - weights) / (kv * (context + answer)))
    batch = most if own["batch"] == "max_fit" else int(own["batch"])
    if not 0 < batch <= most:
        raise ValueError(f"{card.name} holds {most} requests of {context + answer} tokens; ask for a smaller batch")
    if own["trace"]:
        lines = [line for folder in find_records(own["trace"]) for line in read_requests(folder)]
        drafts = drafts_of(lines, context, answer, longest)
    else:
        drafts = chance(float(own["alpha"]), requests, context, answer, longest)
    return Setting(
        own["model"], method, spec, read, kv, policies.speculation, selection_of(policies),
        len(policies.refresh.dense_layers(spec.layers)) / spec.layers, batch, context, drafts, requests * answer,
    )  # fmt: skip


def what_if(own: dict[str, str], words: list[str], cost: Cost, card: Card) -> dict[str, Any]:
    """A method beside plain decoding."""
    settings = [asked(own, words, card, name) for name in (BASELINE, own["method"])]
    plain_, method = (simulate(one, cost, card) for one in settings)
    acceptance = f"trace:{own['trace']}" if own["trace"] else f"iid({own['alpha']})"
    return {
        "evidence": "modelled", "card": card.name, "model": own["model"], "method": own["method"],
        "acceptance": acceptance, "batch": settings[1].batch, "context": settings[1].context,
        **{key: round(value, 3) for key, value in asdict(method).items() if key != "took_s"},
        "plain_tok_s": round(plain_.tok_s, 3), "speedup": round(method.tok_s / plain_.tok_s, 3),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Validate and model the paper's card, or one setting. Raises ValueError for bad words."""
    register()
    torch.set_num_threads(1)  # tensors of one batch are too small to share
    own, words = split(arguments, OWN)
    home = card_of("h200")
    cost = fit([read_cell(folder) for folder in measured_cells()], home.bandwidth_tb_s, home.bf16_tflops)
    start = time.perf_counter()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        if own["card"]:
            line = what_if(own, words, cost, card_of(own["card"]))
            print(json.dumps(line | {"took_s": round(time.perf_counter() - start, 2)}))
            return
        out = Path(words[0] if words else H200.parent / "modelled")
        checked = validate(measured_cells(), home)
        scenarios = [
            what_if(OWN | {"model": model, "context": context, "requests": "64"}, [], cost, card_of("h100_nvl"))
            for model in MODELS
            for context in ("17000", "35000", "90000")
        ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "validation.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in checked))
    (out / "what_if.jsonl").write_text("".join(json.dumps(one) + "\n" for one in scenarios))
    (out / "cost.json").write_text(json.dumps({"evidence": "modelled", **asdict(cost)}, indent=2) + "\n")
    print("\n".join(error_lines(checked)))
    found = {held: round(mape([one for one in checked if one.held == held]), 4) for held in ("cell", "model")}
    print(json.dumps({"evidence": "modelled", "mape": found, "took_s": round(time.perf_counter() - start, 1)}))


if __name__ == "__main__":
    script(main)
