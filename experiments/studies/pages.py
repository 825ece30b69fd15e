"""Where does the reader find what became of every claim? A table and a figure a study, and results/README.md."""

import os
from pathlib import Path

import pandas as pd

from experiments.studies.claims import Verdict, as_text
from experiments.studies.study import Study, names, study_of
from experiments.tables import DASH

STUDIES = "studies"  # below results/records
HEAD = """# Results

Every claim of the paper that a study here asks about: what was published, what came out here, and the verdict. *Agrees*
means that our value lies in the interval beside it, which we set around what was published, *differs* that it does not;
neither says more than the evidence beside it. Published numbers come from other machines and other models and are never
divided by ours. `make figures` rebuilds this page, all tables and all figures from the records; the command in a row
runs the study anew.
"""


def write_study(study: Study, rows: pd.DataFrame, tables: Path, figures: Path) -> list[Path]:
    """Table and figure of a study; nothing where it has no rows."""
    if rows.empty:
        return []
    tables.mkdir(parents=True, exist_ok=True)
    path = tables / f"study_{study.name}.md"
    path.write_text(study.table(rows), encoding="utf-8")
    return [path, *study.figure(rows, figures / f"study_{study.name}")]


def redraw_studies(root: Path, out: Path) -> list[Path]:
    """Tables and figures of all studies that have records below `root`, and results/README.md with all claims."""
    written, sections = [], [HEAD]
    for study in map(study_of, names()):
        folders = study.folders(root)
        rows = study.frame(folders)
        pages = write_study(study, rows, out / "tables", out / "figures")
        written += pages
        verdicts = study.verdicts(rows)
        links = [f"[{path.name}]({path.relative_to(out)})" for path in pages if path.suffix in (".md", ".png")]
        links += records_link(folders, root)
        words = [f"## {study.title}", f"Study `{study.name}`. {' '.join(links) or 'Not run yet.'}"]
        sections.append("\n\n".join([*words, *([verdict_table(verdicts)] if verdicts else [])]) + "\n")
    if not written:
        return []
    page = out / "README.md"
    page.write_text("\n".join(sections), encoding="utf-8")
    return [*written, page]


def records_link(folders: list[Path], root: Path) -> list[str]:
    """To the folder that holds all cells of a study, where results/README.md finds it once they are published."""
    return [f"[records](records/{Path(os.path.commonpath(folders)).relative_to(root.parent)})"] if folders else []


def verdict_table(verdicts: list[Verdict]) -> str:
    """A row a claim and profile."""
    rows = [
        {
            "claim": v.text, "published": v.published, "ours": DASH if v.value is None else f"{v.value:.3g}",
            "agrees within": interval(v), "verdict": v.word, "evidence": v.evidence or DASH, "reason": v.reason or DASH,
            "source": v.source, "command": f"`make study NAME={v.study} PROFILE={v.profile}`",
        }
        for v in verdicts
    ]  # fmt: skip
    return pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True)


def interval(v: Verdict) -> str:
    low, high = ("" if x is None else as_text(x) for x in (v.low, v.high))
    return f"{low}–{high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else DASH
