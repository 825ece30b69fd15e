"""How do the paper's workloads become prompts? Hugging Face data sets (parquet or JSON), filtered by measured length.

Rows come from the Hub at a recorded revision, from the cache when HF_HUB_OFFLINE=1, or from local files. Rows are kept
when their whole prompt, chat template included, lies in [min_tokens, max_tokens]; documents are cut only where a
model's context is shorter than the prompt.
"""

import functools
import glob
import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedTokenizerBase

from .item import Item, encode_chat, fit_document, request_seed, room_for_prompt

# With one of these as `path`, data_files names the files themselves; any other path is a Hub repository.
_FORMATS = ("json", "parquet")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class HubBenchmark:
    """A data set with the template that turns one row into one prompt.

    path: Hub id, or "json" / "parquet" with data_files. name: configuration of the data set, or several, read one
    after the other. template: the user's message with `{field}` placeholders; other braces are plain text.
    document_field: the placeholder that may be cut. requests: rows to ask, None = every row in the window. repeats:
    answers per row, each with its own seed. expected_rows: rows before filtering, None = not checked. thinking: handed
    to chat templates that know enable_thinking.
    """

    path: str
    template: str
    name: str | tuple[str, ...] | None = None
    split: str = "test"
    revision: str = "main"
    data_files: str | tuple[str, ...] | None = None
    document_field: str | None = None
    answer_field: str | None = None
    id_field: str | None = None
    min_tokens: int = 1
    max_tokens: int | None = None
    requests: int | None = None
    repeats: int = 1
    seed: int = 123
    expected_rows: int | None = None
    thinking: bool | None = None

    def __post_init__(self) -> None:
        for field in ("name", "data_files"):  # lists from a config file become tuples: the fields are a cache key
            value = getattr(self, field)
            object.__setattr__(self, field, value if value is None or isinstance(value, str) else tuple(value))
        if self.path in _FORMATS and not self.data_files:
            raise ValueError(f"path {self.path!r} needs data_files: the files to read")
        if self.document_field is not None and f"{{{self.document_field}}}" not in self.template:
            raise ValueError(f"document_field {self.document_field!r} is not a placeholder of the template")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}: no prompt can match")
        if self.repeats < 1 or (self.requests is not None and self.requests < 1):
            raise ValueError(f"requests and repeats must be >= 1, got {self.requests} and {self.repeats}")

    def provenance(self) -> dict[str, str | int | None]:
        """What the record keeps of the source. revision is the resolved commit, None for local files."""
        parts, revision = self._load()
        return {"path": self.path, "revision": revision, "rows": sum(part.num_rows for part in parts)}

    def build(self, tokenizer: PreTrainedTokenizerBase, context: int, max_new_tokens: int) -> list[Item]:
        """All rows once, then all rows again for every repeat.

        Raises ValueError if the source cannot be read, if it has other rows or fields than the config says, if too
        few prompts lie in the window, or if a prompt exceeds the context and has no document to cut.
        """
        room = room_for_prompt(context, max_new_tokens)
        prompts = [self._fit(tokenizer, row_id, row, room) for row_id, row in self._chosen(tokenizer)]
        return [
            Item(f"{row_id}#{repeat}", ids, answer, request_seed(self.seed, row_id, repeat), truncated, original)
            for repeat in range(self.repeats)
            for row_id, ids, answer, truncated, original in prompts
        ]

    def _load(self) -> tuple[tuple[datasets.Dataset, ...], str | None]:
        parts, revision = _load(self.path, _as_tuple(self.name), self.split, self.revision, _as_tuple(self.data_files))
        rows = sum(part.num_rows for part in parts)
        if self.expected_rows is not None and rows != self.expected_rows:
            raise ValueError(
                f"{self.path} ({self.split}, revision {revision or self.revision}) has {rows} rows, expected_rows is "
                f"{self.expected_rows}: pin the revision that was meant, or correct expected_rows"
            )
        return parts, revision

    def _chosen(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, Mapping[str, Any]]]:
        """The rows to ask in the order of the data set: the first of the seed's permutation that lie in the window."""
        parts, _ = self._load()
        places = [(part, row) for part, data in enumerate(parts) for row in range(data.num_rows)]
        wanted = len(places) if self.requests is None else self.requests
        chosen: list[tuple[tuple[int, int], Mapping[str, Any]]] = []
        # Rows are measured one by one and only until enough are found: a long data set takes minutes to tokenise.
        for place in random.Random(self.seed).sample(places, len(places)):
            row = parts[place[0]][place[1]]
            if self._in_window(len(self._render(tokenizer, row, self._document(row)))):
                chosen.append((place, row))
            if len(chosen) == wanted:
                break
        if not chosen or (self.requests is not None and len(chosen) < self.requests):
            raise ValueError(
                f"{self.path}: {len(chosen)} of {len(places)} rows have a prompt of {self.min_tokens} to "
                f"{self.max_tokens} tokens, requests is {self.requests}: lower requests or widen the window"
            )
        return [(self._row_id(place, row), row) for place, row in sorted(chosen, key=lambda pair: pair[0])]

    def _in_window(self, tokens: int) -> bool:
        return self.min_tokens <= tokens and (self.max_tokens is None or tokens <= self.max_tokens)

    def _row_id(self, place: tuple[int, int], row: Mapping[str, Any]) -> str:
        names = _as_tuple(self.name)
        files = _as_tuple(self.data_files)
        source = Path(files[0]).name.split(".")[0] if self.path in _FORMATS else self.path.rsplit("/", 1)[-1]
        part = [names[place[0]]] if len(names) > 1 else []
        return "/".join([source, *part, str(_field(row, self.id_field) if self.id_field else place[1])])

    def _document(self, row: Mapping[str, Any]) -> str:
        return "" if self.document_field is None else _text(_field(row, self.document_field))

    def _render(self, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], document: str) -> list[int]:
        # One pass over the template: braces in a question or document are text, never placeholders.
        text = _PLACEHOLDER.sub(
            lambda match: document if match[1] == self.document_field else _text(_field(row, match[1])), self.template
        )
        return encode_chat(tokenizer, text, thinking=self.thinking)

    def _fit(
        self, tokenizer: PreTrainedTokenizerBase, row_id: str, row: Mapping[str, Any], room: int
    ) -> tuple[str, tuple[int, ...], str | None, bool, int]:
        answer = None if self.answer_field is None else _text(_field(row, self.answer_field))
        if self.document_field is None:
            ids = self._render(tokenizer, row, "")
            if len(ids) > room:
                raise ValueError(
                    f"{row_id} has {len(ids)} prompt tokens and no document to cut, the context leaves {room}: "
                    "lower max_tokens or max_new_tokens"
                )
            return row_id, tuple(ids), answer, False, len(ids)
        ids, truncated, original = fit_document(
            tokenizer, lambda document: self._render(tokenizer, row, document), self._document(row), room
        )
        return row_id, tuple(ids), answer, truncated, original


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"the data set has no field {name!r}, it has: {', '.join(row)}")
    return row[name]


def _text(value: Any) -> str:
    """A field as prompt text: missing is empty, lists (several accepted answers, examples) are JSON."""
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


@functools.cache  # provenance and build ask for the same rows; the Hub is asked once a process
def _load(
    path: str, names: tuple[str, ...], split: str, revision: str, data_files: tuple[str, ...]
) -> tuple[tuple[datasets.Dataset, ...], str | None]:
    local = path in _FORMATS
    if local:
        _check_files(data_files)
    wanted = revision if local else _commit_on_hub(path, revision)
    # Naming the split here keeps a local file from being the "train" split of `datasets`.
    files = {split: list(data_files)} if data_files else None
    try:
        parts = tuple(
            datasets.load_dataset(path, name, split=split, revision=None if local else wanted, data_files=files)
            for name in names or (None,)
        )
    except (RuntimeError, ConnectionError, ValueError) as error:
        if (explained := _explained(error, path, names, split)) is None:
            raise
        raise explained from error
    return parts, None if local else _checked_commit(path, wanted, parts)


def _explained(error: Exception, path: str, names: tuple[str, ...], split: str) -> ValueError | None:
    """The error with the fix in it; None where `datasets` already says what is wrong (unknown split or name)."""
    if "scripts are no longer supported" in str(error):
        return ValueError(
            f"{path} is a data set with a loading script, which `datasets` no longer runs: name a parquet or JSON copy "
            "as path, or set path to json or parquet and data_files to its files"
        )
    if isinstance(error, ConnectionError) or "Couldn't find cache" in str(error):
        return ValueError(
            f"not in cache: {path} ({', '.join(names) or 'default'}, {split}); run with network first (without "
            "HF_HUB_OFFLINE), or set path to json or parquet and data_files to a local copy"
        )
    return None


def _check_files(data_files: Iterable[str]) -> None:
    for name in data_files:
        if "://" not in name and not glob.glob(name):
            raise ValueError(f"no such data file: {name}; give a path to a .jsonl, .jsonl.gz, .json or .parquet file")


def _commit_on_hub(path: str, revision: str) -> str:
    """The commit behind a revision; the revision itself for local folders and offline.

    One request with a short time limit comes before `datasets` gets to try: its own retries take half a minute.
    """
    if datasets.config.HF_HUB_OFFLINE or Path(path).exists():
        return revision
    try:
        return huggingface_hub.HfApi().dataset_info(path, revision=revision, timeout=_PROBE_SECONDS).sha
    except HfHubHTTPError as error:
        raise ValueError(f"the Hub refuses {path} at revision {revision}: {error}; check path and revision") from error
    except Exception as error:  # transport errors belong to whichever HTTP library the Hub client uses
        raise ValueError(
            f"the Hub cannot be reached for {path} ({error}); set HF_HUB_OFFLINE=1 to use the cache, or run with "
            "network first"
        ) from error


def _checked_commit(path: str, revision: str, parts: Iterable[datasets.Dataset]) -> str | None:
    """The commit the rows come from: `datasets` names the cache folder after it, so it is also known offline."""
    folders = {Path(file["filename"]).parent.name for part in parts for file in part.cache_files}
    commits = sorted(filter(_COMMIT.fullmatch, folders))
    if _COMMIT.fullmatch(revision) and commits not in ([], [revision]):
        raise ValueError(
            f"{path}: the newest copy in the cache is revision {', '.join(commits)}, the config pins {revision}: "
            "run once with network, or pin the cached one"
        )
    return ",".join(commits) or (revision if _COMMIT.fullmatch(revision) else None)
