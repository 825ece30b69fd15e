"""What was found, on one page? Every figure and table of results, with its command, evidence and records.

python -m experiments.report [RESULTS] [OUT]    by default results and runs/report.html

The page is one file that asks the network for nothing; the same results give the same bytes.
"""

import base64
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from experiments.config import script
from experiments.exhibits import KINDS, Exhibit, Shown, exhibits, listed, show
from experiments.gpu_tables import commit_of
from experiments.hypertext import FILTERS, Reader
from experiments.tables import DASH, RESULTS

OUT = RESULTS.parent / "runs" / "report.html"
VERDICTS = "README.md"  # of results: the published claims beside ours
FILES = (("tables", "md"), ("tables", "csv"), ("figures", "png"), ("figures", "pdf"))  # what VERDICTS may link to
PIXELS = 1.5  # of a figure, drawn at 300 a inch, to one of the page


@dataclass(frozen=True)
class Picture:
    """A figure as it stands in the page. width, height: of the page's pixels."""

    data: str
    width: int
    height: int


@dataclass(frozen=True)
class Choice:
    """A select of the filter: (value, what the reader sees) of each option."""

    name: str
    options: list[tuple[str, str]]


def report(results: Path = RESULTS, out: Path = OUT) -> Path:
    """Write the page and return its path. Raises ValueError if results hold no table and no figure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(results), encoding="utf-8")
    return out


def page(results: Path) -> str:
    """The page as text."""
    found = show(results / "records")
    shown, records = exhibits(results, found), listed(found.values())
    reader = Reader(
        methods(records), {f"{folder}/{e.name}.{end}": f"#{e.name}" for e in shown for folder, end in FILES}
    )
    verdicts = results / VERDICTS
    return environment().get_template("report.html.j2").render(
        exhibits=[(one, picture(one.figure), table(one, reader)) for one in shown],
        verdicts=reader.render(_body(verdicts.read_text("utf-8")), "Published claims") if verdicts.exists() else None,
        orphans=orphans(records, shown),
        records=records,
        environments=environments(records),
        choices=choices(records),
        kinds=KINDS,
    )  # fmt: skip


def environment() -> jinja2.Environment:
    """Where templates come from and how a number or a missing value is written."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"number": number, "tags": tags, "commit": lambda e: commit_of(e.commit, e.dirty)}
    return made


def number(value: float | str | None, digits: int | None = None) -> str:
    """Fixed digits, or a dash where there is nothing."""
    if value is None:
        return DASH
    return str(value) if digits is None else f"{value:.{digits}f}"


def tags(shown: Shown) -> Markup:
    """The data attributes that the filter reads."""
    values = {"record": shown.name} | {key: value for key, (value, _) in facts(shown).items()}
    return Markup(" ").join(Markup('data-{}="{}"').format(*pair) for pair in values.items())


def facts(shown: Shown) -> dict[str, tuple[str, str]]:
    """What a record can be filtered by: key -> (value, what the reader sees)."""
    cell = shown.record.cell
    return {
        "model": (cell.model, cell.model),
        "benchmark": (cell.benchmark, cell.benchmark),
        "method": (cell.method, shown.record.label),
        "evidence": (cell.evidence, cell.evidence),
    }


def methods(records: Iterable[Shown]) -> dict[str, str | None]:
    """Label -> name of every method, None for a label of several, like the lengths of a sweep."""
    names: dict[str, set[str]] = {}
    for one in records:
        names.setdefault(one.record.label, set()).add(one.record.cell.method)
    return {label: min(own) if len(own) == 1 else None for label, own in names.items()}


def choices(records: list[Shown]) -> list[Choice]:
    """What the filter offers: all values that any record has, by what the reader sees."""
    unique = methods(records)
    found = []
    for key in FILTERS:
        words = dict(facts(one)[key] for one in records)
        if key == "method":
            words = {value: label if unique[label] else f"{label} ({value})" for value, label in words.items()}
        found.append(Choice(key, sorted(words.items(), key=lambda option: (option[1].lower(), option[0]))))
    return found


def picture(path: Path | None) -> Picture | None:
    """A PNG and its size, which its header tells."""
    if path is None:
        return None
    data = path.read_bytes()
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    return Picture(base64.b64encode(data).decode(), round(width / PIXELS), round(height / PIXELS))


def table(one: Exhibit, reader: Reader) -> Markup | None:
    return None if one.table is None else reader.render(one.table, one.source.title)


def orphans(records: list[Shown], shown: list[Exhibit]) -> list[Shown]:
    """Records that no exhibit shows."""
    claimed = {record.name for one in shown for record in one.records}
    return [record for record in records if record.name not in claimed]


def environments(records: list[Shown]) -> list[tuple[Mapping[str, Any], int]]:
    """Each machine and tree that records came from, and how many did."""
    keys = ("device", "driver", "torch", "triton", "transformers")
    seen = Counter(
        (*(getattr(one.record.environment, key) for key in keys), commit_of(
            one.record.environment.commit, one.record.environment.dirty
        ))
        for one in records
    )  # fmt: skip
    ordered = sorted(seen.items(), key=lambda item: [str(value) for value in item[0]])
    return [(dict(zip((*keys, "commit"), values, strict=True)), count) for values, count in ordered]


def _body(text: str) -> str:
    """A page without its title, which the section has already."""
    return text.partition("\n")[2] if text.startswith("# ") else text


def main(arguments: list[str]) -> None:
    """Write the page of a results folder. Raises ValueError for a third word or a folder without results."""
    if len(arguments) > 2:
        raise ValueError(f"unknown argument {arguments[2]!r}; give a results folder and a file, or nothing")
    print(f"wrote {report(*(Path(word) for word in arguments))}")


if __name__ == "__main__":
    script(main)
