"""Which prompts does a run need that times shapes alone? Random token ids of one length; no text, no tokenizer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .item import Item, request_seed, room_for_prompt


@dataclass(frozen=True)
class Shapes:
    """`requests` prompts of `context` ids below `vocab`. Raises ValueError for numbers that make no prompt."""

    context: int
    requests: int
    vocab: int
    seed: int = 123
    reads_text: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("context", "requests", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def build(self, tokenizer: Any, context: int, max_new_tokens: int) -> list[Item]:
        """The prompts, the same for the same fields; the tokenizer goes unused. ValueError if they are too long."""
        if self.context > room_for_prompt(context, max_new_tokens):
            raise ValueError(
                f"prompts of {self.context} tokens and max_new_tokens {max_new_tokens} exceed the context "
                f"of {context}: lower benchmark.source.context or max_new_tokens"
            )
        return [self._item(index) for index in range(self.requests)]

    def _item(self, index: int) -> Item:
        name = f"shapes/{self.context}-{index}"
        seed = request_seed(self.seed, name, 0)
        ids = np.random.default_rng(seed).integers(self.vocab, size=self.context)
        return Item(f"{name}#0", tuple(ids.tolist()), None, seed, False, self.context)
