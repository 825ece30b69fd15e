"""Which real long prompts can be had without a download? Python's own standard library, and questions about it.

Each request gets its own module as the document, with further modules appended until the target length is passed; the
document is then cut at its end to the token. The question names a class or function that is complete in what is left.
"""

import ast
import os
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .item import Item, count_tokens, cut_end, encode_chat, fit_document, request_seed, room_for_prompt

# Tests, tables and other people's packages are not the kind of text a user asks about.
_SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "idle_test", "encodings", "lib2to3", "pydoc_data", "turtledemo", "ensurepip",
    "site-packages", "dist-packages", "__phello__", "__pycache__",
}  # fmt: skip
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
_MIN_CHARACTERS = 2000
# Shorter classes and functions (an empty exception class) leave nothing to explain.
_MIN_SUBJECT = 300
# Beyond these a file is data with Python syntax (token tables, codec maps, packed strings).
_MAX_LINE = 400
_MAX_STRING = 8000
_MAX_ELEMENTS = 200
# Tokens set aside for a long name in the question when looking for subjects that survive the cut.
_NAME_ROOM = 64


@dataclass(frozen=True)
class _Module:
    name: str
    source: str
    subjects: tuple[tuple[str, int], ...]  # (instruction, character where the class or function ends)


@dataclass(frozen=True)
class PyStdlib:
    """`requests` prompts of `prompt_tokens` tokens (up to 8 fewer), each about a different module."""

    requests: int
    prompt_tokens: int
    seed: int = 123

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    def build(self, tokenizer: PreTrainedTokenizerBase, context: int, max_new_tokens: int) -> list[Item]:
        """Raises ValueError if prompt and answer do not fit the context or there are too few modules."""
        if self.prompt_tokens > room_for_prompt(context, max_new_tokens):
            raise ValueError(
                f"prompt_tokens {self.prompt_tokens} + max_new_tokens {max_new_tokens} > context {context}: "
                "lower one of the two or take a model with a longer context"
            )
        rng = random.Random(self.seed)
        walk = _modules(rng)
        leads = list(islice(walk, self.requests))
        if len(leads) < self.requests:
            raise ValueError(f"requests is {self.requests}, the standard library has {len(leads)} suitable modules")
        fill = chain(walk, cycle(leads))  # text repeats only after the whole library was used
        return [self._item(tokenizer, lead, fill, rng) for lead in leads]

    def _item(
        self, tokenizer: PreTrainedTokenizerBase, lead: _Module, fill: Iterator[_Module], rng: random.Random
    ) -> Item:
        document = _document(tokenizer, lead, fill, self.prompt_tokens)
        instruction = _instruction(tokenizer, lead, document, self.prompt_tokens, rng)
        ids, truncated, original = fit_document(
            lambda text: _render(tokenizer, text, instruction), document, self.prompt_tokens, cut_end
        )
        name = f"pystdlib/{lead.name}"
        return Item(f"{name}#0", tuple(ids), None, request_seed(self.seed, name, 0), truncated, original)


def _render(tokenizer: PreTrainedTokenizerBase, document: str, instruction: str) -> list[int]:
    return encode_chat(
        tokenizer,
        f"Here is source code of Python's standard library.\n\n```python\n{document}\n```\n\n{instruction}",
    )


def _header(name: str) -> str:
    return f"# module {name}\n"


def _document(tokenizer: PreTrainedTokenizerBase, lead: _Module, fill: Iterator[_Module], target: int) -> str:
    """Whole modules, the lead first, with more than `target` tokens: the template then always forces a cut."""
    pieces = [_header(lead.name) + lead.source]
    tokens = count_tokens(tokenizer, pieces[0])
    # The margin covers tokens that merge where two modules meet.
    while tokens <= target + len(pieces):
        module = next(fill)
        pieces.append(_header(module.name) + module.source)
        tokens += count_tokens(tokenizer, pieces[-1])
    return "\n\n".join(pieces)


def _instruction(
    tokenizer: PreTrainedTokenizerBase, lead: _Module, document: str, target: int, rng: random.Random
) -> str:
    """A question about the module, or about a class or function of it that the cut will leave whole."""
    summary = f"Summarise the module `{lead.name}`: what it is for, how it is organised and how to use it. Be thorough."
    room = target - len(_render(tokenizer, "", summary)) - _NAME_ROOM
    reach = max(room, 0) * 5  # more characters a token than source code has
    while reach > 0 and count_tokens(tokenizer, document[:reach]) > room:
        reach = int(reach * 0.85)
    offset = len(_header(lead.name))
    return rng.choice([summary, *(text for text, end in lead.subjects if offset + end <= reach)])


def _modules(rng: random.Random) -> Iterator[_Module]:
    """Suitable modules in the seed's order, read one at a time: parsing all of them takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root).as_posix() for path in _files(root))
    rng.shuffle(names)
    for name in names:
        module = _read(root / name, name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if module is not None:
            yield module


def _files(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not _skipped(name)]  # pruned early: site-packages can be huge
        yield from (Path(folder, name) for name in files if name.endswith(".py") and not _skipped(name))


def _skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)


def _read(path: Path, name: str) -> _Module | None:
    """The module, or None for a file that is unreadable, too small or data."""
    try:
        with tokenize.open(path) as file:  # honours the file's own encoding line
            source = file.read()
        lines = source.split("\n")  # not splitlines: ast does not count form feeds as line ends
        if len(source) < _MIN_CHARACTERS or max(map(len, lines)) > _MAX_LINE:
            return None
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    if any(map(_is_table, ast.walk(tree))):
        return None
    return _Module(name, source, _subjects(tree, name, lines))


def _is_table(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return len(text) > _MAX_STRING
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements) | ast.Dict(keys=elements):
            return len(elements) > _MAX_ELEMENTS
    return False


def _subjects(tree: ast.Module, name: str, lines: list[str]) -> tuple[tuple[str, int], ...]:
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(line) + 1)
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            text = f"Explain what the class `{node.name}` of the module `{name}` does, method by method. Be thorough."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = f"Write documentation for the function `{node.name}` of the module `{name}`, with examples."
        else:
            continue
        end = ends[node.end_lineno]
        if end - ends[node.lineno - 1] >= _MIN_SUBJECT:
            found.append((text, end))
    return tuple(found)
