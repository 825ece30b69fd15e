"""How does one row become the text of one prompt? The benchmark's template, or the row's own whole prompt."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.meta

LETTER = "letter"  # in a view of a row with shuffled choices: where the right one stands
PROMPT = "prompt"  # the field of a row that is asked as it is
_JINJA = jinja2.Environment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=lambda value: "" if value is None else value
)


@dataclass(frozen=True)
class Template:
    """text: Jinja over the fields of a row and `options`. document: the field that may be cut.

    marks: for a row's whole prompt, what may stand before and after the part that may be cut; the first pair counts
    that a prompt has.
    """

    text: str
    options: Mapping[str, Any]
    document: str | None = None
    marks: tuple[tuple[str, str], ...] = ()

    def document_of(self, view: Mapping[str, Any]) -> str | None:
        """What may be cut of a row's prompt; None where it has no such part."""
        if self.marks:
            return self._parts(view)[1]
        return None if self.document is None else str(view[self.document] or "")

    def render(self, view: Mapping[str, Any], document: str | None) -> str:
        """The prompt with `document` in the place of the row's own. Braces in a row are text."""
        if self.marks and document is not None:
            before, _, after = self._parts(view)
            return f"{before}{document}{after}"
        replaced = {} if self.document is None else {self.document: document}
        return _compiled(self.text).render({**self.options, **view, **replaced})

    def _parts(self, view: Mapping[str, Any]) -> tuple[str, str | None, str]:
        """Up to the first opening mark, the document, from the last closing mark on."""
        prompt = str(view[PROMPT])
        for opening, closing in self.marks:
            start, end = prompt.find(opening), prompt.rfind(closing)
            if start >= 0 and start + len(opening) <= end:
                start += len(opening)
                return prompt[:start], prompt[start:end], prompt[end:]
        return prompt, None, ""


def names_in(text: str) -> set[str]:
    """The names that a template reads. Raises ValueError for a template that is no valid Jinja."""
    try:
        return jinja2.meta.find_undeclared_variables(_JINJA.parse(text))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"benchmark.source.template, line {error.lineno}: {error.message}") from None


def _compiled(text: str) -> jinja2.Template:
    return _JINJA.from_string(text)  # Jinja keeps what it compiled


def view_of(row: Mapping[str, Any], fields: Mapping[str, str], shuffled: Sequence[str], key: str) -> dict[str, Any]:
    """A row as templates see it: with the mapped names, and with choices as A, B, C, ... in the order of `key`.

    The order depends on the key (the row's id) alone: it is the same in every run, whatever its seed.
    """
    view = {**row, **{name: row[source] for name, source in fields.items()}}
    if shuffled:
        order = list(range(len(shuffled)))
        random.Random(key).shuffle(order)
        for place, choice in enumerate(order):
            view[string.ascii_uppercase[place]] = str(row[shuffled[choice]]).strip()
        view[LETTER] = string.ascii_uppercase[order.index(0)]
    return view


def plain_text(value: Any) -> str | None:
    """A field as text; lists (several accepted answers) are JSON."""
    if value is None:
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
