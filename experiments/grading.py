"""What verdict does each answer of a run get? From output ids to text, past the thinking, to the benchmark's scorer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from aspire.request import Request
from experiments.benchmarks import Item
from experiments.records import Graded
from experiments.scoring import Scorer, judge
from experiments.scoring.scorer import CLOSE, OPEN

SHOWN = 200  # characters of an answer that the record keeps
OPENING = 16  # tokens at the end of a prompt that may open a thinking block


def answer_text(tokenizer: PreTrainedTokenizerBase, request: Request) -> str:
    """The answer with its special tokens, since thinking may be marked by them, but without the end id."""
    ids = request.output_ids
    ids = ids[:-1] if ids and ids[-1] in request.end_ids else ids
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def opens_thinking(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends inside a thinking block, which some chat templates open for the model."""
    _, opened, after = str(tokenizer.decode(list(prompt_ids[-OPENING:]), skip_special_tokens=False)).rpartition(OPEN)
    return bool(opened) and CLOSE not in after


def grade(
    requests: Sequence[Request], items: Sequence[Item], scorer: Scorer, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Graded]:
    """The verdicts by request id: of the requests that ended, on items that the scorer can judge."""
    asked = {item.id: item for item in items if scorer.judges(item)}
    found = {}
    for request in requests:
        item = asked.get(request.id)
        if item is None or not request.finished:
            continue
        thinking = opens_thinking(tokenizer, item.prompt_ids)
        verdict = judge(scorer, item, answer_text(tokenizer, request), request.finish_reason == "length", thinking)
        shown = None if verdict.found is None else verdict.found[:SHOWN]
        found[request.id] = Graded(outcome=verdict.outcome, score=verdict.score, found=shown, task=item.task)
    return found
