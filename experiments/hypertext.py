"""How does a table in markdown become one that a page can scroll, name and filter?

Every table gets a frame that scrolls sideways and a caption; columns of numbers stand to the right; a row says in data
attributes which model, benchmark, method and evidence it is about, where the table has such columns.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

FILTERS = ("model", "benchmark", "method", "evidence")
TAGGED = ("evidence", "verdict")  # columns whose cells carry their text for the style sheet
NUMBER = re.compile(r"[-+]?[\d,.]+([–-][\d,.]+)?( ?%|x)?")  # also a spread: 104.3–117.3
NOTHING = ("–", "")
LONG = 40  # characters, from which a column wraps its lines
SIGNS = " †‡"  # stand behind a method whose numbers were not measured on real weights


@dataclass(frozen=True)
class Column:
    """name, and its cells below: (opening token, text)."""

    name: str
    head: Token
    cells: list[tuple[Token, str]]

    @property
    def steady(self) -> bool:
        """One text in every row of several, in a column that neither tells rows apart nor marks them."""
        texts = {text for _, text in self.cells}
        return len(self.cells) > 1 and len(texts) == 1 and self.name.lower() not in (*FILTERS, *TAGGED)

    def dress(self) -> None:
        """Class the cells by what the column holds."""
        texts = [text for _, text in self.cells]
        kind = "number" if all(NUMBER.fullmatch(text) or text in NOTHING for text in texts) else ""
        kind = "prose" if max(map(len, texts), default=0) > LONG else kind
        self.head.attrSet("scope", "col")
        for token in (self.head, *(cell for cell, _ in self.cells)):
            token.attrs.pop("style", None)
            if kind:
                token.attrSet("class", kind)
        if self.name.lower() in TAGGED:
            for token, text in self.cells:
                token.attrSet(f"data-{self.name.lower()}", text)


@dataclass(frozen=True)
class Reader:
    """What a page knows of the markdown it shows.

    methods: label -> name, None where several methods have it; anchors: link -> link within the page.
    """

    methods: Mapping[str, str | None]
    anchors: Mapping[str, str]

    def render(self, text: str, title: str) -> Markup:
        """HTML of a markdown text; title names a table that no line ending in a colon introduces.

        A column with one text in all rows is said below the table instead. Raw HTML is shown as text, and a link that
        leads neither to the web nor to an anchor loses its target.
        """
        parser = MarkdownIt("commonmark", {"html": False}).enable("table")
        found: list[Token] = []
        rest = parser.parse(text)
        while (start := next((at for at, token in enumerate(rest) if token.type == "table_open"), None)) is not None:
            end = next(at for at, token in enumerate(rest) if token.type == "table_close") + 1
            before, words = _caption(rest[:start])
            found += [*before, *self._framed(rest[start:end], words, title)]
            rest = rest[end:]
        found += rest
        for token in found:
            self._relink(token)
            if token.type in ("heading_open", "heading_close"):
                token.tag = f"h{min(max(int(token.tag[1]) + 1, 3), 6)}"  # below the heading of the section
        return Markup(parser.renderer.render(found, parser.options, {}))

    def _framed(self, table: list[Token], words: str | None, title: str) -> list[Token]:
        """The table within its frame; a caption that only repeats the title is there for who cannot see the page."""
        columns = _columns(table)
        for row, said in _rows(table, columns):
            for key, value in self.tags(said).items():
                row.attrSet(f"data-{key}", value)
        for column in columns:
            column.dress()
        steady = [column for column in columns if column.steady]
        gone = {id(token) for column in steady for token in (column.head, *(cell for cell, _ in column.cells))}
        frame = Markup(
            '<div class="scroll" role="region" tabindex="0" aria-label="Table: {0}"><table><caption{1}>{0}</caption>'
        )
        unseen = Markup(' class="unseen"') if words is None else ""
        below = Markup("</table></div>\n{}").format(_said(steady))
        return [
            _html(frame.format(words or title, unseen)),
            *_without(table[1:-1], gone),
            _html(below),
        ]

    def tags(self, row: Mapping[str, str]) -> dict[str, str]:
        """What a row can be filtered by."""
        found = {key: row[key] for key in FILTERS if row.get(key) and row[key] not in NOTHING}
        label = found.get("method", "").rstrip(SIGNS)
        evidence = re.split(r"\W", found.get("evidence", ""))[0]  # "real, on a CPU" is real
        found |= {"method": self.methods.get(label, label) or "", "evidence": evidence}
        return {key: value for key, value in found.items() if value}

    def _relink(self, token: Token) -> None:
        for child in token.children or []:
            target = child.attrs.get("href")
            if target is not None and "://" not in str(target):
                anchor = self.anchors.get(str(target))
                child.attrs.pop("href")
                if anchor:
                    child.attrSet("href", anchor)


def _html(text: str) -> Token:
    return Token("html_block", "", 0, content=text)


def _caption(tokens: list[Token]) -> tuple[list[Token], str | None]:
    """(the rest, the last paragraph) where that ends with a colon, else (all, None)."""
    if len(tokens) >= 3 and tokens[-1].type == "paragraph_close" and tokens[-2].content.endswith(":"):
        return tokens[:-3], tokens[-2].content[:-1]
    return tokens, None


def _cells(table: list[Token]) -> list[list[tuple[Token, str]]]:
    """(opening token, text) of every cell, row by row, the head first."""
    rows: list[list[tuple[Token, str]]] = []
    for place, token in enumerate(table):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append((token, "".join(child.content for child in table[place + 1].children or []).strip()))
    return rows


def _columns(table: list[Token]) -> list[Column]:
    """Markdown fills short rows up, so every row has a cell in each column."""
    head, *body = _cells(table)
    return [Column(text, token, [row[place] for row in body]) for place, (token, text) in enumerate(head)]


def _rows(table: list[Token], columns: list[Column]) -> Iterator[tuple[Token, dict[str, str]]]:
    """(token, column -> text) of every row below the head."""
    opened = [token for token in table if token.type == "tr_open"]
    for place, token in enumerate(opened[1:]):
        yield token, {column.name.lower(): column.cells[place][1] for column in columns}


def _without(tokens: list[Token], gone: set[int]) -> list[Token]:
    """Leave out the cells that these tokens open: opening token, text, closing token."""
    places = {place for place, token in enumerate(tokens) if id(token) in gone}
    return [token for place, token in enumerate(tokens) if not places & {place, place - 1, place - 2}]


def _said(steady: list[Column]) -> Markup:
    """The columns that were left out, and the text that each had in every row."""
    texts = {column.name: column.cells[0][1] for column in steady}
    same = "; ".join(f"{name} {text}" for name, text in texts.items() if text not in NOTHING)
    empty = ", ".join(name for name, text in texts.items() if text in NOTHING)
    said = [f"In every row: {same}." if same else "", f"Without a value in any row: {empty}." if empty else ""]
    words = " ".join(part for part in said if part)
    return Markup('<p class="steady">{}</p>\n').format(words) if words else Markup("")
