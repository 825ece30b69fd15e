"""Is a greedy text exact up to rounding? Every token is the argmax of full attention or a near tie, else it is a bug.

In bf16 the logits of one query and of a verify row differ in their low bits, so that equal texts are no valid gate. A
text is fed through full attention once a token at a time and once `width` tokens at a time, over the same prefixes; the
largest difference of a logit between the two, over all texts, is the noise. A token passes where it is the argmax of
single queries or lies below it by at most twice the noise. Where two texts part, the tokens of both must pass.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from aspire.attention import MixedAttention
from aspire.cache.pages import PageList
from aspire.cache.pool import KVPool
from aspire.kernels.rows import Rows
from aspire.model.decoder import Decoder
from aspire.prefill import Prompt, prefill

SLACK = 2.0  # times the measured noise
PAGE = 16


@dataclass(frozen=True)
class Gate:
    """Counts over all texts. noise: largest difference of a logit; gap: largest distance from the argmax that passed.

    parted: texts that differ from plain decoding; parted_wrong: those of them that part where there is no near tie.
    """

    tokens: int = 0
    argmax: int = 0
    near_ties: int = 0
    wrong: int = 0
    parted: int = 0
    parted_wrong: int = 0
    noise: float = 0.0
    gap: float = 0.0

    @property
    def passed(self) -> bool:
        return self.tokens > 0 and not self.wrong and not self.parted_wrong

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class Forced:
    """A text under full attention: gaps [n] below the argmax of single queries, and the noise of its logits."""

    gaps: list[float]
    noise: float
    plain_gap: float | None = None  # of the token that plain decoding says where it parts, None where it does not


def judge(forced: Sequence[Forced]) -> Gate:
    """The counts of all texts. One text may happen to show no noise at all, so the noise is that of all of them."""
    noise = max(each.noise for each in forced)
    gaps = [gap for each in forced for gap in each.gaps]
    parted = [each.plain_gap for each in forced if each.plain_gap is not None]
    near = [gap for gap in gaps if 0 < gap <= SLACK * noise]
    exact = sum(gap == 0 for gap in gaps)
    return Gate(
        len(gaps), exact, len(near), len(gaps) - exact - len(near), len(parted),
        sum(gap > SLACK * noise for gap in parted), noise, max(near, default=0.0),
    )  # fmt: skip


def parting(text: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, None where one begins with the other."""
    return next((i for i, (a, b) in enumerate(zip(text, plain)) if a != b), None)


class Teacher:
    """Sequences in a pool, fed chunk by chunk with full attention."""

    def __init__(self, model: Decoder, pool: KVPool, pages: list[PageList]) -> None:
        self.model, self.pool = model, pool
        self.device = pool.k.device
        table = torch.zeros(len(pages), max(len(p.pages) for p in pages), dtype=torch.int64)
        for row, owned in enumerate(pages):
            table[row, : len(owned.pages)] = torch.tensor(owned.pages)
        self.table = table.to(self.device)

    def logits(self, ids: list[list[int]], position: list[int]) -> Tensor:
        """Feed ids of each row from its position on, and keep their keys: logits of all tokens in turn, fp32 [T, V]."""
        width = torch.tensor([len(x) for x in ids], device=self.device)
        first = torch.tensor(position, device=self.device)
        start, page = width.cumsum(0) - width, self.pool.page_size
        rows = Rows(start, width, first, self.table, page, widest=max(map(len, ids)))
        row = torch.arange(len(ids), device=self.device).repeat_interleave(width)
        at = torch.arange(len(row), device=self.device) + (first - start)[row]
        entries = self.table[row, at // page] * page + at % page
        tokens = torch.tensor([token for x in ids for token in x], device=self.device)
        hidden = self.model(tokens, at, MixedAttention(self.pool, entries, lambda layer: [rows]))
        return self.model.logits(hidden).float()


@torch.no_grad()
def force(
    model: Decoder, pool: KVPool, kept: Sequence[Prompt], texts: list[list[int]], width: int,
    plain: list[list[int]] | None = None,
) -> list[Forced]:  # fmt: skip
    """Feed each text after its prompt. The pool needs room for the texts; the prompts stay the caller's to release.

    Raises OutOfPages where the pool is full.
    """
    assert width >= 1 and len(kept) == len(texts) and all(texts), "a text of at least one token for each prompt"
    pages: list[PageList] = []
    try:
        for prompt, text in zip(kept, texts):
            pages.append(pool.fork(prompt.pages, prompt.length))
            pool.allocator.reserve(pages[-1], prompt.length + len(text))
        return _force(Teacher(model, pool, pages), kept, texts, width, plain or texts)
    finally:
        for owned in pages:
            pool.release(owned)


def _force(
    teacher: Teacher, kept: Sequence[Prompt], texts: list[list[int]], width: int, plain: list[list[int]]
) -> list[Forced]:
    """Token i is judged by the logits after token i - 1; those of token 0 come from the prefill, as in every run."""
    parts = [parting(text, other) for text, other in zip(texts, plain, strict=True)]
    gaps: list[list[float]] = [[] for _ in texts]
    plain_gaps: list[float | None] = [None for _ in texts]
    noise = [0.0 for _ in texts]

    def look(rows: list[int], logits: Tensor) -> None:
        """Logits of the next token of each of some rows; the device is asked once."""
        at = [len(gaps[row]) for row in rows]
        said = [texts[row][i] for row, i in zip(rows, at)]
        others = [plain[row][i] if i == parts[row] else token for row, i, token in zip(rows, at, said)]
        tokens = torch.tensor([said, others], device=logits.device)
        for row, i, gap, other in zip(rows, at, *(logits.amax(1) - logits.gather(1, tokens.T).T).tolist()):
            gaps[row].append(gap)
            if i == parts[row]:
                plain_gaps[row] = other

    look([*range(len(kept))], torch.stack([prompt.logits for prompt in kept]).float())
    for begin in range(0, max(map(len, texts)) - 1, width):
        chunks = [text[:-1][begin : begin + width] for text in texts]
        position = [prompt.length + begin for prompt in kept]
        singles, order = list[Tensor](), list[tuple[int, int]]()
        for i in range(max(map(len, chunks))):
            rows = [row for row, chunk in enumerate(chunks) if i < len(chunk)]
            singles.append(teacher.logits([x[i : i + 1] for x in chunks], [p + i for p in position]))
            look(rows, singles[-1])
            order += [(row, i) for row in rows]
        together = teacher.logits(chunks, position)
        alone = torch.cat(singles)[sorted(range(len(order)), key=order.__getitem__)]
        for (row, _), differs in zip(sorted(order), (together - alone).abs().amax(1).tolist()):
            noise[row] = max(noise[row], differs)
    return [Forced(*each) for each in zip(gaps, noise, plain_gaps, strict=True)]


def near_tie_gate(
    model: Decoder, prompts: Sequence[list[int]], texts: list[list[int]], width: int,
    plain: list[list[int]] | None = None, chunk: int = 512,
) -> Gate:  # fmt: skip
    """The counts of greedy texts after their prompts, in a pool of the gate's own.

    width: of the widest verify row, longest draft + 1. plain: the texts of autoregressive decoding. chunk: tokens of a
    prefill pass, as in the runs that are judged.
    """
    spec, like = model.spec, model.embed
    tokens = [len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)]
    # A fork copies the last page of its prompt.
    pages = sum(-(-n // PAGE) for n in tokens) + sum(-(-len(p) // PAGE) for p in prompts)
    pool = KVPool(spec.layers, spec.kv_heads, spec.head_dim, pages, PAGE, like.dtype, str(like.device))
    kept = [prefill(model, pool, list(prompt), chunk) for prompt in prompts]
    return judge(force(model, pool, kept, texts, max(width, 2), plain))
