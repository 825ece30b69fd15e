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
SIGNS = " †‡"  # stand behind a method whose numbers were not measured on real weights


@dataclass(frozen=True)
class Reader:
    """What a page knows of the markdown it shows. methods: label -> name; anchors: link -> link within the page."""

    methods: Mapping[str, str]
    anchors: Mapping[str, str]

    def render(self, text: str, title: str) -> Markup:
        """HTML of a markdown text; title names a table that no line ending in a colon introduces.

        Raw HTML is shown as text, and a link that leads neither to the web nor to an anchor loses its target.
        """
        parser = MarkdownIt("commonmark", {"html": False}).enable("table")
        tokens = _captioned(parser.parse(text), title)
        for start, end in _spans(tokens, "table"):
            self._annotate(tokens[start:end])
        for token in tokens:
            self._relink(token)
        return Markup(parser.renderer.render(tokens, parser.options, {}))

    def _annotate(self, tokens: list[Token]) -> None:
        """Write into the tokens of one table what its cells say."""
        (head, *body) = [(tokens[a], list(_cells(tokens[a:b]))) for a, b in _spans(tokens, "tr")]
        names = [text for _, text in head[1]]
        for token, _ in head[1]:
            token.attrSet("scope", "col")
        for place, name in enumerate(names):
            column = [cells[place] for _, cells in body if place < len(cells)]
            numeric = all(NUMBER.fullmatch(text) or text in NOTHING for _, text in column)
            for token, text in [head[1][place], *column]:
                token.attrs.pop("style", None)
                if numeric:
                    token.attrSet("class", "number")
                if token.tag == "td" and name.lower() in TAGGED:
                    token.attrSet(f"data-{name.lower()}", text)
        for token, cells in body:
            said = dict(zip(names, (text for _, text in cells), strict=False))
            for key, value in self.tags(said).items():
                token.attrSet(f"data-{key}", value)

    def tags(self, row: Mapping[str, str]) -> dict[str, str]:
        """What a row can be filtered by."""
        found = {key: row[key] for key in FILTERS if row.get(key) and row[key] not in NOTHING}
        if "method" in found:
            label = found["method"].rstrip(SIGNS)
            found["method"] = self.methods.get(label, label)
        if "evidence" in found:
            found["evidence"] = found["evidence"].split()[0]  # "real, on a CPU" is real
        return found

    def _relink(self, token: Token) -> None:
        for child in token.children or []:
            target = child.attrs.get("href")
            if target is not None and "://" not in str(target):
                anchor = self.anchors.get(str(target))
                child.attrs.pop("href")
                if anchor:
                    child.attrSet("href", anchor)


def _spans(tokens: list[Token], tag: str) -> Iterator[tuple[int, int]]:
    """Index ranges from an opening token to its closing one; nothing of this tag nests."""
    opened = [place for place, token in enumerate(tokens) if token.type == f"{tag}_open"]
    closed = [place for place, token in enumerate(tokens) if token.type == f"{tag}_close"]
    return zip(opened, (place + 1 for place in closed), strict=True)


def _cells(tokens: list[Token]) -> Iterator[tuple[Token, str]]:
    """(opening token, text) of every cell of a row."""
    for token, inside in zip(tokens, tokens[1:], strict=False):
        if token.type in ("th_open", "td_open"):
            yield token, "".join(child.content for child in inside.children or []).strip()


def _captioned(tokens: list[Token], title: str) -> list[Token]:
    """Put every table into a frame with a caption: the paragraph before it, if that ends with a colon, or the title."""
    found: list[Token] = []
    for token in tokens:
        if token.type == "table_open":
            words = title
            if len(found) >= 3 and found[-1].type == "paragraph_close" and found[-2].content.endswith(":"):
                words = found[-2].content[:-1]
                del found[-3:]
            frame = Markup(
                '<div class="scroll" role="region" tabindex="0" aria-label="{0}"><table><caption>{0}</caption>'
            )
            found += [Token("html_block", "", 0, content=frame.format(words)), token]
            token.hidden = True
        elif token.type == "table_close":
            token.hidden = True
            found += [token, Token("html_block", "", 0, content="</table></div>\n")]
        else:
            found.append(token)
    return found
