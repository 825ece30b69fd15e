"""Do README, architecture page and baselines table speak of things that exist, and does the code they show run?"""

import importlib.util
import re
import shlex
import sys
from types import ModuleType

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tiny import tiny_model

import aspire.model
from aspire.engine import Engine
from aspire.policies import Method, Selection
from aspire.request import Request
from aspire.settings import EngineSettings
from experiments import simulate
from experiments.bench_gpu import OWN, SUITES
from experiments.config import CONF, check_overrides, choices, register, split

ROOT = CONF.parent
README = (ROOT / "README.md").read_text()
LONGEST_README = 200  # lines
PAGES = ["README.md", "docs/architecture.md", "baselines/README.md", "results/LOG.md"]
PATH = re.compile(r"(?:aspire|baselines|conf|docs|experiments|results|scripts|tests)/[\w/.-]*\w")
COMMANDS = "make lint bench-kernels ARGS"  # words of commands that stand in no source file
SCRIPTS = {path.name: path.read_text() for path in sorted((ROOT / "scripts").glob("*.sh"))}
SWEEPS = [name for name, text in SCRIPTS.items() if "experiments.run -m" in text]


def blocks(language: str) -> list[str]:
    """Fenced blocks of the README."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """(module, arguments) of every `python -m` line of the README."""
    lines = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    return [(words[2], words[3:]) for words in lines if words[:2] == ["python", "-m"]]


def tree() -> list[str]:
    """Every path of the README's tree; names after a folder lie in it."""
    found, folder = [], ""
    for line in blocks("text")[0].splitlines():
        folder = line.split()[0] if not line.startswith(" ") else folder
        found += [folder, *re.findall(r"\b\w+/\w+\.py\b", line)]
        if folder.endswith("/"):
            inside = [word for word in re.findall(r"[\w.]+", line) if word.endswith((".py", ".md"))]
            found += [folder + word for word in inside]
            found += [folder + word for word in re.findall(r"\w+", line) if folder == "conf/" and word in GROUPS]
    return found


GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}


def test_the_tree_names_what_exists_and_leaves_nothing_out() -> None:
    named = set(tree())
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    rooms = [ROOT / room for room in ("aspire", "baselines", "experiments")]
    files = {str(path.relative_to(ROOT)) for room in rooms for path in room.rglob("*.py") if path.name != "__init__.py"}
    assert files - named == set()
    assert {f"conf/{group}" for group in GROUPS} <= named


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page: str) -> None:
    """Paths in backticks, and the targets of links and images. The method that README adds is not there yet."""
    text = (ROOT / page).read_text()
    named = [path for code in re.findall(r"`([^`\n]+)`", text) for path in PATH.findall(code)]
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = {path for path in named if "every_other" not in path and not list(ROOT.glob(path))}
    generated = {"results/figures/fig1", "results/figures/timeline", "results/tables/fig1", "runs/fig1-"}
    upstream = {"tests/StreamingLLM", "tests/SnapKV"}  # MagicDec's
    assert missing - generated - upstream == set()
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_pages_have_no_open_numbers() -> None:
    assert [page for page in PAGES if "<<NUMBER" in (ROOT / page).read_text()] == []


@pytest.mark.parametrize("number", range(len(commands())))
def test_commands_take_the_overrides_shown(number: int) -> None:
    module, words = commands()[number]
    assert importlib.util.find_spec(module) is not None
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(words)
        for listed in re.findall(r"comparison\.methods=\[(.*?)\]", " ".join(words)):
            assert set(listed.split(",")) <= set(choices("method"))


@pytest.mark.parametrize("script", SWEEPS)
def test_sweeps_name_options_that_exist(script: str) -> None:
    """A list like `models=a,b` or `methods=[a,b]` holds options of the group `model` or `method`."""
    lists = re.findall(r"^(\w+)s=\[?([\w,]+)\]?$", SCRIPTS[script], flags=re.MULTILINE)
    assert lists
    assert [value for name, values in lists for value in values.split(",") if value not in choices(name)] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_name_files_that_exist(script: str) -> None:
    assert SWEEPS
    assert [path for path in PATH.findall(SCRIPTS[script]) if not (ROOT / path).exists()] == []


def test_make_arguments_are_overrides() -> None:
    """`make bench-gpu` and `make simulate` have words of their own beside them."""
    shown = re.findall(r'`(?:make ([\w-]+) [^`]*?)?ARGS="([^"]+)"', README)
    assert shown
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for target, arguments in shown:
            words = arguments.split()
            if target == "bench-gpu":
                own, words = split(words, OWN)
                assert own["suite"] in SUITES
            if target == "simulate":
                own, words = split(words, simulate.OWN)
                assert simulate.card_of(own["card"]) and own["model"] in choices("model")
            check_overrides(words)


def test_the_gpu_section_names_every_suite() -> None:
    (section,) = re.findall(r"^## On a GPU\n(.*?)^## ", README, flags=re.MULTILINE | re.DOTALL)
    assert [suite for suite in SUITES if f"`{suite}`" not in section and f"suite={suite}" not in section] == []


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LONGEST_README


def test_architecture_names_what_the_code_names() -> None:
    """Every word of a name in backticks stands somewhere in the sources: a renamed function shows here."""
    rooms = ("aspire", "baselines", "experiments", "conf")
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".yaml")]
    known = set(re.findall(r"\w+", " ".join([*(path.read_text() for path in files), *map(str, files)])))
    page = re.sub(r"^```.*?^```", "", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    spoken = re.findall(r"`([^`\n]+)`", page)
    names = {word for code in spoken for word in re.findall(r"\w{2,}", code)} - set(re.findall(r"\w+", COMMANDS))
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")}
    assert names - known - tests == set()


def test_every_test_file_has_its_row() -> None:
    rows = set(re.findall(r"`(\w+\.py)`", (ROOT / "tests/README.md").read_text()))
    assert {path.name for path in (ROOT / "tests").glob("*.py")} == rows


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small stand-in for the embedded model, with the embedded tokenizer."""
    (code,) = [block for block in blocks("python") if "Engine(" in block]
    monkeypatch.setattr(aspire.model, "load", lambda source: tiny_model(layers=3, vocab=49152))
    found: dict = {}
    exec(compile(code, "README.md", "exec"), found)
    assert len(found["request"].output_ids) == 32 and found["request"].rounds
    assert str(found["request"].rounds) in capsys.readouterr().out


def test_the_method_example_is_exact_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two files of README, loaded as if they lay where it says: at most 20 lines, the text of plain decoding."""
    (code,) = [block for block in blocks("python") if "EveryOther" in block]
    (conf,) = map(yaml.safe_load, blocks("yaml"))
    assert len(code.splitlines()) <= 20
    module = ModuleType("baselines.every_other")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "every_other.py", "exec"), module.__dict__)
    method = instantiate(method_node(conf))
    assert isinstance(method, Method) and isinstance(method.selection, Selection)
    model = tiny_model(vocab=31)
    ids = torch.randint(31, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = []
    for each in (Method(), method):
        request = Request("a", ids, max_new_tokens=40)
        Engine(model, EngineSettings(slots=1, max_len=256, poison=True), each).generate([request])
        texts.append(request.output_ids)
    assert texts[0] == texts[1]
    assert sum(drafted for drafted, _ in request.rounds) > 0


def method_node(conf: dict) -> dict:
    """The method's YAML with its parts filled in from conf/method, as Hydra does."""
    parts = {key: value for part in conf["defaults"] if part != "_self_" for key, value in part.items()}
    with initialize_config_dir(str(CONF / "method"), version_base="1.3"):
        filled = {group: compose(f"{group}/{name}")[group] for group, name in parts.items()}
    return filled | {key: value for key, value in conf.items() if key not in ("defaults", "label")}
