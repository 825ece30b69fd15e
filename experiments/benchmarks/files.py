"""How do rows of parquet or JSON files become prompts? Rendered, measured, cut where allowed, and counted.

Rows are kept when their whole prompt, chat template included, has min_tokens to max_tokens of the model's own tokens. A
prompt longer than `limit`, or than the context leaves room for, is cut inside its document and nowhere else.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from .item import Item, cut_end, cut_middle, encode_chat, fit_document, request_seed, room_for_prompt
from .rows import Row, Rows, read_rows
from .template import LETTER, PROMPT, Template, names_in, plain_text, view_of

WHOLE = (PROMPT, "answer", "id", "task")  # fields of a row that is a whole prompt
_CUTS = {"middle": cut_middle, "end": cut_end}
CLASSES = "all_classes"  # LongBench: what a classification chooses from


@dataclass
class Measured:
    """Rows that were rendered and counted while enough in the window were sought."""

    rows: int = 0
    shorter: int = 0
    longer: int = 0


@dataclass(frozen=True)
class FileBenchmark:
    """Rows of files and the template that turns one into a prompt; conf/benchmark/source/files.yaml has each field.

    Rows of local files that lack the template's fields but have `prompt` are asked as they are: their `id`, `answer`
    and `task` are used where present, `shuffled` and `between` do not apply, and the document lies between
    document_marks.
    """

    path: str
    template: str
    kind: Literal["hub", "local"] = "hub"
    files: Sequence[str] = ()
    revision: str = "main"
    rows: int | None = None
    sha256: str | None = None
    fields: Mapping[str, str] | None = None
    cot: bool = False
    chat: bool = True
    thinking: bool | None = None
    answer_field: str | None = None
    id_field: str | None = None
    task_field: str | None = None
    shuffled: Sequence[str] = ()
    between: Mapping[str, Sequence[str]] | None = None
    document_field: str | None = None
    document_marks: Sequence[Sequence[str]] | None = None
    min_tokens: int = 1
    max_tokens: int | None = None
    limit: int | None = None
    cut: Literal["middle", "end"] = "middle"
    requests: int | None = None
    repeats: int = 1
    seed: int = 123

    def __post_init__(self) -> None:
        if self.kind not in ("hub", "local"):
            raise ValueError(f"benchmark.source.kind is {self.kind!r}; it is hub or local")
        if self.kind == "local" and not self.path:
            raise ValueError("source=local needs path=FILE: a .jsonl, .jsonl.gz, .json or .parquet file")
        if self.kind == "hub" and not self.files:
            raise ValueError(f"benchmark.source.files names no file of the data set {self.path}")
        if self.cut not in _CUTS:
            raise ValueError(f"benchmark.source.cut is {self.cut!r}; it is middle or end")
        if self.document_field is not None and self.document_field not in names_in(self.template):
            raise ValueError(f"document_field {self.document_field!r} is not a placeholder of the template")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}: no prompt can match")
        if self.repeats < 1 or (self.requests is not None and self.requests < 1):
            raise ValueError(f"requests and repeats must be >= 1, got {self.requests} and {self.repeats}")

    def read(self) -> Rows:
        """The rows of the files, all of them. Raises ValueError if they are not those that rows and sha256 state."""
        found = read_rows(self.kind, self.path, self.files, self.revision, self._wanted())
        where = f"{self.path} (revision {found.revision})" if found.revision else self.path
        if self.rows is not None and len(found.rows) != self.rows:
            raise ValueError(
                f"{where} has {len(found.rows)} rows, benchmark.source.rows is {self.rows}: pin the revision that "
                "was meant, or correct rows"
            )
        if self.sha256 is not None and found.sha256 != self.sha256:
            raise ValueError(
                f"{where} has sha256 {found.sha256}, benchmark.source.sha256 is {self.sha256}: it is other data; pin "
                "the revision that was meant, or correct sha256"
            )
        return found

    def build(self, tokenizer: PreTrainedTokenizerBase, context: int, max_new_tokens: int) -> list[Item]:
        """The prompts of `ask`."""
        return self.ask(tokenizer, context, max_new_tokens)[0]

    def ask(
        self, tokenizer: PreTrainedTokenizerBase, context: int, max_new_tokens: int
    ) -> tuple[list[Item], dict[str, Any]]:
        """All rows once, then all again for every repeat; beside them what a record keeps of the source.

        context: tokens of the model. Raises ValueError if the source cannot be read, if it has other rows or fields
        than the config says, if too few prompts lie in the window, or if one is too long and has no document to cut.
        """
        found = self.read()
        asked = self._as_prompts() if self._holds_prompts(found) else self
        asked._check_fields(found)
        room = room_for_prompt(context, max_new_tokens)
        room = room if self.limit is None else min(room, self.limit)
        chosen, measured = asked._chosen(tokenizer, found)
        names = _distinct(asked._row_id(found, number, row) for number, row in chosen)
        once = [
            asked._item(tokenizer, name, asked._view(row, name), room)
            for name, (_, row) in zip(names, chosen, strict=True)
        ]
        items = [
            replace(item, id=f"{item.id}#{repeat}", seed=request_seed(self.seed, item.id, repeat))
            for repeat in range(self.repeats)
            for item in once
        ]
        return items, asked._provenance(found, measured, len(once))

    def _provenance(self, found: Rows, measured: Measured, chosen: int) -> dict[str, Any]:
        """revision: the commit, None for local files. measured, shorter, longer: rows in the search for the window."""
        return {
            "kind": self.kind, "path": self.path, "revision": found.revision, "rows": len(found.rows),
            "sha256": found.sha256, "files": [asdict(file) for file in found.files], "asked": chosen,
            "measured": measured.rows, "shorter": measured.shorter, "longer": measured.longer,
            "window": [self.min_tokens, self.max_tokens], "template": self.template, "cot": self.cot,
        }  # fmt: skip

    def _holds_prompts(self, found: Rows) -> bool:
        """Whether the rows are whole prompts: they lack what the template reads and have `prompt`."""
        known = {*found.names, *(self.fields or ())}
        return self.kind == "local" and PROMPT in known and not self._needed() <= known

    def _check_fields(self, found: Rows) -> None:
        """Raises ValueError for a field that the files lack."""
        named = () if self._whole else (self.answer_field, self.id_field, self.task_field)
        read = {name for name in named if name is not None}
        read |= self._needed() - set(self.fields or ()) | {*self.shuffled, *(self.between or ())}
        read -= set(self.fields or ())
        if absent := sorted((read | set((self.fields or {}).values())) - set(found.names)):
            raise ValueError(
                f"{self.path} has no field {', '.join(map(repr, absent))}, it has: {', '.join(found.names)}; say "
                "what it is called there with benchmark.source.fields={name in the template: name in the file}"
            )

    def _wanted(self) -> set[str]:
        """Every field of the files that a prompt of either kind may need."""
        named = {self.answer_field, self.id_field, self.task_field, *WHOLE, *self.shuffled, *(self.between or ())}
        return self._needed() | (named - {None}) | set((self.fields or {}).values()) | {CLASSES}

    def _needed(self) -> set[str]:
        """Fields that the template reads of a row."""
        given = {"cot", LETTER} | ({"A", "B", "C", "D", "E"} if self.shuffled else set())
        return names_in(self.template) - given

    def _as_prompts(self) -> "FileBenchmark":
        """The same benchmark over rows that are whole prompts."""
        return replace(
            self, template=f"{{{{ {PROMPT} }}}}", answer_field="answer", id_field="id", task_field="task", shuffled=(),
            between=None, document_field=None,
        )  # fmt: skip

    @property
    def _whole(self) -> bool:
        return self.template == f"{{{{ {PROMPT} }}}}"

    def _text(self) -> Template:
        marks = tuple((start, end) for start, end in self.document_marks or ()) if self._whole else ()
        return Template(self.template, {"cot": self.cot}, self.document_field, marks)

    def _view(self, row: Row, name: str) -> dict[str, Any]:
        return view_of(row, self.fields or {}, self.shuffled, name.partition("/")[2])

    def _chosen(self, tokenizer: PreTrainedTokenizerBase, found: Rows) -> tuple[list[tuple[int, Row]], Measured]:
        """The rows to ask in the order of the files: the first of the seed's permutation that lie in the window."""
        rows = [number for number, row in enumerate(found.rows) if self._is_between(row)]
        wanted = len(rows) if self.requests is None else self.requests
        chosen: list[tuple[int, Row]] = []
        measured = Measured()
        # Rows are measured one by one and only until enough are found: a long data set takes minutes to tokenise.
        for number in random.Random(self.seed).sample(rows, len(rows)):
            row = found.rows[number]
            view = self._view(row, self._row_id(found, number, row))
            tokens = len(self._encode(tokenizer, self._text().render(view, self._text().document_of(view))))
            measured.rows += 1
            if tokens < self.min_tokens:
                measured.shorter += 1
            elif self.max_tokens is not None and tokens > self.max_tokens:
                measured.longer += 1
            else:
                chosen.append((number, row))
            if len(chosen) == wanted:
                break
        if not chosen or (self.requests is not None and len(chosen) < self.requests):
            raise ValueError(
                f"{self.path}: {len(chosen)} of {len(rows)} rows have a prompt of {self.min_tokens} to "
                f"{self.max_tokens} tokens ({measured.shorter} shorter, {measured.longer} longer), requests is "
                f"{self.requests}: lower benchmark.source.requests or widen the window"
            )
        return sorted(chosen, key=lambda pair: pair[0]), measured

    def _is_between(self, row: Row) -> bool:
        """Compared as text, which orders ISO dates."""
        for name, (first, end) in (self.between or {}).items():
            text = str(row[name])
            if text[: len(first)] < first or text[: len(end)] >= end:
                return False
        return True

    def _row_id(self, found: Rows, number: int, row: Row) -> str:
        source = self.path.rsplit("/", 1)[-1] if self.kind == "hub" else Path(found.files[0].name).name.split(".")[0]
        mapped = {**row, **{name: row[other] for name, other in (self.fields or {}).items()}}
        if self.id_field is None or (self._whole and self.id_field not in mapped):
            return f"{source}/{number}"
        return f"{source}/{mapped[self.id_field]}"

    def _encode(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        return encode_chat(tokenizer, text, thinking=self.thinking, chat=self.chat)

    def _item(self, tokenizer: PreTrainedTokenizerBase, name: str, view: Row, room: int) -> Item:
        text = self._text()
        document = text.document_of(view)
        task = self._optional(view, self.task_field)
        answer = view[LETTER] if self.shuffled else plain_text(self._optional(view, self.answer_field))
        classes = tuple(map(str, view.get(CLASSES) or ()))
        if document is None:
            ids = self._encode(tokenizer, text.render(view, None))
            if len(ids) > room:
                raise ValueError(
                    f"{name} has {len(ids)} prompt tokens and no document to cut, the context and limit leave {room}: "
                    "lower benchmark.source.max_tokens or benchmark.max_new_tokens"
                )
            truncated, original = False, len(ids)
        else:
            ids, truncated, original = fit_document(
                lambda kept: self._encode(tokenizer, text.render(view, kept)), document, room, _CUTS[self.cut]
            )
        return Item(name, tuple(ids), answer, 0, truncated, original, None if task is None else str(task), classes)

    def _optional(self, view: Row, name: str | None) -> Any:
        """A field that a benchmark may not have, and a whole prompt need not have."""
        if name is None or (self._whole and name not in view):
            return None
        return view[name]


def _distinct(names: Any) -> list[str]:
    """Raises ValueError for an id that occurs twice: requests are told apart by it."""
    seen: dict[str, None] = {}
    for name in names:
        if name in seen:
            raise ValueError(f"two rows have the id {name}: set benchmark.source.id_field to a field that differs")
        seen[name] = None
    return list(seen)
