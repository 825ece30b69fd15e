"""Does every benchmark ask exactly what its configuration says? Prompts, cuts, seeds, answers and error messages."""

import re
import time
from fractions import Fraction

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from aspire.model.load import embedded_model_path
from aspire.model.tokenizer import load_tokenizer
from experiments.benchmarks import (
    Arithmetic,
    PyStdlib,
    cut_end,
    data_hash,
    encode_chat,
    fit_document,
    request_seed,
)

THINKING_TEMPLATE = (
    "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %} nothink{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_model_path())


def word_tokenizer(bos: bool, template: str | None) -> PreTrainedTokenizerFast:
    """Words as tokens; with bos the tokenizer adds <s> on its own, as Llama's does."""
    words = ["<unk>", "<s>", "user", "assistant", "hello", "world", "nothink"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>" if bos else None)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(("bos", "ids"), [(True, [1, 2, 4, 5, 3]), (False, [2, 4, 5, 3])])
def test_prompt_has_the_bos_its_tokenizer_asks_for(bos, ids):
    template = "{{ bos_token }} user {{ messages[0]['content'] }}{% if add_generation_prompt %} assistant{% endif %}"
    template = template if bos else template.removeprefix("{{ bos_token }} ")
    assert encode_chat(word_tokenizer(bos, template), "hello world") == ids
    bare = [token for token in ids if token not in (2, 3)]
    assert encode_chat(word_tokenizer(bos, None), "hello world") == bare
    assert encode_chat(word_tokenizer(bos, template), "hello world", chat=False) == bare


def test_chat_prompt_equals_template_text(tokenizer):
    ids = encode_chat(tokenizer, "What is a page?", system="Be brief.")
    assert all(isinstance(token, int) for token in ids)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is a page?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_reaches_the_template():
    tokenizer = word_tokenizer(False, THINKING_TEMPLATE)
    assert encode_chat(tokenizer, "hello") == encode_chat(tokenizer, "hello", thinking=True) == [4]
    assert encode_chat(tokenizer, "hello", thinking=False) == [4, 6]


def test_request_seeds_are_stable_and_distinct():
    assert request_seed(0, "aime_2025/1", 0) == 595630250826451943  # the same in every process
    seeds = {request_seed(base, item, repeat) for base in (0, 1) for item in ("a", "b") for repeat in range(8)}
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)


TAIL = "</text>\n\nWhich word is hidden?\n(A) heron\n(B) ibis\n(C) stork\n(D) crane"


def render_choice(tokenizer):
    return lambda document: encode_chat(tokenizer, f"<text>\nHEAD {document}{TAIL}")


@pytest.mark.parametrize("limit", [199, 200, 201])
@pytest.mark.parametrize("filler", ["plain words of a report, ", "数字と漢字、", " " * 40 + "x", "a1!ß€🙂 "])
def test_cut_is_inside_the_document(tokenizer, limit, filler):
    document = f"FIRST {filler * 400} needle {filler * 400} LAST"
    ids, truncated, original = fit_document(render_choice(tokenizer), document, limit)
    text = tokenizer.decode(ids)
    assert limit - 4 <= len(ids) <= limit
    assert truncated and original == len(render_choice(tokenizer)(document))
    assert text.count("<|im_start|>") == 3 and text.count("<|im_end|>") == 2
    assert text.count(TAIL) == 1 and text.count("<text>\nHEAD FIRST") == 1
    assert f"LAST{TAIL}" in text and "needle" not in text


def test_short_document_stays_whole(tokenizer):
    render = render_choice(tokenizer)
    ids, truncated, original = fit_document(render, "a short needle", 200)
    assert ids == render("a short needle") and not truncated and original == len(ids)
    assert fit_document(render, "a short needle", len(ids))[0] == ids


def test_question_longer_than_the_limit_names_both_numbers(tokenizer):
    needed = len(render_choice(tokenizer)(""))
    with pytest.raises(ValueError, match=rf"{needed} tokens without its document, the limit is 20"):
        fit_document(render_choice(tokenizer), "word " * 100, 20)


def test_cut_end_keeps_the_beginning(tokenizer):
    ids, _, _ = fit_document(render_choice(tokenizer), "FIRST " + "word " * 500 + "LAST", 150, cut_end)
    assert "FIRST" in tokenizer.decode(ids) and "LAST" not in tokenizer.decode(ids)


@pytest.mark.parametrize(("requests", "target"), [(8, 2000), (3, 160), (2, 9000)])
def test_stdlib_prompts_have_the_target_length(tokenizer, requests, target):
    items = PyStdlib(requests, target).build(tokenizer, target + 64, 64)
    assert len(items) == len({item.id for item in items}) == len({item.seed for item in items}) == requests
    for item in items:
        text = tokenizer.decode(item.prompt_ids)
        assert target - 8 <= len(item.prompt_ids) <= target
        assert item.answer is None and item.truncated and item.original_tokens > target
        assert text.count("<|im_start|>") == 3 and text.endswith("<|im_start|>assistant\n")
        assert f"# module {item.id.removeprefix('pystdlib/').removesuffix('#0')}\n" in text


def test_stdlib_subjects_survive_the_cut(tokenizer):
    asked = 0
    for item in PyStdlib(8, 2000).build(tokenizer, 4096, 64):
        text = tokenizer.decode(item.prompt_ids)
        document, question = text.split("```python\n")[1].rsplit("\n```\n", 1)
        subject = re.search(r"the (?:class|function) `(\w+)`", question)
        if subject is None:
            continue
        asked += 1
        start = re.search(rf"^(?:async def|def|class) {subject[1]}\b", document, re.MULTILINE).start()
        # Complete: some other unindented line follows the definition before the document ends.
        assert re.search(r"\n\S", document[start:])
    assert asked >= 4


def test_stdlib_is_deterministic_and_quick(tokenizer):
    start = time.process_time()
    first = PyStdlib(8, 2000).build(tokenizer, 4096, 64)
    assert time.process_time() - start < 6  # about 1 s on an idle core
    assert first == PyStdlib(8, 2000).build(tokenizer, 4096, 64)
    assert data_hash(first) != data_hash(PyStdlib(8, 2000, seed=124).build(tokenizer, 4096, 64))


def test_stdlib_errors_name_the_numbers(tokenizer):
    with pytest.raises(ValueError, match=r"prompt_tokens 2000 \+ max_new_tokens 64 > context 2048"):
        PyStdlib(8, 2000).build(tokenizer, 2048, 64)
    with pytest.raises(ValueError, match="max_new_tokens 64 must be .* context of 64"):
        PyStdlib(8, 20).build(tokenizer, 64, 64)
    with pytest.raises(ValueError, match="without its document, the limit is 10"):
        PyStdlib(1, 10).build(tokenizer, 2048, 64)
    with pytest.raises(ValueError, match="requests must be >= 1, got 0"):
        PyStdlib(0, 10)


def water(start: int, inflow: int, out: int, minutes: int) -> int:
    for _ in range(minutes):
        start = start + inflow - out
    return start


# A second way from the numbers in the text, in their order, to the answer.
SOLUTIONS = {
    "change": lambda a, p, b, q, paid: paid - sum([p] * a) - sum([q] * b),
    "journey": lambda h, v, k, w: sum([v] * h + [w] * k),
    "future_age": lambda age, times, years: sum([age] * times) + years,
    "family_age": lambda age, more, times: age + (1 + times) * (age + more),
    "tank": water,
    "sharing": lambda trays, each, kept, friends: Fraction(trays * each - kept, friends),
    "wages": lambda hours, days, wage, spent: sum([hours * wage] * days) - spent,
    "savings": lambda start, weekly, weeks: water(start, weekly, 0, weeks),
    "discount": lambda price, percent, count: Fraction(price * (100 - percent) * count, 100),
    "fence": lambda length, width, gate, price: sum([length, width, length, width, -gate]) * price,
    "library": lambda shelves, books, lent, boxes, each: sum([books] * shelves + [each] * boxes) - lent,
    "machines": lambda slow, fast, parts: Fraction(parts, slow + fast),
}


def test_arithmetic_answers_follow_from_the_text():
    problems = Arithmetic(1000, seed=5).problems()
    assert len({problem.text for problem in problems}) == 1000
    assert {problem.kind for problem in problems} == set(SOLUTIONS)
    for problem in problems:
        numbers = map(int, re.findall(r"\d+", problem.text))
        assert SOLUTIONS[problem.kind](*numbers) == problem.answer > 0, problem
        assert 2 <= problem.steps <= 4


def test_arithmetic_items(tokenizer):
    items = Arithmetic(8).build(tokenizer, 1024, 64)
    assert items == Arithmetic(8).build(tokenizer, 1024, 64) != Arithmetic(8, seed=1).build(tokenizer, 1024, 64)
    assert len({item.id.split("-")[1] for item in items}) == 8
    assert all("The answer is N." in tokenizer.decode(item.prompt_ids) for item in items)
    assert all(not item.truncated and item.original_tokens == len(item.prompt_ids) for item in items)
    assert {problem.steps for problem in Arithmetic(20, min_steps=4).problems()} == {4}
    with pytest.raises(ValueError, match="prompt tokens; with max_new_tokens 90 .* context of 100"):
        Arithmetic(1).build(tokenizer, 100, 90)
    with pytest.raises(ValueError, match="no problem has 5 to 9 steps"):
        Arithmetic(1, min_steps=5, max_steps=9)
