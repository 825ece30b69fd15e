"""What does the host know of a request? Its prompt, its limits, its growing answer, and why it ended."""

from collections.abc import Callable
from dataclasses import dataclass, field

from aspire.settings import Sampling

Decode = Callable[[list[int]], str]  # token ids -> text


@dataclass
class Request:
    """One prompt and its growing answer.

    output_ids is the only list of emitted tokens; its first entry comes from the prefill. rounds holds
    (drafted, accepted) of each round. finish_reason: None (running or cut by the timed window), "stop"
    (end id or stop string) or "length". stop strings need `decode`, which turns ids into text.
    Raises ValueError for an empty prompt, a cap below 1, or stop strings without a decoder.
    """

    id: str
    prompt_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 64
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    decode: Decode | None = None
    output_ids: list[int] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id}: the prompt is empty")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.id}: max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if self.stop and self.decode is None:
            raise ValueError(f"request {self.id}: stop strings need decode=tokenizer.decode")
        if any(not s for s in self.stop):
            raise ValueError(f"request {self.id}: a stop string is empty")

    @property
    def length(self) -> int:
        """Committed tokens, prompt and answer."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The answer as text, without the stop string that ended it."""
        assert self.decode is not None, "text needs Request.decode"
        text = self.decode(self.output_ids)
        cuts = [at for s in self.stop if (at := text.find(s)) >= 0]
        return text[: min(cuts)] if cuts else text

    def append(self, tokens: list[int]) -> int:
        """Commit tokens one by one until a stop rule holds; returns how many were taken.

        The end id is kept, as in Hugging Face `generate`; so is the token that completes a stop string.
        """
        for taken, token in enumerate(tokens, 1):
            self.output_ids.append(token)
            if token in self.end_ids or self._hits_stop_string():
                self.finish_reason = "stop"
            elif len(self.output_ids) == self.max_new_tokens:
                self.finish_reason = "length"
            if self.finished:
                return taken
        return len(tokens)

    def _hits_stop_string(self) -> bool:
        if not self.stop:
            return False
        assert self.decode is not None
        # A token holds at least one byte and a character at most four, so this tail covers every stop string
        # that ends in the newest token, with room for special tokens that decode to nothing.
        window = 4 * max(map(len, self.stop)) + 8
        tail = self.decode(self.output_ids[-window:])
        return any(s in tail for s in self.stop)
