"""What is one request of a benchmark, and how does a text become its prompt ids?

A benchmark is a frozen dataclass with `build(tokenizer, context, max_new_tokens) -> list[Item]`. Everything that
turns text into ids passes through this file, so that a prompt is tokenised once, carries the special tokens its
tokenizer asks for and no others, and is only ever shortened inside its document.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from aspire.model.tokenizer import prompt_ids

_SECANT_STEPS = 8


@dataclass(frozen=True)
class Item:
    """One prompt with the seed of its answer.

    id ends in `#` and the repeat index. original_tokens: tokens of the whole prompt before its document was cut, and
    len(prompt_ids) where nothing was. answer is None where the benchmark has none, a JSON list where several are
    accepted. task: the part of the benchmark that the prompt belongs to. classes: what a classification chooses from.
    """

    id: str
    prompt_ids: tuple[int, ...]
    answer: str | None
    seed: int
    truncated: bool
    original_tokens: int
    task: str | None = None
    classes: tuple[str, ...] = ()


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Tokens of a bare text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    user_text: str,
    system: str | None = None,
    thinking: bool | None = None,
    chat: bool = True,
) -> list[int]:
    """Prompt ids up to the point where the model answers.

    With a chat template the template alone decides about BOS: its text is never tokenised a second time. A base model
    has no template and gets the text with the special tokens its tokenizer is configured to add. thinking is handed to
    templates that know `enable_thinking`; None leaves the template's own default. chat: False treats any model as a
    base model.
    """
    if tokenizer.chat_template is None or not chat:
        return prompt_ids(tokenizer, "\n\n".join(filter(None, (system, user_text))))
    messages = [{"role": "user", "content": user_text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    options = {} if thinking is None else {"enable_thinking": thinking}
    return prompt_ids(tokenizer, messages, **options)


def template_hash(tokenizer: PreTrainedTokenizerBase, template: str, thinking: bool | None, chat: bool = True) -> str:
    """Short fingerprint of how text becomes a prompt: the benchmark's template, the chat template and its switch."""
    parts = [template, tokenizer.chat_template if chat else None, thinking]
    return hashlib.sha1(json.dumps(parts).encode(), usedforsecurity=False).hexdigest()[:12]


def request_seed(base_seed: int, item_id: str, repeat: int) -> int:
    """63-bit seed of one answer: the same in every process, batch and order; different for every repeat."""
    digest = hashlib.sha256(f"{base_seed}\n{item_id}\n{repeat}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def data_hash(items: Sequence[Item]) -> str:
    """Short fingerprint of what was asked: ids and prompt ids in order."""
    digest = hashlib.sha1(usedforsecurity=False)
    for item in items:
        digest.update(f"{item.id}\n{','.join(map(str, item.prompt_ids))}\n".encode())
    return digest.hexdigest()[:12]


def room_for_prompt(context: int, max_new_tokens: int) -> int:
    """Prompt tokens that leave room for the answer. Raises ValueError if there is none."""
    if max_new_tokens < 1 or max_new_tokens >= context:
        raise ValueError(
            f"max_new_tokens {max_new_tokens} must be at least 1 and below the context of {context} tokens: "
            "change max_new_tokens or take a model with a longer context"
        )
    return context - max_new_tokens


def cut_middle(document: str, characters: int) -> str:
    """Keep the first and the last half."""
    tail = characters // 2
    return document[: characters - tail] + document[len(document) - tail :]


def cut_end(document: str, characters: int) -> str:
    """Keep the beginning."""
    return document[:characters]


def fit_document(
    render: Callable[[str], list[int]],
    document: str,
    limit: int,
    cut: Callable[[str, int], str] = cut_middle,
) -> tuple[list[int], bool, int]:
    """Shorten the document, and nothing else, until the prompt has at most `limit` tokens.

    render turns a document into the final prompt ids, so template, question and choices are outside the part that is
    cut. Returns (prompt ids, truncated, tokens of the whole prompt). Raises ValueError if the prompt is too long even
    with an empty document.
    """
    ids = render(document)
    original = len(ids)
    if original <= limit:
        return ids, False, original
    bare = render("")
    if len(bare) > limit:
        raise ValueError(
            f"the prompt needs {len(bare)} tokens without its document, the limit is {limit}: "
            "raise the limit (longer context, fewer new tokens)"
        )
    tokens = max(original - len(bare), 1)
    return _longest_fit(lambda kept: render(cut(document, kept)), bare, len(document), tokens, limit), True, original


def _longest_fit(
    render: Callable[[int], list[int]], bare: list[int], characters: int, tokens: int, limit: int
) -> list[int]:
    """The longest prompt found that fits, over the number of characters kept of a document that is too long.

    Characters are cut, not tokens: decoding half a document can break a character or swallow special tokens. `fits`
    characters are known to fit and `over` are known not to; a secant finds the place in a few steps, and halving ends
    the search where a run of spaces or rare characters defeats it.
    """
    fits, over, best = 0, characters, bare
    kept, length, ratio = 0, len(bare), characters / tokens
    step = 0
    while len(best) < limit and over - fits > 1:
        last, last_length = kept, length
        guess = kept + round((limit - length) * ratio)
        kept = min(max(guess, fits + 1), over - 1) if step < _SECANT_STEPS else (fits + over) // 2
        ids = render(kept)
        length, step = len(ids), step + 1
        if length <= limit:
            fits, best = kept, ids
        else:
            over = kept
        if length != last_length:
            ratio = (kept - last) / (length - last_length)
    return best
