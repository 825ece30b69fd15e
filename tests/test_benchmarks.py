"""Does every benchmark ask exactly what its configuration says? Prompts, cuts, seeds, answers and error messages."""

import dataclasses
import gzip
import json
import re
import shutil
import socket
import time
from fractions import Fraction
from pathlib import Path

import datasets
import huggingface_hub
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from aspire.model.load import embedded_model_path
from aspire.model.tokenizer import load_tokenizer
from experiments.benchmarks import (
    Arithmetic,
    HubBenchmark,
    PyStdlib,
    answer_part,
    cut_end,
    data_hash,
    encode_chat,
    fit_document,
    grade,
    hub,
    request_seed,
)

CONF = Path(__file__).parents[1] / "conf"
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
    assert encode_chat(word_tokenizer(bos, None), "hello world") == [token for token in ids if token not in (2, 3)]


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


def test_answer_part_ignores_thinking():
    texts = {"12</think> 34": " 34", "<think>12</think>34": "34", "<think>12": None, "12": "12"}
    assert {text: answer_part(text) for text in texts} == texts


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
    ids, truncated, original = fit_document(tokenizer, render_choice(tokenizer), document, limit)
    text = tokenizer.decode(ids)
    assert limit - 4 <= len(ids) <= limit
    assert truncated and original == len(tokenizer(document, add_special_tokens=False)["input_ids"])
    assert text.count("<|im_start|>") == 3 and text.count("<|im_end|>") == 2
    assert text.count(TAIL) == 1 and text.count("<text>\nHEAD FIRST") == 1
    assert f"LAST{TAIL}" in text and "needle" not in text


def test_short_document_stays_whole(tokenizer):
    render = render_choice(tokenizer)
    ids, truncated, original = fit_document(tokenizer, render, "a short needle", 200)
    assert ids == render("a short needle") and not truncated and original < len(ids)
    assert fit_document(tokenizer, render, "a short needle", len(ids))[0] == ids


def test_question_longer_than_the_limit_names_both_numbers(tokenizer):
    needed = len(render_choice(tokenizer)(""))
    with pytest.raises(ValueError, match=rf"{needed} tokens without its document, the limit is 20"):
        fit_document(tokenizer, render_choice(tokenizer), "word " * 100, 20)


def test_cut_end_keeps_the_beginning(tokenizer):
    ids, _, _ = fit_document(tokenizer, render_choice(tokenizer), "FIRST " + "word " * 500 + "LAST", 150, cut_end)
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


def test_grade_takes_the_last_number():
    for text in ("3 + 4 = 7. The answer is 7.", "first 9, so 7.0", "10-7", "<think>8</think> The answer is 7."):
        assert grade(text, "7"), text
    for text in ("$1,007.00", "it is -7", "7 of 8", "no number", "", "<think>7</think> It is 8.", "<think>so far 7"):
        assert not grade(text, "7"), text
    assert grade("that is 12,345,678 metres", "12345678")


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Offline flags set, an empty cache, and sockets that fail the test."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    hub._load.cache_clear()
    yield
    hub._load.cache_clear()


ROWS = [
    {
        "_id": f"r{index}",
        "context": f"row {index} begins. " + "words and more words. " * 20 * index,
        "question": "What is in {braces}?",
        "choices": ["a", "b"],
        "answer": index,
        "note": None,
    }
    for index in range(1, 9)
]


def write_rows(folder: Path, suffix: str) -> Path:
    path = folder / f"rows, all{suffix}"  # a comma in a path must not split it
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    if suffix == ".parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def local(path: Path, /, **fields) -> HubBenchmark:
    kind = "parquet" if path.suffix == ".parquet" else "json"
    names = {"document_field": "context", "answer_field": "answer", "id_field": "_id"}
    template = "{context}\n\n{question} \\boxed{}{note}"
    return HubBenchmark(**({"path": kind, "data_files": str(path), "template": template} | names | fields))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_local_files_need_no_network(tokenizer, tmp_path, no_network, suffix):
    source = local(write_rows(tmp_path, suffix), expected_rows=8)
    items = source.build(tokenizer, 4096, 64)
    assert [item.id for item in items] == [f"rows, all/r{index}#0" for index in range(1, 9)]
    assert [item.answer for item in items] == [str(index) for index in range(1, 9)]
    assert "What is in {braces}? \\boxed{}<|im_end|>" in tokenizer.decode(items[0].prompt_ids)
    assert source.provenance() == {"path": source.path, "revision": None, "rows": 8}


def test_window_requests_and_repeats(tokenizer, tmp_path, no_network):
    path = write_rows(tmp_path, ".jsonl")
    items = local(path, min_tokens=250, max_tokens=600, requests=2, repeats=4).build(tokenizer, 4096, 64)
    assert len(items) == 8 and len({item.seed for item in items}) == 8
    assert [item.id.split("#")[1] for item in items] == list("00112233")
    assert all(250 <= len(item.prompt_ids) <= 600 for item in items)
    longer = local(path, min_tokens=250, max_tokens=600, requests=2, repeats=5).build(tokenizer, 4096, 64)
    assert longer[:8] == items and len(longer) == 10
    lists = local(path, data_files=[str(path)], requests=1, answer_field="choices")
    assert lists.build(tokenizer, 4096, 64)[0].answer == '["a", "b"]'


def test_short_context_cuts_documents_only(tokenizer, tmp_path, no_network):
    items = local(write_rows(tmp_path, ".jsonl")).build(tokenizer, 264, 64)
    whole = local(tmp_path / "rows, all.jsonl").build(tokenizer, 4096, 64)
    assert {item.truncated for item in items} == {True, False}
    for cut, full in zip(items, whole, strict=True):
        assert cut.truncated == (len(full.prompt_ids) > 200) and cut.original_tokens == full.original_tokens
        assert 196 <= len(cut.prompt_ids) <= 200 if cut.truncated else cut == full
    assert all("What is in {braces}?" in tokenizer.decode(item.prompt_ids) for item in items)


def test_hub_errors_name_the_fix(tokenizer, tmp_path, no_network):
    path = write_rows(tmp_path, ".jsonl")

    def fails(match: str, context: int = 4096, **fields) -> None:
        with pytest.raises(ValueError, match=match):
            local(path, **fields).build(tokenizer, context, 64)

    fails("has 8 rows, expected_rows is 30", expected_rows=30)
    fails("no field 'problem', it has: _id, context", template="{context}{problem}")
    fails("2 of 8 rows have a prompt of 700 to 900 tokens, requests is 3", min_tokens=700, max_tokens=900, requests=3)
    fails("no document to cut, the context leaves 136", context=200, document_field=None)
    fails("'text' is not a placeholder", document_field="text")
    fails("no such data file: nope.jsonl", data_files="nope.jsonl")
    fails("'json' needs data_files", data_files=None)
    fails("min_tokens 9 > max_tokens 8", min_tokens=9, max_tokens=8)
    fails("requests and repeats must be >= 1", repeats=0)


def test_missing_from_cache_fails_at_once(tokenizer, no_network):
    start = time.monotonic()
    source = HubBenchmark("Qwen/CodeElo", "{description}")
    with pytest.raises(ValueError, match=r"not in cache: Qwen/CodeElo .*run with network first"):
        source.build(tokenizer, 4096, 64)
    assert time.monotonic() - start < 5


def test_warm_cache_needs_no_network(tokenizer, tmp_path, no_network):
    commit = "a" * 40
    prepared = datasets.load_dataset("json", data_files={"test": [str(write_rows(tmp_path, ".jsonl"))]}, split="test")
    # What one run with network leaves behind: a folder named after the commit, files named after the data set.
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "org___data" / "default" / "0.0.0" / commit
    shutil.copytree(Path(prepared.cache_files[0]["filename"]).parent, folder)
    (folder / "json-test.arrow").rename(folder / "data-test.arrow")
    info = (folder / "dataset_info.json").read_text().replace('"dataset_name": "json"', '"dataset_name": "data"')
    (folder / "dataset_info.json").write_text(info)

    cached = local(Path("unused"), path="org/data", data_files=None, revision="main")
    assert cached.provenance() == {"path": "org/data", "revision": commit, "rows": 8}
    assert cached.build(tokenizer, 4096, 64)[0].id == "data/r1#0"
    assert dataclasses.replace(cached, revision=commit).provenance()["revision"] == commit
    with pytest.raises(ValueError, match=f"in the cache is revision {commit}, the config pins {'b' * 40}"):
        dataclasses.replace(cached, revision="b" * 40).provenance()
    with pytest.raises(ValueError, match="not in cache: org/data .other, test"):
        dataclasses.replace(cached, name="other").provenance()


def test_unreachable_hub_is_asked_once(tokenizer, monkeypatch, no_network):
    asked = []

    def refuse(self, path, **options):
        asked.append((path, options["revision"]))
        raise OSError("no route")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(ValueError, match=r"cannot be reached for a/b \(no route\); set HF_HUB_OFFLINE=1"):
        HubBenchmark("a/b", "{x}", revision="v1").build(tokenizer, 4096, 64)
    assert asked == [("a/b", "v1")]


def test_loading_script_is_refused_with_the_alternative(tokenizer, tmp_path, no_network):
    folder = tmp_path / "longbench"
    folder.mkdir()
    (folder / "longbench.py").write_text("import datasets\n")
    with pytest.raises(ValueError, match="loading script, .* name a parquet or JSON copy"):
        HubBenchmark(str(folder), "{context}").build(tokenizer, 4096, 64)


@pytest.mark.parametrize("path", sorted((CONF / "benchmark").glob("*.yaml")), ids=lambda path: path.stem)
def test_group_files_build_their_source(path):
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        config = compose(
            overrides=[f"+benchmark={path.stem}", "+seed=123", "+batch=2", "+model=smollm2_135m"]
        ).benchmark
        assert set(config) == {"name", "label", "max_new_tokens", "source"} and config.name == path.stem
        source = instantiate(config.source)
        assert hash(source) == hash(instantiate(config.source))


def test_local_file_can_replace_the_hub_on_the_command_line(tokenizer, tmp_path, no_network):
    path = write_rows(tmp_path, ".jsonl")
    overrides = ("path=json", "name=null", 'template="{context} Question: {question}"', f"data_files=['{path}']")
    overrides += ("expected_rows=8", "min_tokens=1", "requests=null", "answer_field=answer")
    with initialize_config_dir(str(CONF.resolve()), version_base=None):
        words = ["+benchmark=longbench_16k", "+seed=123", *(f"benchmark.source.{text}" for text in overrides)]
        config = compose(overrides=words)
    items = instantiate(config.benchmark.source).build(tokenizer, 4096, 64)
    assert len(items) == 8 and " Question: What is in {braces}?" in tokenizer.decode(items[0].prompt_ids)
