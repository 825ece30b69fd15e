"""What would the Hugging Face Hub answer? Repositories with one commit each, and refusals, to the real client."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import datasets
import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "cafe"
TOKEN = "hf_thisIsASecretOfTheUser1234567890"
ONCE_A_PROCESS = "/api/agent-harnesses"  # what newer clients ask for themselves, before their first request
BRANCHES = ("main", "refs/convert/parquet")
Answer = tuple[int, dict[str, str], bytes]


class HubServer:
    """repos: "datasets/owner/name" or "models/owner/name" to {file: bytes}. refusals: the same names to an HTTP status.

    withheld: a status for files alone, as of a gated repository whose description is public. asked: the path of every
    request that came. authorizations: what the client said of itself.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, int] = {}
        self.withheld: dict[str, int] = {}
        self.authorizations: set[str | None] = set()
        self.asked: list[str] = []

    def answer(self, path: str) -> Answer:
        """Status, headers and body, as the Hub gives them."""
        self.asked.append(path)
        repo, rest = _split(unquote(path).strip("/").split("/"))
        if repo in self.refusals:
            return self.refusals[repo], {}, b'{"error": "no"}'
        if repo not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = self.repos[repo]
        match rest:
            case ["resolve", *_] if repo in self.withheld:
                return self.withheld[repo], {"X-Error-Code": "GatedRepo"}, b""
            case ["resolve", commit, *name]:
                return _file(files.get("/".join(name)), commit)
            case ["tree", *_]:
                tree = [{"type": "file", "path": n, "size": len(c), "oid": _oid(c)} for n, c in files.items()]
                return 200, {}, json.dumps(tree).encode()
            case ["revision", *words] if "/".join(words) not in BRANCHES and len(words[0]) != len(COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit = rest[1] if rest and len(rest[1]) == len(COMMIT) else COMMIT
        facts = {"id": repo.split("/", 1)[1], "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return 200, {}, json.dumps(facts).encode()


def _split(parts: list[str]) -> tuple[str, list[str]]:
    """The repository that a path names, and what is asked of it."""
    if parts[0] == "api":
        return "/".join(parts[1:4]), parts[4:]
    at = parts.index("resolve")
    repo = "/".join(parts[:at])
    return repo if repo.startswith("datasets/") else f"models/{repo}", parts[at:]


def _file(content: bytes | None, commit: str) -> Answer:
    if content is None:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}, content


def _oid(content: bytes) -> str:
    return sha1(content).hexdigest()


@contextmanager
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub of this process is a server of ours, its cache an empty folder, and the user has a token."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = 404, dict[str, str](), b"{}"
            if self.path != ONCE_A_PROCESS:
                hub.authorizations.add(self.headers.get("Authorization"))
                status, headers, body = hub.answer(urlsplit(self.path).path)
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    use(f"http://127.0.0.1:{server.server_port}", folder, monkeypatch)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the client at an endpoint and at an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
