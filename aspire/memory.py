"""What memory will a run take, and how large a batch fits? Bytes by part, from sizes alone, before a model is loaded.

A run may hold several engines over one model and one pool: weights, pool and prompts count once, what an engine keeps
of its own (slots, selections, the workspace of its passes, which captured passes never give back) once an engine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import gcd

import torch
from torch import Tensor

from aspire.attention import INVARIANT_WIDTH
from aspire.kernels.attention import budget, fixed_split, query_tile, slots_of, tuning
from aspire.kernels.filter import WIDEST
from aspire.kernels.jit import power_of_2
from aspire.kernels.work import pieces_of
from aspire.model.spec import ModelSpec
from aspire.policies.method import Method
from aspire.policies.selection import Probe
from aspire.prefill import KEPT_QUERIES
from aspire.settings import EngineSettings
from aspire.state import SlotState
from aspire.verify import Verification

SHARE = 0.95  # of the free memory: the rest is for captured graphs' own nodes, libraries and fragmentation
MOST = 4096  # slots that max_fit looks at
SCRATCH = 2 * 256 * 8  # bytes a row of logits that the sampler's kernel takes beside what it returns


@dataclass(frozen=True)
class Work:
    """What the engines are asked: prompts in the pool, longest answer, and entries of a filtered distribution.

    prefills: whether the prompts pass through the model; packed: whether the weights are kept laid out a second time.
    """

    prompt_tokens: tuple[int, ...]
    answer: int
    candidates: int
    prefills: bool = True
    packed: bool = False

    @property
    def longest(self) -> int:
        return max(self.prompt_tokens)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, in the order they are taken."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def gib(self) -> float:
        return self.total / 2**30

    def table(self) -> list[str]:
        """A line a part that is more than nothing, and the sum."""
        shown = [(name, size) for name, size in [*self.parts.items(), ("total", self.total)] if size]
        return [f"{name:<24}{size / 2**30:>10.3f} GiB" for name, size in shown]

    def refuse_beyond(self, available: int, fix: str) -> None:
        """Raises ValueError naming the parts, the largest first, where they exceed `available` bytes."""
        if self.total <= available:
            return
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in largest if size >= self.total / 100)
        raise ValueError(
            f"the run needs {self.gib:.2f} GiB, {available / 2**30:.2f} GiB are available ({shown} GiB); {fix}"
        )


def pool_pages(page_size: int, prompt_tokens: Sequence[int], slots: int, answer: int, longest_draft: int) -> int:
    """Pages for every prompt, and in each slot for an answer with its drafts and a copy of the prompt's last page."""
    return sum(-(-tokens // page_size) for tokens in prompt_tokens) + slots * slot_pages(
        page_size, answer, longest_draft
    )


def shared_pages(
    page_size: int, prompt_tokens: Sequence[int], methods: Sequence[tuple[Method, int]], answer: int
) -> int:
    """Pages of a pool that engines use in turn, a method and its slots each."""
    each = (
        pool_pages(page_size, prompt_tokens, slots, answer, method.speculation.longest) for method, slots in methods
    )
    return max(each)


def slot_pages(page_size: int, answer: int, longest_draft: int) -> int:
    """Pages that a slot does not share: of the answer, and the copied last page of the prompt."""
    return 2 + (answer + longest_draft) // page_size


def plan_memory(
    spec: ModelSpec,
    settings: EngineSettings,
    methods: Sequence[tuple[Method, int]],
    verification: Verification,
    work: Work,
) -> MemoryPlan:
    """The plan of engines that live side by side: a method and its slots each; settings.slots counts for none."""
    weights, size = spec.weight_bytes(settings.dtype), settings.page_size
    pages = settings.pages or shared_pages(size, work.prompt_tokens, methods, work.answer)
    parts = Counter(
        {
            "weights": weights * (2 if work.packed else 1),
            "KV pool": pages * size * spec.kv_bytes_per_token(settings.dtype),
            "prompts' queries, logits": sum(_prompt_bytes(spec, settings.dtype, n) for n in work.prompt_tokens),
        }
    )
    passes = [pass_bytes(spec, settings, method, slots, work.candidates) for method, slots in methods]
    for (method, slots), own in zip(methods, passes, strict=True):
        parts.update(state_bytes(spec, settings, method, slots, verification, work.candidates))
        parts.update(own)
    before = max(
        _prefill_bytes(spec, settings, work) if work.prefills else 0,
        max(_prompt_selection_bytes(spec, settings.dtype, method, work.longest) for method, _ in methods),
    )
    if settings.device.startswith("cuda") and settings.graphs is not False:
        # Captured passes lend their memory to nobody: neither to a prefill, nor to the run before the next capture.
        parts["prefill or capture"] = max(before, *(own.total() for own in passes))
    else:
        parts["prefill beyond passes"] = max(0, before - sum(own.total() for own in passes))
    return MemoryPlan(dict(parts))


def max_fit(plan_of: Callable[[int], MemoryPlan], available: int, share: float = SHARE, most: int = MOST) -> int:
    """The largest batch up to `most` whose plan takes at most `share` of `available` bytes; 0 if not even one fits.

    plan_of(batch) must not shrink as the batch grows.
    """
    fits, over = 0, most + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        if plan_of(middle).total <= share * available:
            fits = middle
        else:
            over = middle
    return fits


def _prompt_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int) -> int:
    """What a `Prompt` keeps beside its pages."""
    queries = spec.layers * min(tokens, KEPT_QUERIES) * spec.heads * spec.head_dim * dtype.itemsize
    return queries + 4 * spec.vocab_size


STATE_PARTS = {"page_table": "page tables", "blocks": "selections", "block_count": "selections"} | dict.fromkeys(
    ("q_ids", "q_probs"), "draft distributions"
)


def state_bytes(
    spec: ModelSpec, settings: EngineSettings, method: Method, slots: int, verification: Verification, candidates: int
) -> Counter[str]:
    """The tensors of an engine's `SlotState`."""
    longest, selection = settings.max_len + method.speculation.longest, method.selection
    state = SlotState.empty(
        slots, -(-longest // settings.page_size), method.speculation.longest,
        selection.scopes(spec.layers, spec.kv_heads), selection.capacity(longest), selection.block,
        candidates if verification.mode == "rejection" else 1, "meta",
    )  # fmt: skip
    parts: Counter[str] = Counter()
    for f in fields(state):
        if isinstance(value := getattr(state, f.name), Tensor):
            parts[STATE_PARTS.get(f.name, "slots")] += value.numel() * value.element_size()
    return parts


def pass_bytes(spec: ModelSpec, settings: EngineSettings, method: Method, slots: int, candidates: int) -> Counter[str]:
    """Most that a pass of this engine takes while it runs. On a GPU the captured passes keep it."""
    longest, size = method.speculation.longest, settings.dtype.itemsize
    tokens = slots * (longest + 1)
    context = -(-(settings.max_len + longest) // settings.page_size) * settings.page_size
    on_gpu = settings.device.startswith("cuda")
    logit_size = size if on_gpu else 4 + size
    parts = Counter(
        {
            "logits": tokens
            * (spec.vocab_size * logit_size + (2 * 12 if candidates <= WIDEST else 64) * candidates + SCRATCH)
        }
    )
    parts["activations"] = tokens * _activation_bytes(spec, size)
    parts["attention"] = _attention_bytes(spec, settings, slots, longest, context)
    probe, selection = method.selection.probe, method.selection
    if probe is not None and set(method.refresh.on) & {"draft", "verify"}:
        parts["scores"] = _score_bytes(spec, settings, probe, slots, longest, context, selection.block)
    if longest:
        entries = selection.scopes(spec.layers, spec.kv_heads) * slots * selection.capacity(context)
        chosen = 2 * 8 if method.refresh.on else 0  # the new selection, and what is written of it
        parts["new selections, units"] = entries * (
            chosen + 4 * (selection.block // gcd(selection.block, settings.page_size))
        )
    return parts


def _activation_bytes(spec: ModelSpec, size: int) -> int:
    """Of one token in a layer: the residual with its norm and delta, heads and queries, gate, up and their product."""
    heads = spec.qkv_rows + 2 * spec.heads * spec.head_dim
    return size * (4 * spec.hidden_size + heads + 3 * spec.intermediate_size)


def _attention_bytes(spec: ModelSpec, settings: EngineSettings, slots: int, longest: int, context: int) -> int:
    """On a GPU a partial sum of each piece that a row is cut into; the twin gathers the keys and values of a layer."""
    if not settings.device.startswith("cuda"):
        return 2 * slots * context * spec.heads * spec.head_dim * settings.dtype.itemsize
    widest = max(INVARIANT_WIDTH if settings.invariant else 1, longest + 1)
    m = query_tile(widest, spec.heads // spec.kv_heads)
    tune = tuning(slots, widest, spec.heads // spec.kv_heads, spec.kv_heads, True, settings.dtype.itemsize)
    device = torch.device(settings.device)
    pieces = budget(tune, device, slots, spec.kv_heads, spec.head_dim)
    pieces = pieces_of(pieces, slots, slots_of(tune, device, spec.head_dim))
    if settings.invariant:
        pieces = pieces_of(fixed_split(tune, slots, context), slots, 0)
    return pieces * spec.kv_heads * m * (max(16, power_of_2(spec.head_dim)) + 1) * 4


def _score_bytes(
    spec: ModelSpec, settings: EngineSettings, probe: Probe, slots: int, longest: int, context: int, block: int
) -> int:
    """Scores of every probed layer, the logits that one layer leaves for them, and the sums over blocks."""
    scopes = len(probe.at(spec.layers)) * (spec.kv_heads if probe.heads == "group_mean" else 1)
    queries = longest + 1 if probe.queries == "all" else min(2, longest + 1)
    logit = 4 if settings.dtype == torch.float32 or not settings.device.startswith("cuda") else 2
    sums = (4 * context + 4 * context // block) if block > 1 else 0  # padded to whole blocks, and summed
    return slots * (scopes * (4 * context + sums) + queries * spec.heads * context * logit)


def _prefill_bytes(spec: ModelSpec, settings: EngineSettings, work: Work) -> int:
    """A chunk's activations, and a layer's keys and values of the longest prompt in one piece."""
    chunk, size = min(settings.prefill_chunk, work.longest), settings.dtype.itemsize
    gathered = 2 * work.longest * spec.kv_heads * spec.head_dim * size
    return chunk * _activation_bytes(spec, size) + gathered + 2 * 8 * work.longest


def _prompt_selection_bytes(spec: ModelSpec, dtype: torch.dtype, method: Method, longest: int) -> int:
    """A selection from a prompt: scores of all probed layers, twice, and one layer's keys and weights."""
    probe = method.selection.probe
    if probe is None or not method.refresh.due("prefill"):
        return 0
    scopes = len(probe.at(spec.layers)) * (spec.kv_heads if probe.heads == "group_mean" else 1)
    weights = 3 * 4 * min(probe.prefill_queries, KEPT_QUERIES) * spec.heads
    keys = 2 * spec.kv_heads * spec.head_dim * dtype.itemsize
    return longest * (3 * 4 * scopes + weights + keys)
