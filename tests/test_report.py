"""Does the report show every figure and table with its records, load nothing, and filter in a real browser?

The browser tests need playwright and a Chromium of the machine: `pip install playwright`, `apt-get install chromium`.
"""

import base64
import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_records import METHODS, requests, timed, write_comparison

from experiments.bench_gpu import SUITES
from experiments.exhibits import EMULATED, SOURCES, exhibits, show, stated
from experiments.hypertext import Reader
from experiments.records import find_records, read_record, read_requests, write_record
from experiments.redraw import redraw
from experiments.report import main, page, report

RESULTS = Path(__file__).parents[1] / "results"
VOID = {"meta", "link", "img", "br", "hr", "input", "wbr"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
VERDICTS = """# Results

| study | claim | published | ours | verdict | evidence |
|:--|:--|:--|:--|:--|:--|
| [budget](tables/study_budget.md) | more is better | 2.06 | 0.79 | differs | real, on a CPU |
| batch | memory fills up | 1.80 | 1.91 | agrees | shapes |
"""
BUDGET = """Real text:

| model | method | budget | acceptance |
|:--|:--|:--|:--|
| smollm2_135m | ASPIRE | 0.01 | 0.5 |
| smollm2_135m | Vegas | 0.02 | <0.6> |

evidence: real; acceptance: measured.
"""


class Page(HTMLParser):
    """The elements of a page: (tag, attributes, ids of the sections around it). Asserts that every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [id for _, id in self.open if id]))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag, f"</{tag}> at {self.getpos()} closes another element"

    def all(self, tag: str, inside: str | None = None, **wanted: str) -> list[dict[str, str | None]]:
        """Attributes of the elements of a tag, in an element with this id, whose attributes have these values."""
        return [
            attrs
            for name, attrs, around in self.elements
            if name == tag and (inside is None or inside in around) and wanted.items() <= attrs.items()
        ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison on real text with a failed cell, one of shapes, a study, and a table that nobody foresaw."""
    root = tmp_path_factory.mktemp("results")
    write_comparison(root / "records" / "run", ["arithmetic", "pystdlib"], failing=("pystdlib", "vegas"))
    shapes = {"model": "qwen3_8b", "evidence": "shapes", "acceptance": "emulated:iid(0.9)"}
    write_comparison(root / "records" / "h200" / "shapes" / "cell", ["shapes"], **shapes)
    redraw(root / "records", root)
    write_comparison(root / "records" / "studies" / "budget" / "embedded", ["pystdlib"])
    write_comparison(root / "records" / "h200" / "elsewhere", ["gsm8k"])
    (root / "tables" / "study_budget.md").write_text(BUDGET)
    (root / "tables" / "unforeseen.md").write_text("| a | b |\n|--|--|\n| 1 | x |\n\nmodelled from a trace\n")
    (root / "README.md").write_text(VERDICTS)
    return root


@pytest.fixture(scope="module")
def text(results: Path) -> str:
    return page(results)


@pytest.fixture(scope="module")
def committed() -> str:
    return page(RESULTS)


def test_every_committed_figure_table_and_record_is_there(committed: str) -> None:
    html = Page(committed)
    sections = {attrs["id"] for attrs in html.all("section")}
    for path in (RESULTS / "figures").glob("*.png"):
        (image,) = html.all("img", inside=path.stem)
        assert image["src"] == f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        assert image["alt"] and image["width"] and image["height"]
    for path in (RESULTS / "tables").glob("*.md"):
        written = sum(line.startswith("|") and not line.startswith("|:") for line in path.read_text().splitlines())
        here = [attrs for attrs in html.all("tr", inside=path.stem) if attrs.get("class") != "record"]
        assert len(here) == written + bool(html.all("tr", inside=path.stem, **{"class": "record"})), path.name
        assert path.stem in sections
    records = {path.relative_to(RESULTS / "records").as_posix() for path in find_records(RESULTS / "records")}
    assert {attrs["data-record"] for attrs in html.all("tr", **{"class": "record"})} == records
    assert "other-records" not in sections


def test_the_same_files_give_the_same_bytes_wherever_they_lie(committed: str, tmp_path: Path) -> None:
    copy = shutil.copytree(RESULTS, tmp_path / "somewhere else")
    assert report(copy, tmp_path / "new" / "page.html").read_text() == committed
    assert str(RESULTS) not in committed and str(tmp_path) not in committed


@pytest.mark.parametrize("which", ["text", "committed"])
def test_nothing_is_loaded_and_every_link_leads_somewhere(which: str, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(which)
    html = Page(source)
    loads = [attrs[key] for _, attrs, _ in html.elements for key in ("src", "srcset", "data", "poster") if key in attrs]
    loads += [attrs["href"] for attrs in html.all("link")]
    assert loads and all(str(load).startswith("data:") for load in loads)
    (policy,) = html.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert str(policy["content"]).startswith("default-src 'none'; img-src data:;")
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest", source)
    ids = [attrs["id"] for _, attrs, _ in html.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {str(attrs["href"]) for attrs in html.all("a") if "href" in attrs}
    assert {link for link in links if not link.startswith("https://")} <= {f"#{name}" for name in ids}


def test_tables_fields_and_regions_have_names(text: str) -> None:
    html = Page(text)
    assert len(html.all("caption")) == len(html.all("table"))
    assert len(html.all("label")) == len(html.all("select")) == 4
    assert all(attrs["aria-label"] and attrs["tabindex"] == "0" for attrs in html.all("div", role="region"))
    assert all(attrs.get("scope") == "col" for attrs in html.all("th"))
    assert len(html.all("h1")) == 1


def test_evidence_follows_from_the_records(results: Path) -> None:
    found = {one.name: one.evidence for one in exhibits(results, show(results / "records"))}
    assert found["fig1"] == ["real"] and found["study_budget"] == ["real"]
    assert found["gpu_shapes"] == [EMULATED]
    assert found["unforeseen"] == ["modelled"]
    assert stated("nothing is said") == set()


def test_order_and_records_of_exhibits(results: Path) -> None:
    found = exhibits(results, show(results / "records"))
    assert [one.name for one in found] == ["fig1", "study_budget", "gpu_shapes", "unforeseen"]
    assert [len(one.records) for one in found] == [2 * len(METHODS), len(METHODS), len(METHODS), 0]
    assert found[1].source.title == "Study: budget" and found[3].source.title == "Unforeseen"


@pytest.mark.parametrize("name", SOURCES)
def test_commands_that_measured_exist(name: str) -> None:
    """A make target with a suite that there is, or a module."""
    words = shlex.split(SOURCES[name].command or "")
    if words[0] == "make":
        assert re.search(rf"^{words[1]}: ", (RESULTS.parent / "Makefile").read_text(), flags=re.MULTILINE)
        assert {word.partition("=")[2] for word in words[2:]} <= {f"suite={suite}" for suite in SUITES}
    else:
        assert words[:2] == ["python", "-m"] and importlib.util.find_spec(words[2]) is not None


def test_speedups_are_of_the_records_own_comparison(tmp_path: Path) -> None:
    """Two comparisons of one workload, whose baselines differ: a method is divided by its neighbour alone."""
    for name in ("a", "b"):
        write_comparison(tmp_path / name, ["pystdlib"])
    (fast,) = [folder for folder in find_records(tmp_path / "b") if folder.name.endswith("-autoregressive")]
    record = read_record(fast)
    doubled = record.metrics.model_copy(update={"decode_tok_s": 2 * record.metrics.decode_tok_s})
    write_record(fast, record.model_copy(update={"metrics": doubled}), read_requests(fast))
    a, b = (
        [one.speedup for folder, one in show(tmp_path).items() if (tmp_path / name) in folder.parents] for name in "ab"
    )
    methods = [one.record.cell.method for one in show(tmp_path / "a").values()]
    expected = {method: 1.0 if method == "autoregressive" else 2.0 for method in methods}
    assert dict(zip(methods, (x / y for x, y in zip(a, b)))) == pytest.approx(expected)


def test_methods_that_share_a_label_are_told_apart(tmp_path: Path) -> None:
    """A row of a table that says no more than the label is not taken for one of them."""
    for method in ("aspire", "vegas"):
        lines = requests(0.5, 4)
        write_record(tmp_path / "records" / "run" / method, timed(lines, [1.0], method, "<b>Same"), lines)
    shutil.copytree(RESULTS / "tables", tmp_path / "tables")
    html = page(tmp_path)
    assert re.findall(r'<option value="(?:aspire|vegas)">(.*?)</option>', html) == [
        "&lt;b&gt;Same (aspire)",
        "&lt;b&gt;Same (vegas)",
    ]
    assert "<b>" not in html
    assert Reader({"Same": None}, {}).tags({"method": "Same", "model": "m"}) == {"model": "m"}


def test_records_no_table_shows_are_listed_and_a_failed_cell_has_dashes(text: str) -> None:
    html = Page(text)
    other = html.all("tr", inside="other-records", **{"class": "record"})
    assert {attrs["data-benchmark"] for attrs in other} == {"gsm8k"}
    (failed,) = re.findall(r'<tr class="record" data-record="run/[^"]*pystdlib-vegas".*?</tr>', text, flags=re.DOTALL)
    assert "failed" in failed and failed.count('class="number">–<') == 3


def test_verdicts_lead_to_their_study(text: str, committed: str) -> None:
    html = Page(text)
    assert [attrs["data-verdict"] for attrs in html.all("td", inside="claims") if "data-verdict" in attrs] == [
        "differs",
        "agrees",
    ]
    assert [attrs["href"] for attrs in html.all("a", inside="claims")] == ["#study_budget"]
    rows = [attrs for attrs in html.all("tr", inside="claims") if "data-evidence" in attrs]
    assert [attrs["data-evidence"] for attrs in rows] == ["real", "shapes"]
    assert ('id="claims"' in committed) == (RESULTS / "README.md").exists()


def test_markdown_becomes_text_and_rows_that_can_be_filtered() -> None:
    shown = str(Reader({"ASPIRE": "aspire"}, {}).render(BUDGET.replace("Vegas", "ASPIRE †"), "Budget"))
    html = Page(shown)
    assert "&lt;0.6&gt;" in shown and "<caption>Real text</caption>" in shown and "<p>Real text" not in shown
    assert [attrs.get("data-method") for attrs in html.all("tr")] == [None, "aspire", "aspire"]


def test_a_column_that_never_changes_is_said_once() -> None:
    table = "| method | batch | note | tok/s |\n|--|--|--|--|\n| a | 8 | – | 1.0–2.0 |\n| b | 8 | – | 2.5 |\n"
    shown = str(Reader({}, {}).render(table, "T"))
    assert "In every row: batch 8. Without a value in any row: note." in shown
    assert [attrs.get("class") for attrs in Page(shown).all("th")] == [None, "number"]
    assert re.findall(r"<td[^>]*>(.*?)</td>", shown) == ["a", "1.0–2.0", "b", "2.5"]


def test_no_results_and_a_third_word_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="make figures"):
        report(tmp_path, tmp_path / "page.html")
    with pytest.raises(ValueError, match="results folder and a file"):
        main(["a", "b", "c"])


def test_tables_without_records_make_a_page(tmp_path: Path, results: Path) -> None:
    shutil.copytree(results / "tables", tmp_path / "tables")
    html = Page(report(tmp_path, tmp_path / "page.html").read_text())
    assert html.all("section", id="fig1") and not html.all("form") and not html.all("tr", **{"class": "record"})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    with driver.sync_playwright() as play:
        # Its sandbox does not start for root; the page is our own and loads nothing.
        running = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Opened:
    """A page in a browser, with what it said and what it asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(**options)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = path.as_uri()
        self.page.goto(self.url)

    def shown(self, selector: str) -> int:
        """How many elements are displayed, those of closed lists of records too."""
        return self.page.locator(selector).evaluate_all(
            "all => all.filter(one => !one.closest('[hidden]') && getComputedStyle(one).display !== 'none').length"
        )

    def choose(self, name: str, value: str) -> None:
        self.page.select_option(f"select[name={name}]", value)

    @property
    def count(self) -> str:
        return self.page.locator("#filter output").inner_text()

    def quiet(self) -> bool:
        """Nothing on the console, and no request but the page itself and what it holds."""
        return self.said == [] and [url for url in self.asked if not url.startswith("data:")] == [self.url]


@pytest.fixture
def opened(browser: Any, text: str, tmp_path: Path) -> Any:
    (tmp_path / "page.html").write_text(text)
    return lambda **options: Opened(browser, tmp_path / "page.html", **options)


def test_the_filter_hides_records_and_the_sections_that_have_none_left(opened: Any) -> None:
    page = opened()
    every, rows = 5 * len(METHODS), page.shown("tbody tr")
    assert page.count == f"{every} of {every} records" and page.shown("tr.record") == every
    page.choose("method", "vegas")
    assert page.count == f"5 of {every} records" and page.shown("tr.record") == 5
    assert page.shown("tbody tr[data-method]:not([data-method=vegas])") == 0
    assert page.page.locator("#fig1 .count").inner_text() == f"2 of {2 * len(METHODS)}"
    page.choose("benchmark", "shapes")
    assert page.count == f"1 of {every} records"
    assert page.shown("section.exhibit") == page.shown("nav a[href='#gpu_shapes']") == 1
    assert page.shown("#gpu_shapes") == 1 and page.shown("nav a[href='#fig1']") == 0
    page.choose("evidence", "real")
    assert page.shown("section.exhibit") == 0 and page.shown("#environment") == 1
    page.page.click("button[type=reset]")
    assert page.page.locator("tr[hidden], section[hidden], li[hidden]").count() == 0
    assert page.count == f"{every} of {every} records" and page.shown("tbody tr") == rows
    assert page.quiet()


def test_the_filter_works_from_the_keyboard(opened: Any) -> None:
    page = opened()
    for _ in range(40):
        page.page.keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.name") == "method":
            break
    page.page.keyboard.type("SparseSpec")
    assert page.page.locator("select[name=method]").input_value() == "sparsespec"
    assert page.count.startswith("5 of ")
    page.page.keyboard.press("Tab")
    page.page.keyboard.press("Tab")
    page.page.keyboard.press("Enter")
    assert page.page.locator("tr[hidden]").count() == 0


@pytest.mark.parametrize("which", ["text", "committed"])
def test_a_phone_scrolls_tables_and_not_the_page(
    browser: Any, which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(request.getfixturevalue(which))
    page = Opened(browser, tmp_path / "page.html", viewport={"width": 390, "height": 844}, has_touch=True)
    page.page.evaluate("document.querySelectorAll('details').forEach(list => list.open = true)")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    wide = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
    assert page.page.locator(".scroll").evaluate_all(wide) > 0
    assert page.page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    assert page.quiet()


def test_print_leaves_the_filter_out_and_opens_the_lists(opened: Any) -> None:
    page = opened()
    assert page.shown("#filter") == 1
    page.page.emulate_media(media="print")
    assert page.shown("#filter") == 0
    assert page.page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
    page.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.page.evaluate("document.querySelectorAll('details[open]').length") == 0


def test_dark_readers_get_a_dark_page(opened: Any) -> None:
    colours = [
        opened(color_scheme=scheme).page.evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert colours == ["rgb(253, 253, 251)", "rgb(21, 23, 27)"]


def test_without_scripts_everything_shows_but_the_filter(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert page.page.locator("#filter").is_hidden()
    assert page.page.locator("#fig1 img").is_visible()
