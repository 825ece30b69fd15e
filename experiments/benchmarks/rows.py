"""Which rows does a benchmark read, and are they the ones that were meant? Parquet and JSON files, hub or local.

Files of the Hub come from its cache, or, where they are not there, over the network; a data set's script never runs.
JSON is read as it stands: the reader of `datasets` turns a text that looks like a date into one.
"""

import functools
import glob
import gzip
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq

from experiments.hub import DataFile, combined_hash, commit_of, dataset_files, file_facts

Row = dict[str, Any]
FORMATS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
datasets.disable_progress_bars()


@dataclass(frozen=True)
class Rows:
    """Rows of one or more files, in the files' order, with the fields that were asked for.

    names: all fields of the files. revision: the commit, None for local files. sha256: of all files together.
    """

    rows: tuple[Row, ...]
    names: tuple[str, ...]
    files: tuple[DataFile, ...]
    revision: str | None

    @property
    def sha256(self) -> str:
        return combined_hash(self.files)


def read_rows(
    kind: str, path: str, files: Sequence[str] = (), revision: str = "main", fields: Collection[str] = ()
) -> Rows:
    """Rows of a data set repository (kind hub) or of local files (kind local: a path or a glob pattern).

    fields: what to keep of a row, where it is there; tests of a program, say, would fill the memory. Raises ValueError
    naming the fix where files are absent, damaged, of no supported format or of several.
    """
    if kind == "hub":
        folder, names = dataset_files(path, revision, files)
        return _read(tuple(folder / name for name in names), folder, fields)
    found = sorted(map(Path, glob.glob(str(Path(path).expanduser()), recursive=True))) or [Path(path).expanduser()]
    absent = [name for name in found if not name.is_file()]
    if absent:
        raise ValueError(f"no such data file: {absent[0]}; give a path to a .jsonl, .jsonl.gz, .json or .parquet file")
    return _read(tuple(found), None, fields)


def _read(paths: tuple[Path, ...], folder: Path | None, fields: Collection[str]) -> Rows:
    rows, names = _table(paths, tuple(map(_stamp, paths)), tuple(sorted(fields)))
    facts = tuple(file_facts(path, folder) for path in paths)
    return Rows(rows, names, facts, commit_of(folder) if folder else None)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _table(
    paths: tuple[Path, ...], stamps: tuple[tuple[int, int], ...], fields: tuple[str, ...]
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Rows and names of the fields; the stamps notice a file that was changed. A field that a row lacks is None."""
    suffixes = {_suffix(path) for path in paths}
    if len(suffixes) > 1:
        raise ValueError(f"files of several formats ({', '.join(sorted(suffixes))}): name those of one format")
    reader = _parquet_rows if suffixes == {".parquet"} else _json_rows
    names: dict[str, None] = {}
    rows: list[Row] = []
    for path in paths:
        try:
            rows.extend({name: row[name] for name in fields if name in row} for row in reader(path, fields, names))
        except (ValueError, OSError, EOFError, datasets.exceptions.DatasetGenerationError) as error:
            why = str(error.__cause__ or error).splitlines()[0]
            raise ValueError(f"{path} cannot be read: {why}; get the file again") from error
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))} holds no rows")
    kept = [name for name in fields if name in names]
    return tuple({**dict.fromkeys(kept), **row} for row in rows), tuple(names)


def _parquet_rows(path: Path, fields: tuple[str, ...], names: dict[str, None]) -> Iterator[Row]:
    own = pq.read_schema(path).names
    names.update(dict.fromkeys(own))
    columns = [name for name in own if name in fields]
    if columns:
        yield from datasets.Dataset.from_parquet(str(path), columns=columns)
    else:
        yield from ({} for _ in range(pq.read_metadata(path).num_rows))


def _json_rows(path: Path, fields: tuple[str, ...], names: dict[str, None]) -> Iterator[Row]:
    """One object a line, or one list of objects."""
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig") as file:
        if _suffix(path) in (".json", ".json.gz"):
            content = json.load(file)
            lines: Iterable[Any] = content if isinstance(content, list) else [content]
        else:
            lines = (json.loads(line) for line in file if line.strip())
        for number, row in enumerate(lines, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is no JSON object")
            names.update(dict.fromkeys(row))
            yield row


def _suffix(path: Path) -> str:
    name = path.name.lower()
    for suffix in sorted(FORMATS, key=len, reverse=True):
        if name.endswith(suffix):
            return suffix
    raise ValueError(
        f"{path} is neither JSON nor parquet, and loading scripts are not run: convert it to one of "
        f"{', '.join(FORMATS)}, then source=local path=FILE"
    )
