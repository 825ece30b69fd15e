"""Does every benchmark of files ask what its authors ask, from the Hub and from one's own files? Windows, cuts, ids."""

import gzip
import json
import re
from pathlib import Path

import datasets
import pytest
from hub_server import serve
from hydra import compose, initialize_config_dir

from aspire.model.load import embedded_model_path
from aspire.model.tokenizer import load_tokenizer
from experiments import prompts
from experiments.benchmarks import FileBenchmark, data_hash
from experiments.config import CONF, check_overrides, choices, plain, register
from experiments.layout import build_items, make_source
from experiments.loading import spec_of
from experiments.records import find_records, read_record, read_requests
from experiments.run import run

TINY = (
    "{model_type:llama,vocab_size:49152,hidden_size:32,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2,"
    "head_dim:8,intermediate_size:64,rms_norm_eps:1e-5,rope_theta:10000.0,max_position_embeddings:131072,"
    "tie_word_embeddings:true}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(embedded_model_path())


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def config_of(*words: str) -> dict:
    """The config of a run, whose words are checked as on the command line."""
    register()
    given = ["model.weights=random", f"model.shape={TINY}", "engine.device=cpu", "seed=123", *words]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(given)
        return plain(compose("config", [*given, "output_dir=."]))


def ask(*words: str):
    config = config_of(*words)
    return build_items(config, spec_of(config))


def write(path: Path, rows: list[dict]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)
    return path


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
STATED = '"The correct answer is (insert answer here)".'
AIME = {"problem": "Find $n$ with $\\binom{n}{2} = 3$.", "answer": 3}
V2 = {
    "_id": "a1", "length": "short", "question": "Who?", "choice_A": "Ann", "choice_B": "Bo", "choice_C": "Cy",
    "choice_D": "Di", "answer": "C",
}  # fmt: skip
V2_TEXT = "\n</text>\n\nWhat is the correct answer to this question: Who?\n"
V2_TEXT += "Choices:\n(A) Ann\n(B) Bo\n(C) Cy\n(D) Di\n\n"
V2_COT = f"{V2_TEXT}Let's think step by step, and finish with {STATED}"
GPQA = {"Record ID": "rec1", "Question": "Which gas?", "Correct Answer": "Argon\n"}
GPQA |= {f"Incorrect Answer {n}": gas for n, gas in enumerate(("Neon", "Xenon", "Radon"), start=1)}
LCB = {"question_id": "q1", "question_content": "Add.", "starter_code": "", "difficulty": "easy"}
LCB |= {"contest_date": "2024-09-01T00:00:00", "private_test_cases": "x" * 100}
ELO = {"problem_id": "1A", "title": "Sum", "description": "Add {x}.", "input": "Two.", "output": "One.", "note": "Hm."}
ELO |= {"interaction": None, "examples": [["1 2", "3"], ["4 5", "9"]]}
V1 = {"_id": "v1", "input": "Who?", "answers": ["Ann", "A."], "dataset": "musique", "all_classes": None}

ELO_TEXT = "Output\nOne.\n\nExample input\n1 2\nExample output\n3\n\nExample input\n4 5\nExample output\n9\n\nNote\nHm."

# A row of each benchmark's file ("long" stands for a document), words of the prompt, answer, id, task.
STANDINS = {
    "aime24": (AIME | {"id": 60}, AIME["problem"] + BOXED, "3", "aime_2024/60", None),
    "aime25": (AIME | {"problem_idx": 1}, AIME["problem"] + BOXED, "3", "aime_2025/1", None),
    "aime26": (AIME | {"problem_idx": 1}, AIME["problem"] + BOXED, "3", "aime_2026/1", None),
    "math500": (
        {"problem": "$1+1$?", "answer": "2", "unique_id": "test/a.json", "subject": "Algebra"}, "$1+1$?" + BOXED, "2",
        "MATH-500/test/a.json", "Algebra",
    ),
    "gpqa_diamond": (GPQA, f"finish with {STATED}", "A", "gpqa/rec1", None),
    "codeelo": (ELO, ELO_TEXT, None, "CodeElo/1A", None),
    "livecodebench": (LCB, "Question: Add.\n\nRead the inputs from stdin", None, "code_generation_lite/q1", "easy"),
    "longbench_16k": (V1 | {"context": "long"}, "Question: Who?\nAnswer:", '["Ann", "A."]', "LongBench/v1", "musique"),
    "longbench2_30k": (V2 | {"context": "long"}, V2_COT, "C", "LongBench-v2/a1", "short"),
    "longbench2_80k": (V2 | {"context": "long"}, V2_COT, "C", "LongBench-v2/a1", "short"),
    "pg19": ({"short_book_title": "Emma", "text": "long"}, "", None, "pg19-test/Emma", None),
}  # fmt: skip
LONG = {"longbench_16k": 17000, "longbench2_30k": 35000, "longbench2_80k": 90000, "pg19": 20000}


def stand_in(name: str) -> dict:
    text = " word" * LONG.get(name, 0)
    return {key: text if value == "long" else value for key, value in STANDINS[name][0].items()}


def file_name(pattern: str) -> str:
    return pattern.replace("*", "test-0")


@pytest.mark.parametrize("name", STANDINS)
def test_every_benchmark_reads_the_files_of_its_repository(tokenizer, tmp_path, monkeypatch, name):
    """From the Hub in the layout of its repository, then from the same file as one's own: the same prompts, and tasks,
    answers and the authors' words in them. Case F06: parquet and JSON only."""
    config = config_of(f"benchmark={name}")
    source = config["benchmark"]["source"]
    folder = tmp_path / "repo"
    files = [folder / file_name(pattern) for pattern in source["files"]]
    for number, path in enumerate(files):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [stand_in(name) | ({"_id": f"v{number}"} if "_id" in stand_in(name) and number else {})])
    kept = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    few = [f"benchmark={name}", "benchmark.source.rows=null", "benchmark.source.requests=1"]
    with serve(tmp_path, monkeypatch) as fake:
        fake.repos[f"datasets/{source['path']}"] = {**kept, "loader.py": b"raise SystemExit"}
        items, provenance = ask(*few)
        assert not any("loader.py" in path for path in fake.asked)
    _, text, answer, item_id, task = STANDINS[name]
    decoded = tokenizer.decode(items[0].prompt_ids)
    assert text in decoded and items[0].answer == answer
    assert items[0].task == task and provenance["kind"] == "hub" and len(provenance["revision"]) == 40
    assert items[0].id.split("#")[0] in (item_id, f"{item_id}{items[0].id[len(item_id) : -2]}")
    assert decoded.count("<|im_start|>") == (0 if name == "pg19" else 3)
    most = source["limit"] or source["max_tokens"]
    assert source["min_tokens"] <= len(items[0].prompt_ids) <= most and items[0].truncated == (name == "pg19")

    pattern = str(folder / "**" / f"*{files[0].suffix}")
    own, said = ask(*few, "source=local", f"path='{pattern}'")
    assert said["kind"] == "local" and said["template_hash"] == provenance["template_hash"]
    assert own[0].prompt_ids == items[0].prompt_ids and own[0].answer == items[0].answer


def test_every_conf_file_is_known_and_short_ones_build():
    """conf/benchmark holds the files above and those that come with the project."""
    assert sorted([*STANDINS, "pystdlib", "pystdlib_7k", "arithmetic", "shapes"]) == choices("benchmark")
    for name in choices("benchmark"):
        config = config_of(f"benchmark={name}")
        assert config["benchmark"]["name"] == name and make_source(config)


def test_longbench_tasks_have_their_own_prompts(tokenizer, tmp_path):
    """Each task is asked with its authors' words. Case C13."""
    words = {"narrativeqa": "Story:", "qmsum": "Query: Who?\nAnswer:", "gov_report": "Summary:", "hotpotqa": "passages"}
    rows = [V1 | {"_id": task, "dataset": task, "context": "Ann ran. " * 50} for task in words]
    path = write(tmp_path / "tasks.jsonl", rows)
    items, _ = ask("benchmark=longbench_16k", "source=local", f"path={path}", "benchmark.source.min_tokens=1")
    for item, (task, text) in zip(items, words.items(), strict=True):
        assert item.task == task and text in tokenizer.decode(item.prompt_ids)


@pytest.mark.parametrize(("limit", "mark"), [(160, "text"), (161, "text"), (200, "document")])
def test_whole_prompts_are_cut_between_their_marks(tokenizer, tmp_path, limit, mark):
    """A file of whole prompts keeps template, question and choices, and says what was cut. Case C08."""
    choices_text = f"\n</{mark}>\n\nWhich word?\nA. heron\nB. ibis\nC. stork\nD. crane\n\nThink."
    long = f"HEAD\n<{mark}>\nFIRST {'word ' * 400}needle <{mark}> x{' word' * 400} LAST{choices_text}"
    rows = [{"id": "long", "prompt": long, "answer": "B"}, {"id": "short", "prompt": "Why <b>?", "task": "t"}]
    path = write(tmp_path / "prompts.jsonl.gz", rows)
    words = ["benchmark=longbench2_30k", "source=local", f"path={path}", "benchmark.source.min_tokens=1"]
    cut, whole = (ask(*words, *more)[0] for more in ([f"benchmark.source.limit={limit}"], []))
    text = tokenizer.decode(cut[0].prompt_ids)
    assert limit - 4 <= len(cut[0].prompt_ids) <= limit and cut[0].truncated
    assert cut[0].original_tokens == len(whole[0].prompt_ids) > 800
    assert text.count("<|im_start|>") == 3 and text.count("<|im_end|>") == 2
    assert f"HEAD\n<{mark}>\nFIRST word" in text and f"LAST{choices_text}<|im_end|>" in text and "needle" not in text
    assert cut[1] == whole[1] and not cut[1].truncated and cut[1].original_tokens == len(cut[1].prompt_ids)
    assert [(item.id, item.answer, item.task) for item in cut] == [
        ("prompts/long#0", "B", None), ("prompts/short#0", None, "t"),
    ]  # fmt: skip


def test_a_whole_prompt_without_marks_is_never_cut(tmp_path):
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "word " * 300}])
    words = ["benchmark=longbench2_30k", "source=local", f"path={path}", "benchmark.source.min_tokens=1"]
    with pytest.raises(ValueError, match=r"prompts/0 has 3\d\d prompt tokens and no document to cut, .* leave 200"):
        ask(*words, "benchmark.source.limit=200")


def test_missing_fields_are_named(tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"text": "1+1?"}])
    with pytest.raises(ValueError, match="no field 'answer', 'problem', .*it has: text; say .*fields="):
        ask("benchmark=math500", "source=local", f"path={path}")


def test_fields_are_mapped(tokenizer, tmp_path):
    """`fields` names what the template's fields are called in a file; with it the benchmark's template is used."""
    path = write(tmp_path / "mine.jsonl", [{"prompt": "1+1?", "solution": "2", "id": "x"}])
    words = ["benchmark=math500", "source=local", f"path={path}"]
    plain_items, bare = ask(*words)
    assert BOXED not in tokenizer.decode(plain_items[0].prompt_ids) and plain_items[0].answer is None
    fields = "benchmark.source.fields={problem: prompt, answer: solution, unique_id: id, subject: id}"
    items, mapped = ask(*words, fields)
    assert f"1+1?{BOXED}" in tokenizer.decode(items[0].prompt_ids) and items[0].answer == "2"
    assert bare["template_hash"] != mapped["template_hash"]
    with pytest.raises(ValueError, match="no field 'subject', it has: prompt, solution, id"):
        ask(*words, "benchmark.source.fields={problem: prompt, answer: solution, unique_id: id}")


def test_choices_are_shuffled_by_the_row_alone(tokenizer, tmp_path):
    """The right choice stands at the letter that is the answer, at different places, the same for every seed."""
    rows = [GPQA | {"Record ID": f"r{n}"} for n in range(20)]
    path = write(tmp_path / "gpqa.parquet", rows)
    words = ["benchmark=gpqa_diamond", "source=local", f"path={path}"]
    items, _ = ask(*words)
    assert {item.answer for item in items} == set("ABCD")
    for item in items:
        text = tokenizer.decode(item.prompt_ids)
        assert f"({item.answer}) Argon\n" in text
        assert all(text.count(gas) == 1 for gas in ("Neon", "Xenon", "Radon"))
    assert data_hash(ask(*words, "seed=7")[0]) == data_hash(items)


def test_cot_and_thinking_reach_the_prompt(tokenizer, tmp_path):
    """Each changes the template hash; without cot the authors' format is asked for. Cases C11 (c), C13."""
    path = write(tmp_path / "v2.json", [V2 | {"context": "long ago"}])
    words = ["benchmark=longbench2_30k", "source=local", f"path={path}", "benchmark.source.min_tokens=1"]
    items, with_cot = ask(*words)
    plain_items, without = ask(*words, "benchmark.source.cot=false")
    assert V2_COT in tokenizer.decode(items[0].prompt_ids)
    assert f"{V2_TEXT}Format your response as follows: {STATED}" in tokenizer.decode(plain_items[0].prompt_ids)
    assert with_cot["cot"] and not without["cot"]
    assert with_cot["template_hash"] != ask(*words, "benchmark.source.thinking=false")[1]["template_hash"]


def test_dates_select_rows(tmp_path):
    dates = ["2024-07-31T23:00:00", "2024-08-01T00:00:00", "2025-01-31T12:00:00", "2025-02-01T00:00:00"]
    rows = [LCB | {"question_id": date[:10], "contest_date": date} for date in dates]
    items, _ = ask("benchmark=livecodebench", "source=local", f"path={write(tmp_path / 'lcb.jsonl', rows)}")
    assert [item.id.split("/")[1] for item in items] == ["2024-08-01#0", "2025-01-31#0"]


ROWS = [
    {"_id": f"r{index}", "context": "words and more words. " * 20 * index, "question": "What is in {{ braces }}?",
     "choices": ["a", "b"], "answer": index, "note": None}
    for index in range(1, 9)
]  # fmt: skip


def local(path: Path, /, **fields) -> FileBenchmark:
    names = {"document_field": "context", "answer_field": "answer", "id_field": "_id"}
    template = "{{ context }}\n\n{{ question }} \\boxed{}{{ note }}"
    return FileBenchmark(**({"kind": "local", "path": str(path), "template": template} | names | fields))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_local_files_need_no_network(tokenizer, tmp_path, no_sockets, suffix):
    """No offline flag is set, sockets are blocked. Case F05."""
    source = local(write(tmp_path / f"rows, all{suffix}", ROWS), rows=8)
    items, provenance = source.ask(tokenizer, 4096, 64)
    assert [item.id for item in items] == [f"rows, all/r{index}#0" for index in range(1, 9)]
    assert [item.answer for item in items] == [str(index) for index in range(1, 9)]
    assert "What is in {{ braces }}? \\boxed{}<|im_end|>" in tokenizer.decode(items[0].prompt_ids)
    assert provenance["revision"] is None and provenance["rows"] == 8 and len(provenance["sha256"]) == 64
    assert local(source.path, sha256=provenance["sha256"]).build(tokenizer, 4096, 64) == items


def test_a_changed_file_is_read_again(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert len(local(path).build(tokenizer, 4096, 64)) == 8
    write(path, ROWS[:3])
    assert len(local(path).build(tokenizer, 4096, 64)) == 3


def test_window_requests_and_repeats(tokenizer, tmp_path):
    """The number of answers follows repeats (case C14), and rows outside the window are counted."""
    path = write(tmp_path / "rows.jsonl", ROWS)
    window = {"min_tokens": 250, "max_tokens": 600}
    items = local(path, **window, requests=2, repeats=4).build(tokenizer, 4096, 64)
    assert len(items) == 8 and len({item.seed for item in items}) == 8
    assert [item.id.split("#")[1] for item in items] == list("00112233")
    assert all(250 <= len(item.prompt_ids) <= 600 for item in items)
    longer = local(path, **window, requests=2, repeats=5).build(tokenizer, 4096, 64)
    assert longer[:8] == items and len(longer) == 10
    inside, said = local(path, **window).ask(tokenizer, 4096, 64)
    assert (said["measured"], said["asked"]) == (8, len(inside)) and said["shorter"] + said["longer"] + len(inside) == 8
    lists = local(path, requests=1, answer_field="choices")
    assert lists.build(tokenizer, 4096, 64)[0].answer == '["a", "b"]'


def test_short_context_cuts_documents_only(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    items, whole = local(path).build(tokenizer, 264, 64), local(path).build(tokenizer, 4096, 64)
    assert {item.truncated for item in items} == {True, False}
    for cut, full in zip(items, whole, strict=True):
        assert cut.truncated == (len(full.prompt_ids) > 200)
        assert cut.original_tokens == full.original_tokens == len(full.prompt_ids)
        assert 196 <= len(cut.prompt_ids) <= 200 if cut.truncated else cut == full
    assert all("What is in {{ braces }}?" in tokenizer.decode(item.prompt_ids) for item in items)


def test_errors_name_the_fix(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)

    def fails(match: str, context: int = 4096, **fields) -> None:
        with pytest.raises(ValueError, match=match):
            local(path, **fields).build(tokenizer, context, 64)

    fails("has 8 rows, benchmark.source.rows is 30", rows=30)
    fails("has sha256 .*, benchmark.source.sha256 is abc", sha256="abc")
    fails("no field 'problem', it has: _id, context", template="{{ context }}{{ problem }}")
    fails("2 of 8 rows have a prompt of 700 to 900 tokens .6 shorter, 0 longer., requests is 3",
          min_tokens=700, max_tokens=900, requests=3)  # fmt: skip
    fails("no document to cut, the context and limit leave 136", context=200, document_field=None)
    fails("'text' is not a placeholder", document_field="text")
    fails("template, line 1: unexpected", template="{{ context }")
    fails("no such data file: nope.jsonl", path="nope.jsonl")
    fails("min_tokens 9 > max_tokens 8", min_tokens=9, max_tokens=8)
    fails("requests and repeats must be >= 1", repeats=0)
    fails("kind is 'url'; it is hub or local", kind="url")
    fails("cut is 'start'; it is middle or end", cut="start")
    fails("names no file of the data set", kind="hub")
    fails("two rows have the id rows/None", id_field="note")
    fails("several formats", path=f"{tmp_path}/*.json*", rows=write(tmp_path / "rows.json", ROWS) and None)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("rows.jsonl", b'{"context": "a"}\n{"context": ', r"rows.jsonl cannot be read: .*; get the file again"),
        ("rows.jsonl", b"[1]\n", "row 1 is no JSON object"),
        ("rows.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:20], "gz cannot be read: .*; get the file again"),
        ("rows.parquet", b"PAR1", "rows.parquet cannot be read: .*; get the file again"),
        ("rows.jsonl", b"", "holds no rows"),
        ("longbench.py", b"import datasets", "loading scripts are not run: convert it"),
    ],
)  # fmt: skip
def test_damaged_files_and_scripts_are_refused(tokenizer, tmp_path, name, content, match):
    """Case F06: a script-type data set gets a plain message with the alternative."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        local(tmp_path / name).build(tokenizer, 4096, 64)


def test_source_and_path_belong_together():
    for words, match in (
        (["benchmark=aime25", "path=x.jsonl"], "path=x.jsonl is for source=local"),
        (["benchmark=aime25", "source=local"], "source=local needs path=FILE"),
        (["benchmark=pystdlib", "source=local", "path=x.jsonl"], "benchmark=pystdlib reads no files"),
    ):
        with pytest.raises(ValueError, match=match):
            ask(*words)


def test_prompts_are_described_without_a_run(tmp_path, capsys, no_sockets):
    """Rows, window, tokens, cuts and ids are printed; no weights, no network."""
    path = write(tmp_path / "rows.jsonl", [row | {"prompt": f"<text>{row['context']}</text>Who?"} for row in ROWS])
    words = ["benchmark=longbench2_30k", "source=local", f"path={path}", "benchmark.source.min_tokens=200"]
    prompts.main([*words, "benchmark.source.limit=300", "list=true"])
    out = capsys.readouterr().out
    assert re.search(rf"source: {path}, 8 rows, sha256 \w{{12}}\n", out)
    assert re.search(r"window: 200 to 40000 tokens; 8 rows measured, 7 asked, 1 shorter, 0 longer\n", out)
    assert re.search(r"prompts: 7 of 2\d\d to 300 tokens, first ids 1 \d+( \d+){6}\n", out)
    assert re.search(r"cut: 6 of 7, from 3\d\d to 8\d\d to (299 to )?300\n", out)
    assert len(re.findall(r"rows/\d#0: \d+ tokens, cut from \d+\n", out)) == 6


def test_a_local_run_leaves_its_source_in_the_record(tmp_path, no_sockets):
    """Hashes, first ids, tasks, window and cuts of the prompts are in the record; no socket. Cases C10, C13."""
    rows = [{"id": n, "prompt": f"<text>{'word ' * 80 * n}</text>Who?", "task": "t"} for n in (1, 2, 3)]
    words = ["benchmark=longbench2_30k", "source=local", f"path={write(tmp_path / 'rows.jsonl', rows)}"]
    words += ["benchmark.source.min_tokens=1", "benchmark.source.limit=200", "benchmark.max_new_tokens=8", "batch=2"]
    words += ["method=autoregressive", "protocol.window_tokens=12", "protocol.warmup_passes=1", "protocol.repeats=1"]
    config = config_of(*words, "model.tokenizer=embedded") | {"run_id": "test"}
    (record,) = run([config], tmp_path / "out")
    assert record.error is None
    (folder,) = find_records(tmp_path / "out")
    items, provenance = build_items(config, spec_of(config))
    kept = read_record(folder)
    assert (kept.workload.requests, kept.workload.truncated, kept.workload.tasks) == (3, 1, {"t": 3})
    assert kept.workload.first_ids == list(items[0].prompt_ids[:8]) and kept.workload.first_ids.count(1) == 1
    assert kept.workload.template_hash == provenance["template_hash"] and kept.workload.data_hash == data_hash(items)
    assert kept.workload.original_tokens.max == items[2].original_tokens > kept.workload.prompt_tokens.max
    assert kept.protocol["source"] == provenance and kept.protocol["source"]["files"][0]["name"] == "rows.jsonl"
    before = {item.id: item.original_tokens for item in items if item.truncated}
    for line in read_requests(folder):
        assert line.original_tokens == before.get(line.id.split("~")[0])
