"""Which texts count as right, wrong, unparsable or unfinished, and are LongBench's scores those of its authors?"""

import json
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from aspire.model import load_tokenizer
from aspire.request import Request
from experiments.benchmarks import Arithmetic, Item
from experiments.config import CONF, choices, plain, register
from experiments.grading import answer_text, grade, opens_thinking
from experiments.scoring import Choice, Integer, LongBench, Maths, Program, Scorer, judge
from experiments.scoring import longbench as lb
from experiments.scoring.answers import boxes
from experiments.scoring.scorer import answer_of

AIME = Integer(0, 999)


def item(answer: str | None, task: str | None = None, classes: tuple[str, ...] = (), name: str = "x#0") -> Item:
    return Item(name, (1,), answer, 1, False, 1, task, classes)


def verdict(scorer: Scorer, text: str, answer: str, cut: bool = False, thinking: bool = False) -> tuple[str, float]:
    found = judge(scorer, item(answer), text, cut, thinking)
    return found.outcome, found.score


RIGHT, WRONG = ("answered", 1.0), ("answered", 0.0)
UNPARSABLE, UNFINISHED = ("unparsable", 0.0), ("unfinished", 0.0)


@pytest.mark.parametrize(
    ("text", "answer", "want"),
    [
        (r"so the answer is \boxed{70}.", "70", RIGHT),
        (r"\boxed{1}, no: \boxed{70}", "70", RIGHT),  # models correct themselves
        (r"\boxed{070}", "70", RIGHT),
        (r"\boxed{70}", "070", RIGHT),
        (r"$\boxed{m+n = 70}$ and 3 checks", "70", RIGHT),
        (r"\boxed{70^\circ}", "70", RIGHT),
        (r"\boxed{70\text{ cm}^2}", "70", RIGHT),
        (r"\boxed{\mathbf{70}}", "70", RIGHT),
        (r"\fbox{70}", "70", RIGHT),
        (r"put it within \boxed{}: the answer is 70.", "70", RIGHT),
        ("The final answer is **70**. I checked 3 cases.", "70", RIGHT),
        ("First 3, then 70", "70", RIGHT),
        (r"\boxed{\frac{70}{3}}", "70", WRONG),
        (r"\boxed{(70, 70)}", "70", WRONG),
        (r"\boxed{1,070}", "70", WRONG),
        (r"\boxed{-70}", "70", WRONG),
        (r"\boxed{70.5}", "70", WRONG),
        ("It is 70, or rather 71", "70", WRONG),
        (r"\boxed{" + "7" * 5000 + "}", "70", WRONG),  # a text that repeats a digit for ever
        ("I do not know.", "70", UNPARSABLE),
        ("", "70", UNPARSABLE),
        (r"\boxed{x}", "70", UNPARSABLE),
    ],
)
def test_aime_wants_a_whole_number(text: str, answer: str, want: tuple[str, float]) -> None:
    assert verdict(AIME, text, answer) == want


def test_the_answer_follows_the_thinking() -> None:
    texts = {"12</think> 34": " 34", "<think>12</think>34": "34", "<think>12": None, "12": "12"}
    assert {text: answer_of(text, False) for text in texts} == texts


def test_a_problem_is_answered_by_its_last_number() -> None:
    for text in ("3 + 4 = 7. The answer is 7.", "first 9, so 7.0", "10-7", "<think>8</think> The answer is 7."):
        assert verdict(Integer(), text, "7") == RIGHT, text
    for text in ("$1,007.00", "it is -7", "7 of 8", "no number", "", "<think>7</think> It is 8.", "<think>so far 7"):
        assert verdict(Integer(), text, "7") != RIGHT, text
    assert verdict(Integer(), "that is 12,345,678 metres", "12345678") == RIGHT


def test_an_answer_that_was_cut_counts_only_where_it_was_stated() -> None:
    """The last number of a cut text is one on the way; a number cut in its middle is not the number."""
    assert verdict(AIME, "so 12 + 58 = 70", "70", cut=True) == UNFINISHED
    assert verdict(AIME, "the answer is 70", "70", cut=True) == UNFINISHED  # it might have become 701
    assert verdict(AIME, r"hence \boxed{70", "70", cut=True) == UNFINISHED
    assert verdict(AIME, r"hence \boxed{70}. Let us che", "70", cut=True) == RIGHT
    assert verdict(AIME, "the answer is 70. Let us che", "70", cut=True) == RIGHT
    assert verdict(Maths(), "so $x = 70$", "70", cut=True) == UNFINISHED
    assert verdict(Choice(), "B", "B", cut=True) == UNFINISHED
    assert verdict(Choice(), "The correct answer is (B) bec", "B", cut=True) == RIGHT


@pytest.mark.parametrize("scorer", [AIME, Maths()], ids=["integer", "maths"])
def test_answers_inside_thinking_do_not_count(scorer: Scorer) -> None:
    """C11: (a) after the block counts; (b) cut before its end is unfinished, also where the prompt opened the block."""
    assert verdict(scorer, r"<think>so \boxed{12}</think> \boxed{34}", "34") == RIGHT
    assert verdict(scorer, r"<think>so \boxed{12}</think> \boxed{34}", "12") == WRONG
    assert verdict(scorer, r"so \boxed{12}</think> \boxed{34}", "34", thinking=True) == RIGHT
    for text, thinking in ((r"<think>so \boxed{12}, and", False), (r"so \boxed{12}, and", True)):
        assert verdict(scorer, text, "12", cut=True, thinking=thinking) == UNFINISHED
        assert verdict(scorer, text, "12", cut=False, thinking=thinking) == UNPARSABLE
    assert verdict(scorer, r"<think>a</think>\boxed{12}<think>b", "12", cut=True) == UNFINISHED
    assert verdict(scorer, r"so \boxed{12}", "12", cut=True) == RIGHT  # (c) no thinking in prompt or text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{(3,\pi/2)}", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{Evelyn}", r"\text{Evelyn}"),
        (r"\boxed{\text{(C)}}", r"\text{(C)}"),
        (r"\boxed{11111100}", r"11,\! 111,\! 100"),
        (r"\boxed{\left[-2,7\right]}", r"[-2,7]"),
        (r"first \boxed{4}, then \boxed{\frac{\{1\}}{2}+\frac12}", "1"),
        ("The answer is $1/2$.", r"\frac{1}{2}"),
    ],
)
def test_maths_compares_by_value(text: str, answer: str) -> None:
    assert verdict(Maths(), text, answer) == RIGHT


def test_maths_tells_wrong_from_unparsable() -> None:
    assert verdict(Maths(), r"\boxed{\frac{1}{3}}", r"\frac{1}{2}") == WRONG
    assert verdict(Maths(), r"\boxed{Eve}", r"\text{Evelyn}") == WRONG
    assert verdict(Maths(), "no formula here", r"\frac{1}{2}") == UNPARSABLE


def test_boxes_balance_their_braces() -> None:
    assert list(boxes(r"\boxed{\frac{1}{2}} \boxed {a\{b} \boxed{open {1}")) == [r"\frac{1}{2}", r"a\{b"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The correct answer is (B)", "B"),
        ("The correct answer is B because A is too small", "B"),
        ("**The correct answer is (B)**.", "B"),
        ("The correct answer is **B**.", "B"),
        ("Answer: $B$", "B"),
        ("Answer: B", "B"),
        ("the answer is A because of it", "A"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        ("The answer is (A). Wait: the correct answer is (B), since (A) is too small.", "B"),
        ("The correct option is (B)", "B"),
        ("Let me think.\n(B)", "B"),
        ("B", "B"),
        ("B) both of them", "B"),
        ("The answer is a matter of taste", None),
        ("The answer is A matter of taste", None),
        ("The correct answer is (E)", None),
        ("I like Bananas", None),
        ("Answers vary. A good one is hard to find", None),
        ("", None),
    ],
)
def test_a_choice_is_the_letter_that_is_stated(text: str, want: str | None) -> None:
    assert Choice().find(text, None, False) == want


def test_a_choice_is_judged_against_letters() -> None:
    """GPQA and LongBench-v2: the reference is the letter under which the right choice was shown."""
    assert verdict(Choice(), "The correct answer is (C)", "(C)") == RIGHT
    assert verdict(Choice(), "The correct answer is (D)", "C") == WRONG
    assert not Choice().judges(item("a summary of the meeting")) and not Choice().judges(item(None))
    assert Choice("ABCDEFGHIJ").judges(item("J"))


# What metrics.py of LongBench gives for these, with rouge 1.0.1 and fuzzywuzzy 0.18.0.
@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "want"),
    [
        (lb.qa_f1, "The Eiffel Tower, in Paris!", "eiffel tower", 2 / 3),
        (lb.qa_f1, "a the an", "the", 0.0),
        (lb.qa_f1, "red red blue", "red blue blue", 2 / 3),
        (
            lb.rouge_l,
            "The cat sat on the mat. It was a black cat.",
            "A black cat lay on the mat. The mat was red.",
            0.7,
        ),
        (lb.rouge_l, "", "a b", 0.0),
        (lb.rouge_l, "...", "a b", 0.0),
        (lb.count, "There are 7 of 20", "7", 0.5),
        (lb.count, "seven", "7", 0.0),
        (lb.retrieval, "Paragraph 3, or Paragraph 12", "Paragraph 12", 0.5),
        (lb.retrieval, "段落3", "段落3", 1.0),
        (lb.code_similarity, "```python\n# a comment\nreturn self.x + 1\nelse:", "return self.x", 0.87),
        (lb.code_similarity, "# only a comment", "x", 0.0),
    ],
)
def test_longbench_metrics(metric: lb.Metric, prediction: str, reference: str, want: float) -> None:
    assert metric(prediction, reference, ()) == pytest.approx(want, abs=1e-7)


def test_longbench_classes() -> None:
    """Every other class that is named divides the score, one that is a part of the right one does not."""
    classes = ("Food", "Other food", "City", "Number")
    assert lb.classification("City", "City", classes) == 1
    assert lb.classification("City or Number", "City", classes) == 0.5
    assert lb.classification("Other food", "Other food", ("food", "Other food")) == 1
    assert lb.classification("Animal", "City", classes) == 0


def test_longbench_takes_the_metric_of_the_task_and_the_best_reference() -> None:
    several = json.dumps(["in Rome", "Paris"])
    assert judge(LongBench(), item(several, "hotpotqa"), "Paris", False).score == 1
    assert judge(LongBench(), item("Paris", "hotpotqa"), "Paris", False).score == 1
    assert judge(LongBench(), item('["7"]', "passage_count"), "7 7 8", False).score == pytest.approx(2 / 3)
    # Few-shot tasks: only the first line is the answer.
    assert judge(LongBench(), item('["Paris"]', "triviaqa"), "\nParis\nQuestion: which", False).score == 1
    assert judge(LongBench(), item('["Paris"]', "hotpotqa"), "\nParis\nQuestion: which", False).score < 1
    assert judge(LongBench(), item('["City"]', "trec", ("City", "Food")), "City\nFood", False).score == 1


def test_longbench_scores_cut_answers_as_its_authors_do() -> None:
    cut = judge(LongBench(), item('["a long report on trade"]', "gov_report"), "a long report", True)
    assert cut.outcome == "answered" and cut.score > 0.7
    assert judge(LongBench(), item('["x"]', "gov_report"), " \n", True).outcome == "unfinished"
    assert judge(LongBench(), item('["x"]', "gov_report"), " \n", False).outcome == "unparsable"


def test_longbench_leaves_what_it_cannot_judge() -> None:
    assert not LongBench().judges(item('["x"]', "dureader"))  # by Chinese words
    assert not LongBench().judges(item('["x"]', None))
    assert not LongBench().judges(item('["x"]', "trec"))  # without its classes
    assert LongBench().judges(item('["x"]', "trec", ("x",)))


JUDGE = """import json, sys
asked = json.load(sys.stdin)
if asked["id"] == "broken#0":
    print("no tests for it", file=sys.stderr)
    sys.exit(2)
space = {}
exec(asked["code"], space)
sys.exit(0 if space["f"](2) == int(asked["answer"]) else 1)
"""


def test_programs_are_judged_by_a_command_and_by_nothing_else(tmp_path: Path) -> None:
    """The last closed block is handed over; an open one is no answer; a judge that fails is an error, not a score."""
    (tmp_path / "judge.py").write_text(JUDGE)
    scorer = Program([sys.executable, str(tmp_path / "judge.py")], timeout_s=30)
    good, bad = "```python\ndef f(x):\n    return x + 2\n```", "```\ndef f(x):\n    return x\n```"
    assert verdict(scorer, f"{bad}\nbetter:\n{good}\n", "4") == RIGHT
    assert verdict(scorer, bad, "4") == WRONG
    assert verdict(scorer, "```python\ndef f(x):", "4", cut=True) == UNFINISHED
    assert verdict(scorer, "I cannot.", "4") == UNPARSABLE
    with pytest.raises(ValueError, match="left with 2 for broken#0: no tests for it"):
        scorer.score("x = (", item("4", name="broken#0"))
    slow = Program([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)
    assert verdict(slow, good, "4") == WRONG


@pytest.mark.parametrize("command", [[], "python judge.py"])
def test_a_command_is_a_list_of_words(command: list[str] | str) -> None:
    with pytest.raises(ValueError, match="list of words"):
        Program(command)


def test_a_command_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="no-such-judge"):
        Program(["no-such-judge"])


def test_every_scoring_option_makes_a_scorer() -> None:
    """Each file of conf/benchmark/scoring instantiates; each benchmark says how it is scored, or null."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for name in choices("benchmark/scoring"):
            words = ["benchmark.scoring.command=[python]"] if name == "program" else []
            made = plain(compose("config", ["benchmark=math500", f"benchmark/scoring={name}", *words, "output_dir=."]))
            assert isinstance(instantiate(made["benchmark"]["scoring"]), Scorer)
        conf = {
            name: plain(compose("config", [f"benchmark={name}", "output_dir=."]))["benchmark"]["scoring"]
            for name in choices("benchmark")
            if name != "shapes"
        }
    made = {name: instantiate(node) if node else None for name, node in conf.items()}
    assert made["aime24"] == made["aime25"] == made["aime26"] == AIME
    assert made["math500"] == Maths() and made["longbench_16k"] == LongBench() and made["arithmetic"] == Integer()
    assert made["gpqa_diamond"] == made["longbench2_30k"] == made["longbench2_80k"] == Choice()
    unscored = {"codeelo", "livecodebench", "pg19", "pystdlib", "pystdlib_7k"}
    assert {name for name, scorer in made.items() if scorer is None} == unscored


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("embedded")


def test_answers_of_requests_are_graded_without_their_end_id(tokenizer) -> None:
    """By id; a request that the window cut has no verdict; an item without a reference has none either."""
    items = Arithmetic(4).build(tokenizer, 8192, 64)
    lacking = Item(**{**items[3].__dict__, "answer": None})
    end = tokenizer.eos_token_id

    def request(i: int, text: str, reason: str | None) -> Request:
        ids = tokenizer(text)["input_ids"] + ([end] if reason == "stop" else [])
        return Request(items[i].id, [1], end_ids=(end,), output_ids=ids, finish_reason=reason)

    said = [f"So the answer is {x.answer}." for x in items]
    requests = [
        request(0, said[0], "stop"), request(1, "We add 5 and", "length"), request(2, said[2], None),
        request(3, said[3], "stop"),
    ]  # fmt: skip
    assert answer_text(tokenizer, requests[0]) == said[0]
    found = grade(requests, [*items[:3], lacking], Integer(), tokenizer)
    assert {name: (x.outcome, x.score, x.found) for name, x in found.items()} == {
        items[0].id: ("answered", 1.0, items[0].answer),
        items[1].id: ("unfinished", 0.0, None),
    }


def test_a_prompt_that_opens_thinking_is_seen(tokenizer) -> None:
    """Templates that end in `<think>` open it; those that switch thinking off close it again."""

    def opened(text: str) -> bool:
        return opens_thinking(tokenizer, tokenizer(text)["input_ids"])

    assert opened("<|im_start|>assistant\n<think>\n")
    assert not opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opened("<|im_start|>assistant\n")


def test_every_aime_answer_can_be_judged() -> None:
    """0 to 999, also with leading zeros; what lies outside is no reference."""
    answers = [f"{n:03d}" for n in range(0, 1000, 37)]
    assert all(AIME.judges(item(x)) and verdict(AIME, rf"\boxed{{{int(x)}}}", x) == RIGHT for x in answers)
    assert not AIME.judges(item("1000")) and not AIME.judges(item("one"))
