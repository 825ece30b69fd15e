"""Is a model found where it lies, and if it lies nowhere, does the user learn what is missing and what gets it?"""

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import SHARDS, assert_same, write_folder, write_tokenizer
from hub_server import COMMIT, TOKEN, serve
from huggingface_hub import constants
from tiny import tiny_model

from aspire.model import load, load_tokenizer
from aspire.model.files import INDEX
from experiments import hub
from experiments.loading import local_path

REPO = "owner/tiny"


def checkpoint(folder: Path) -> Path:
    """A sharded checkpoint with a tokenizer and a file that no model needs."""
    write_folder(folder, tiny_model("qwen3", vocab=258), sharded=True)
    (folder / "README.md").write_text("not needed")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return write_tokenizer(folder)


def in_cache(cache: Path, source: Path, revision: str = "main") -> Path:
    """The folder of a snapshot as another program's download leaves it: refs and files."""
    snapshot = cache / f"models--{REPO.replace('/', '--')}" / "snapshots" / COMMIT
    shutil.copytree(source, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / revision).write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
@pytest.mark.parametrize("offline", [True, False])
def test_f05_a_cached_model_makes_no_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sockets: None, offline: bool, revision: str | None
) -> None:
    """With and without HF_HUB_OFFLINE, by branch and by commit: weights, tokenizer and revision, sockets blocked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    snapshot = in_cache(tmp_path / "cache", checkpoint(tmp_path / "m"))
    folder = local_path(REPO, revision)
    assert folder == snapshot and hub.commit_of(snapshot) == COMMIT
    assert_same(load(folder), tiny_model("qwen3", vocab=258))
    assert load_tokenizer(local_path(REPO, revision, weights=False)).chat_template.startswith("{% for m in")


def test_f05_a_local_folder_makes_no_call(tmp_path: Path, no_sockets: None) -> None:
    folder = checkpoint(tmp_path / "m")
    assert local_path(str(folder), None) == str(folder) and hub.commit_of(folder) is None
    assert load(folder).embed.dtype == torch.float32 and load_tokenizer(folder).eos_token_id == 257


@pytest.mark.parametrize("absent", [SHARDS[1], "config.json", "all"])
def test_f05_offline_a_missing_model_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sockets: None, absent: str
) -> None:
    """Not there, or there in part: refused at once, not after retries."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = in_cache(tmp_path / "cache", checkpoint(tmp_path / "m"))
    for path in snapshot.iterdir():
        if absent in (path.name, "all"):
            path.unlink()
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=f"not in cache: model {REPO}.*run `hf download {REPO}` first"):
        local_path(REPO, None)
    assert time.perf_counter() - begin < 1.0
    with pytest.raises(ValueError, match=f"model {REPO} at revision v2,.*hf download {REPO} --revision v2`"):
        local_path(REPO, "v2")


@pytest.mark.parametrize("path", ["/no/such/folder", "./x/y", "~/x", "a/b/c", "models/m.gguf"])
def test_an_absent_path_is_not_looked_for_on_the_hub(path: str, no_sockets: None) -> None:
    with pytest.raises(ValueError, match="does not exist; give a checkpoint's folder, a .gguf file or owner/name"):
        local_path(path, None)


def never(*_: object, **__: object) -> None:
    """A name server that does not answer."""
    time.sleep(60)


def no_route(*_: object, **__: object) -> None:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("lookup", [never, no_route])
def test_no_network_is_said_within_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookup: Callable[..., None]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=rf"Hub cannot be reached for model {REPO} \(\w+\): run `hf download {REPO}`"):
        local_path(REPO, None)
    assert time.perf_counter() - begin < 5.0


MESSAGES = {401: "valid login .401.: run `hf auth login`", 403: "to this account .403.: ask for access at http"} | {
    404: "has no model owner/tiny .404.: check its name", 503: "answered 503 for model owner/tiny: try again later"
}  # fmt: skip


@pytest.mark.parametrize("status", MESSAGES)
def test_f07_each_refusal_has_its_message_and_none_has_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], status: int
) -> None:
    """The token was sent, so it could have leaked: neither message nor output hold it."""
    with serve(tmp_path, monkeypatch) as server:
        server.refusals[f"models/{REPO}"] = status
        begin = time.perf_counter()
        with pytest.raises(ValueError) as caught:
            local_path(REPO, None)
        assert time.perf_counter() - begin < 5.0
    assert server.authorizations == {f"Bearer {TOKEN}"}
    assert [code for code, words in MESSAGES.items() if re.search(words, str(caught.value))] == [status]
    said = capfd.readouterr()
    assert TOKEN not in str(caught.value) + said.out + said.err


def test_f07_a_gated_model_whose_description_is_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub describes it to everyone and refuses the files."""
    with serve(tmp_path, monkeypatch) as server:
        server.repos[f"models/{REPO}"] = files_of(checkpoint(tmp_path / "m"))
        server.withheld[f"models/{REPO}"] = 403
        with pytest.raises(ValueError, match=MESSAGES[403]) as caught:
            local_path(REPO, None)
    assert TOKEN not in str(caught.value)


def test_a_model_of_the_hub_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use downloads what a model needs and no more; the second makes no call; the commit is known."""
    with serve(tmp_path, monkeypatch) as server:
        files = server.repos[f"models/{REPO}"] = files_of(checkpoint(tmp_path / "m"))
        tokenizer = local_path(REPO, None, weights=False)
        assert not list(Path(tokenizer).glob("*.safetensors"))
        folder = Path(local_path(REPO, None))
        asked = len(server.asked)
        assert local_path(REPO, None) == folder and local_path(REPO, COMMIT) == folder
        assert len(server.asked) == asked
    assert {path.name for path in folder.iterdir()} == files.keys() - {"README.md"} and INDEX in files
    assert hub.commit_of(folder) == COMMIT
    assert_same(load(folder), tiny_model("qwen3", vocab=258))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_of_the_messages_exists() -> None:
    """The installed client knows `hf download` and the options named."""
    words = hub.fetch_command(REPO, "v1", "dataset", ["*.json"]).split()
    command = [sys.executable, "-m", "huggingface_hub.cli.hf", words[1], "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert words[0] == "hf" and [word for word in words if word.startswith("--") and word not in said] == []
