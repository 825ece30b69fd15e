"""What does the Hugging Face Hub hold for a run, and what is said when it holds nothing? Cache first, then the network.

A snapshot that lies complete in the local cache is used without a network call, whatever the revision of the Hub is
today. Messages name the fix and repeat nothing of the client's own text, which may hold a token or a proxy's password.
"""

import hashlib
import re
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

from aspire.model.files import absent_files

Kind = Literal["model", "dataset"]
PROBE_SECONDS = 3.0  # an answer of the Hub takes a fraction of it; without network a run is refused within 5 s
WORDS = ("*.json", "*.txt", "*.jinja")  # config, tokenizer and chat template
WEIGHTS = "*.safetensors"
_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class DataFile:
    """A file that a run reads. name: its path in the repository or on this machine. size: bytes."""

    name: str
    size: int
    sha256: str


def is_hub_id(name: str) -> bool:
    """`owner/name` or `name`: what could be a repository of the Hub and is no path of a file."""
    return bool(_ID.fullmatch(name)) and not name.endswith((".gguf", ".json", ".safetensors"))


def model_folder(repo: str, revision: str | None = None, weights: bool = True) -> Path:
    """Folder of a model's snapshot; without weights only what config and tokenizer need.

    revision: a commit, tag or branch, None = main. Raises ValueError naming the fix where the snapshot is not in the
    cache and the Hub does not give it: offline, no network, 401, 403, 404.
    """
    found = cached_model(repo, revision, weights)
    if found is not None:
        return found
    commit_on_hub(repo, revision)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_of_model(weights)))
    except Exception as error:  # the client has a dozen kinds of failure
        raise explain(error, repo, revision) from None


def cached_model(repo: str, revision: str | None = None, weights: bool = True) -> Path | None:
    """Folder of a snapshot that is in the cache with every file it needs, or None; no network call."""
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=_of_model(weights), local_files_only=True)
    except (LocalEntryNotFoundError, IncompleteSnapshotError):
        return None
    except HFValidationError as error:
        raise explain(error, repo, revision) from None
    return None if absent_files(Path(folder), weights) else Path(folder)


def _of_model(weights: bool) -> list[str]:
    return [*WORDS, WEIGHTS] if weights else list(WORDS)


def dataset_files(repo: str, revision: str, patterns: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Folder of a data set's snapshot, and the names of its files that match: in the patterns' order, then by name.

    From the cache without a network call; else from the Hub. Raises ValueError naming the fix where a pattern matches
    nothing, and as `explain` words it where the Hub gives nothing.
    """
    found = cached_dataset(repo, revision, patterns)
    if found is not None:
        return found
    commit = commit_on_hub(repo, revision, "dataset", patterns)
    try:
        names = HfApi().list_repo_files(repo, repo_type="dataset", revision=commit)
        if lacking := [pattern for pattern in patterns if not _matching(names, [pattern])]:
            raise ValueError(
                f"{_named(repo, revision, 'dataset')} has no file {', '.join(lacking)}, it has: {_first(names)}. Only "
                "parquet and JSON files are read, a loading script never runs: correct benchmark.source.files, name a "
                "copy in one of these formats as benchmark.source.path, or give a file with source=local path=FILE"
            )
        folder = snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=list(patterns))
    except Exception as error:
        if type(error) is ValueError:  # our own; the client's kinds of it are others
            raise
        raise explain(error, repo, revision, "dataset", patterns) from None
    return Path(folder), _matching(names, patterns)


def cached_dataset(repo: str, revision: str, patterns: Sequence[str]) -> tuple[Path, tuple[str, ...]] | None:
    """As `dataset_files`, from the cache alone; None where a file is not there."""
    try:
        found = snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=list(patterns), local_files_only=True
        )
    except (LocalEntryNotFoundError, IncompleteSnapshotError):
        return None
    except HFValidationError as error:
        raise explain(error, repo, revision, "dataset") from None
    folder = Path(found)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    whole = all(_matching(names, [pattern]) for pattern in patterns)
    return (folder, _matching(names, patterns)) if whole and patterns else None


def file_facts(path: Path, folder: Path | None = None) -> DataFile:
    """Name (within its folder, or of the file alone), size and hash of a file, which is read for it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = path.relative_to(folder).as_posix() if folder else path.name
    return DataFile(name, path.stat().st_size, digest)


def combined_hash(files: Iterable[DataFile]) -> str:
    """SHA-256 of the hashes of several files, by content: of one file its own hash."""
    hashes = [file.sha256 for file in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _matching(names: Iterable[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """`*` in a pattern stands for folders too, as in the client's own."""
    ordered = sorted(names)
    return tuple(dict.fromkeys(name for pattern in patterns for name in ordered if fnmatchcase(name, pattern)))


def _first(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def commit_on_hub(repo: str, revision: str | None = None, kind: Kind = "model", patterns: Sequence[str] = ()) -> str:
    """The commit behind a revision, asked in one request without retries.

    Raises ValueError as `explain` words it, at once when offline, else within PROBE_SECONDS.
    """
    if constants.HF_HUB_OFFLINE:
        raise not_cached(repo, revision, kind, patterns)
    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        return str(_within(PROBE_SECONDS, lambda: ask(repo, revision=revision, timeout=PROBE_SECONDS).sha))
    except Exception as error:  # transport errors belong to whichever HTTP library the client uses
        raise explain(error, repo, revision, kind, patterns) from None


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the cache holds; None for a folder elsewhere."""
    name = folder.name
    return name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(name) else None


def explain(
    error: Exception, repo: str, revision: str | None = None, kind: Kind = "model", patterns: Sequence[str] = ()
) -> ValueError:
    """The ValueError that says which of 401, 403, 404, another answer or no network it was, and what to do."""
    what = _named(repo, revision, kind)
    code = _status(error)
    if code == 401:
        return ValueError(
            f"the Hub does not show {what} without a valid login (401): run `hf auth login` or set HF_TOKEN; check the "
            "name too, since a name that does not exist is answered alike"
        )
    if code == 403:
        page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
        return ValueError(f"the Hub refuses {what} to this account (403): ask for access at {page}")
    if code == 404:
        return ValueError(f"the Hub has no {what} (404): check its name and revision")
    if code is not None:
        return ValueError(f"the Hub answered {code} for {what}: try again later, or give a local copy")
    if isinstance(error, HFValidationError):
        return ValueError(f"{repo!r} is neither a local path nor a name of the form owner/name")
    if isinstance(error, OSError) and error.filename is not None:
        return ValueError(f"{what} cannot be stored: {error.strerror} ({error.filename}); make room, or set HF_HOME")
    command = fetch_command(repo, revision, kind, patterns)
    return ValueError(
        f"the Hub cannot be reached for {what} ({type(error).__name__}): run `{command}` where there is network, or "
        "give a local copy"
    )


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error, or of what it was raised from: the client wraps an answer more than once."""
    while error is not None:
        code = getattr(getattr(error, "response", None), "status_code", None)
        if code is not None:
            return int(code)
        error = error.__cause__
    return None


def not_cached(
    repo: str, revision: str | None = None, kind: Kind = "model", patterns: Sequence[str] = ()
) -> ValueError:
    """What is said offline of something that the cache lacks."""
    command = fetch_command(repo, revision, kind, patterns)
    return ValueError(f"not in cache: {_named(repo, revision, kind)}, and HF_HUB_OFFLINE is set: run `{command}` first")


def fetch_command(repo: str, revision: str | None = None, kind: Kind = "model", patterns: Sequence[str] = ()) -> str:
    """The command line that puts a repository, or what of it matches the patterns, into the cache."""
    words = ["hf", "download", repo]
    words += ["--repo-type", "dataset"] if kind == "dataset" else []
    words += ["--revision", revision] if revision else []
    words += [word for pattern in patterns for word in ("--include", pattern)]
    return shlex.join(words)


def _named(repo: str, revision: str | None, kind: Kind) -> str:
    return f"{'data set' if kind == 'dataset' else 'model'} {repo}" + (f" at revision {revision}" if revision else "")


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call; TimeoutError if it takes longer, also where it waits for a name server."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {seconds} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
