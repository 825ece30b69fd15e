"""What is said when the Hub refuses, is not there or has other files, and is a cached run silent on the network?"""

import io
import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import COMMIT, TOKEN, HubServer, serve, use
from huggingface_hub import constants
from hydra import initialize_config_dir

from experiments import fetch, hub
from experiments.benchmarks import FileBenchmark
from experiments.config import CONF, register

ROWS = [{"problem": f"What is {n} + {n}?", "answer": 2 * n, "problem_idx": n} for n in range(1, 31)]
AIME = {"data/train-00000.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(), "README.md": b"AIME"}
SCRIPT = {"LongBench.py": b"raise SystemExit('a loading script ran')", "data.zip": b"PK"}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with serve(tmp_path, monkeypatch) as fake:
        yield fake


def aime(**fields: object) -> FileBenchmark:
    given = {"path": "MathArena/aime_2025", "files": ["data/*.jsonl"], "template": "{{ problem }}", "rows": 30}
    return FileBenchmark(**(given | fields))


def message(call) -> str:
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        call()
    assert time.monotonic() - start < 5
    text = f"{caught.value} {caught.value.__cause__}"
    assert TOKEN not in text
    return text


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_refusals_have_a_message_each(served: HubServer, tmp_path: Path, monkeypatch, kind) -> None:
    """401, 403, 404, a broken Hub and no network are told apart, name the repository, and print no token. Case F07."""

    def ask() -> object:
        if kind == "model":
            return hub.model_folder("owner/name", None)
        return hub.dataset_files("owner/name", "main", ["*.jsonl"])

    texts = {}
    for status in (401, 403, 404, 500):
        served.refusals[f"{kind}s/owner/name"] = status
        texts[status] = message(ask)
    use("http://127.0.0.1:9", tmp_path, monkeypatch)  # the discard port: nobody listens
    texts["no network"] = message(ask)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    texts["offline"] = message(ask)
    assert len(set(texts.values())) == 6
    assert all("owner/name" in text for text in texts.values())
    assert "hf auth login" in texts[401] and "ask for access at http" in texts[403] and "check its name" in texts[404]
    assert "answered 500" in texts[500]
    command = "hf download owner/name" + (" --repo-type dataset" if kind == "dataset" else "")
    assert command in texts["no network"] and command in texts["offline"]


def test_absent_repository_revision_and_file(served: HubServer) -> None:
    assert "(401)" in message(aime().read)  # the Hub does not say whether a repository exists
    served.repos["datasets/MathArena/aime_2025"] = AIME
    assert "MathArena/aime_2025 at revision v9 (404)" in message(aime(revision="v9").read)
    absent = message(aime(files=["data/*.jsonl", "more/*.parquet"]).read)
    assert "has no file more/*.parquet, it has: data/train-00000.jsonl, README.md" in absent


def test_loading_script_is_never_run(served: HubServer) -> None:
    """A repository of a script and a zip gets a plain message with the alternatives. Case F06."""
    served.repos["datasets/zai-org/LongBench"] = SCRIPT
    text = message(aime(path="zai-org/LongBench", files=["narrativeqa/*.parquet"]).read)
    assert "a loading script never runs" in text and "source=local path=FILE" in text and "LongBench.py" in text
    assert "loading scripts are not run" in message(aime(path="zai-org/LongBench", files=["*.py"]).read)


def test_what_was_fetched_needs_no_network_again(served: HubServer, monkeypatch, request) -> None:
    """Cached data and models are used with blocked sockets and without an offline flag. Case F05."""
    served.repos["datasets/MathArena/aime_2025"] = AIME
    served.repos["models/owner/name"] = {"config.json": b"{}", "tokenizer.json": b"{}", "README.md": b"no weights"}
    rows = aime().read()
    folder = hub.model_folder("owner/name", weights=False)
    assert rows.revision == hub.commit_of(folder) == COMMIT and len(rows.rows) == 30
    assert not any("README" in path for path in served.asked)
    request.getfixturevalue("no_sockets")
    before = len(served.asked)
    again = aime().read()
    assert (again.revision, again.sha256, again.rows) == (rows.revision, rows.sha256, rows.rows)
    assert aime(revision=COMMIT, sha256=rows.sha256).read().rows == rows.rows
    assert hub.model_folder("owner/name", weights=False) == folder
    assert len(served.asked) == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert aime().read().sha256 == rows.sha256
    assert "not in cache: data set owner/other" in message(aime(path="owner/other").read)


def test_half_a_download_is_no_cache(served: HubServer, monkeypatch) -> None:
    """One of two files in the cache: the other is fetched, or named offline with the command for both."""
    served.repos["datasets/MathArena/aime_2025"] = AIME | {"more.jsonl": AIME["data/train-00000.jsonl"]}
    aime().read()
    both = aime(files=["data/*.jsonl", "more.jsonl"], rows=60)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "--include 'data/*.jsonl' --include more.jsonl" in message(both.read)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert [file.name for file in both.read().files] == ["data/train-00000.jsonl", "more.jsonl"]


def test_row_count_and_hash_are_checked(served: HubServer) -> None:
    """Other data than the config means is refused with both numbers. Case F06."""
    served.repos["datasets/MathArena/aime_2025"] = AIME
    assert f"(revision {COMMIT}) has 30 rows, benchmark.source.rows is 503" in message(aime(rows=503).read)
    wrong = "0" * 64
    assert f"{aime().read().sha256}, benchmark.source.sha256 is {wrong}" in message(aime(sha256=wrong).read)


def test_fetch_says_what_it_got(served: HubServer, capsys) -> None:
    """File, revision, rows, hash and bytes of each; what fails is said and counted, the rest goes on."""
    served.repos["datasets/MathArena/aime_2025"] = {"data/train-00000.parquet": _parquet(ROWS)}
    served.refusals["datasets/Idavidrein/gpqa"] = 403
    words = ["model=smollm2_135m", "benchmark=aime25,gpqa_diamond,pystdlib"]
    assert fetch.main(words) == 1
    out = capsys.readouterr().out
    size, sha = len(_parquet(ROWS)), aime(files=["data/*.parquet"]).read().sha256
    assert f"benchmark aime25 (MathArena/aime_2025): revision {COMMIT}, 30 rows, 1 files, {size} bytes" in out
    assert f"data/train-00000.parquet  {size} bytes  sha256 {sha}" in out and len(sha) == 64
    assert "benchmark pystdlib: embedded, nothing to fetch" in out
    assert "failed: benchmark=gpqa_diamond: the Hub refuses" in out and "/datasets/Idavidrein/gpqa" in out
    assert out.endswith(f"ok 3 / failed 1: {size} bytes in place\n") and TOKEN not in out


def test_fetch_takes_the_configs_of_a_profile() -> None:
    """The paper's profile needs three models and five benchmarks; a misspelt name is refused with the nearest."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        models, benchmarks = fetch.wanted(["profile=paper"])
        assert [words[0] for words in models] == ["model=qwen3_1p7b", "model=qwen3_8b", "model=ds_r1_llama_8b"]
        names = ["aime25", "codeelo", "longbench_16k", "longbench2_30k", "longbench2_80k"]
        assert [words[0] for words in benchmarks] == [f"benchmark={name}" for name in names]
        assert fetch.wanted(["benchmark=math500"]) == ([], [["benchmark=math500"]])
        with pytest.raises(ValueError, match="unknown benchmark 'math50' - did you mean 'math500'"):
            fetch.wanted(["benchmark=math50"])
        with pytest.raises(ValueError, match="unknown profile 'papr' - did you mean 'paper'"):
            fetch.wanted(["profile=papr"])


def _parquet(rows: list[dict]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()
