"""Does each conf/model run on a checkpoint of its format, and does the record say what was in force?

Stand-ins are tiny and lie where the config looks for them: a Hub snapshot in the cache, sharded, with the files of the
original repository, or a GGUF file. Sockets are blocked.
"""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import EOS, write_folder, write_gguf, write_tokenizer
from hub_server import COMMIT, TOKEN, serve
from huggingface_hub import constants
from hydra import initialize_config_dir
from tiny import to_hf

from aspire.model import Decoder, ModelSpec, embedded_model_path, load, random_weights, read_spec
from aspire.request import Request
from experiments.compare import run_comparison
from experiments.config import CONF, check_overrides, choices, for_method, plain, register
from experiments.layout import build_items
from experiments.loading import describe, load_model, model_used, rope_rule, spec_of, unload
from experiments.outcome import request_line
from experiments.records import Record, read_requests

MODELS = choices("model")
HUB_MODELS = [name for name in MODELS if name != "smollm2_135m"]
LONG = [name for name in choices("benchmark") if name.startswith("longbench2")]
TINY = [
    "model.dtype=float32", "benchmark=arithmetic", "benchmark.max_new_tokens=16", "benchmark.source.requests=2",
    "batch=2", "budget=embedded", "sampling=greedy", "verification=greedy", "protocol.window_tokens=24",
    "protocol.warmup_passes=2", "protocol.repeats=1", "engine.device=cpu",
]  # fmt: skip
PARAMETERS = {
    "qwen3_1p7b": 1_720_574_976, "qwen3_8b": 8_190_735_360, "ds_r1_llama_8b": 8_030_261_248,
    "smollm2_135m": 134_515_008,
}  # fmt: skip
SUGGESTED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
# What the config.json of the original says where the shape of random weights differs.
ORIGINAL = {"qwen3_1p7b": {"max_position_embeddings": 40960}, "qwen3_8b": {"max_position_embeddings": 40960}}


def configs(*words: str, methods: tuple[str, ...] = ("autoregressive",)) -> list[dict[str, Any]]:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return [plain(for_method(list(words), method)) | {"run_id": "test"} for method in methods]


def stand_in(name: str) -> Decoder:
    """A tiny model of the config's own shape: its family, rope, head size and tied or untied head."""
    shape = configs(f"model={name}")[0]["model"]["shape"] | ORIGINAL.get(name, {})
    spec = ModelSpec.from_hf(shape)
    small = replace(
        spec,
        hidden_size=128,
        layers=3,
        heads=2,
        kv_heads=1,
        intermediate_size=96,
        vocab_size=288,
        end_ids=(),
        name=name,
    )
    return random_weights(small, torch.float32, "cpu", 7)


def write_snapshot(cache: Path, name: str, model: Decoder) -> Path:
    """The files of the original repository, in the cache of the Hub's client, as main."""
    repo = configs(f"model={name}")[0]["model"]["path"]
    snapshot = cache / f"models--{repo.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.parents[1].mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    snapshot.parent.mkdir()
    write_folder(snapshot, model, sharded=True, eos_token_id=270)
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [270, 271], **SUGGESTED}))
    return write_tokenizer(snapshot)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sockets: None) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    unload()
    return tmp_path / "hub"


def compare(out: Path, *words: str, methods: tuple[str, ...] = ("autoregressive",)) -> tuple[list[Record], str]:
    """Records of a comparison, and what was printed."""
    said: list[str] = []
    made = configs(*TINY, f"calibration.dir={out}", *words, methods=methods)
    records = run_comparison(made, out, said.append)
    assert [record.error for record in records] == [None] * len(records)
    return records, "\n".join(said)


@pytest.mark.parametrize("name", MODELS)
def test_the_shape_is_that_of_the_named_model(name: str) -> None:
    """Parameters as published; random weights of the shape have its context and rope."""
    (config,) = configs(f"model={name}", "model.weights=random", "benchmark=shapes")
    spec = spec_of(config)
    assert spec.weight_bytes(torch.bfloat16) == 2 * PARAMETERS[name]
    assert Decoder(spec, torch.bfloat16, "meta").embed.shape == (spec.vocab_size, spec.hidden_size)
    assert config["model"]["weights"] == "random" and config["model"]["name"] == name


@pytest.mark.parametrize("name", HUB_MODELS)
def test_a_cached_snapshot_runs_and_is_recorded(cache: Path, tmp_path: Path, name: str) -> None:
    """`model=NAME` and nothing else: sharded weights, tokenizer and commit come from the cache, without a call."""
    model = stand_in(name)
    write_snapshot(cache, name, model)
    records, said = compare(tmp_path / "out", f"model={name}", methods=("autoregressive", "vegas"))
    for record in records:
        used, spec = record.model, model.spec
        assert (used.source, used.revision) == (record.config["model"]["path"], COMMIT)
        assert used.end_ids == [EOS, 270, 271]  # tokenizer, config, generation config
        assert used.suggested_sampling == SUGGESTED
        assert used.context == spec.max_len
        kind = "llama3" if name == "ds_r1_llama_8b" else "default"
        assert used.rope is not None and used.rope["rope_type"] == kind and used.rope["theta"] == spec.rope_theta
        assert record.sampling.temperature == 0.0
    assert f"revision {COMMIT}, context {model.spec.max_len}; rope theta {model.spec.rope_theta}" in said
    texts = [{x.id: x.output_ids for x in read_requests(tmp_path / "out" / r.cell_id)} for r in records]
    shared = texts[0].keys() & texts[1].keys()
    assert shared and all(a == b for id in shared for a, b in zip(texts[0][id], texts[1][id], strict=False))


def test_a_quantised_gguf_file_runs_with_a_tokenizer_of_its_own(cache: Path, tmp_path: Path) -> None:
    """smollm2_135m is a Q4_1 file: a stand-in of that type, and a tokenizer folder whose end id joins the file's."""
    file = write_gguf(tmp_path / "m.gguf", stand_in("smollm2_135m"), gguf.GGMLQuantizationType.Q4_1)
    folder = write_tokenizer(tmp_path / "tokenizer")
    (record,), _ = compare(tmp_path / "out", "model=smollm2_135m", f"model.path={file}", f"model.tokenizer={folder}")
    assert record.model.source == str(file) and record.model.revision is None
    assert record.model.end_ids == [3, 5, EOS] and record.model.suggested_sampling is None
    assert read_spec(embedded_model_path()).weight_bytes(torch.float32) == 4 * PARAMETERS["smollm2_135m"]


@pytest.mark.parametrize("benchmark", LONG)
@pytest.mark.parametrize("name", HUB_MODELS)
def test_c01_long_benchmarks_put_yarn_in_force_where_a_model_needs_it(cache: Path, name: str, benchmark: str) -> None:
    """Qwen3 beyond 32k: factor 4.0 of its card, with the warning that names both lengths; Llama keeps its own rule."""
    model = stand_in(name)
    write_snapshot(cache, name, model)
    words = (f"model={name}", f"benchmark={benchmark}", "model.dtype=float32", "engine.device=cpu")
    (config,) = configs(*words)
    if name == "ds_r1_llama_8b":
        assert rope_rule(config) is None
        assert spec_of(config).rope_scaling == model.spec.rope_scaling and spec_of(config).max_len == 131072
        return
    with pytest.warns(UserWarning, match="reaches 131072 tokens, but max_position_embeddings is 40960"):
        spec = spec_of(config)
        loaded = load_model(config)
    used = model_used(config, spec)
    assert used.context == 131072 and used.rope is not None
    assert (used.rope["rope_type"], used.rope["factor"]) == ("yarn", 4.0)
    assert used.rope["attention_scale"] == pytest.approx(1.1386, abs=1e-4) == loaded.attention_scale
    assert "rope theta 1000000.0, rope_type yarn, factor 4.0" in describe(config, used)
    (near,) = configs(f"model={name}", "benchmark=aime25", "model.dtype=float32", "engine.device=cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(near).spec.rope_scaling is None  # not the model that was kept from the long benchmark
    (off,) = configs(*words, "model.long_rope_scaling=null")
    assert spec_of(off).max_len == 40960


def test_the_command_line_sets_any_rule(cache: Path) -> None:
    """`model.rope_scaling={...}` replaces what checkpoint, shape and benchmark say, for real and random weights."""
    write_snapshot(cache, "qwen3_1p7b", stand_in("qwen3_1p7b"))
    register()
    rule = "{rope_type:yarn,factor:2.0,original_max_position_embeddings:32768}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(["model=qwen3_1p7b", f"model.rope_scaling={rule}", "model.long_rope_scaling=null"])
    for weights in ("real", "random"):
        (config,) = configs(
            "model=qwen3_1p7b", "benchmark=longbench2_80k", f"model.rope_scaling={rule}", f"model.weights={weights}"
        )
        with pytest.warns(UserWarning, match="factor 2.0 x 32768 reaches 65536"):
            spec = spec_of(config)
        assert spec.rope_scaling is not None and spec.rope_scaling["factor"] == 2.0 and spec.max_len == 65536
    for word, said in (("yarn", "is a mapping"), ("{rope_type:yran}", "'yran' is not supported")):
        (config,) = configs("model=qwen3_1p7b", f"model.rope_scaling={word}")
        with pytest.raises(ValueError, match=said):
            model_used(config, spec_of(config))


def test_the_shapes_benchmark_follows_the_same_rule() -> None:
    """Random weights at 16k and at 64k tokens of context."""
    kinds = {}
    for context in (16384, 65536):
        (config,) = configs(
            "model=qwen3_8b", "model.weights=random", "benchmark=shapes", f"benchmark.source.context={context}"
        )
        kinds[context] = (model_used(config, spec_of(config)).rope or {})["rope_type"]
    assert kinds == {16384: "default", 65536: "yarn"}


class TestSamplingDefaults:
    """F08: the generation config suggests temperature 0.6, top_k 20, top_p 0.95; nothing of it is ever applied."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        model = stand_in("qwen3_1p7b")
        folder = write_tokenizer(write_folder(tmp_path / "m", model))
        (folder / "generation_config.json").write_text(json.dumps(SUGGESTED))
        unload()
        return folder

    def test_temperature_0_is_argmax(self, folder: Path, tmp_path: Path) -> None:
        words = ("model=qwen3_1p7b", f"model.path={folder}", "protocol.replay=drain", "protocol.window_tokens=32")
        records, said = compare(tmp_path / "out", *words, methods=("autoregressive", "vegas", "aspire_fsm"))
        twin = to_hf(load(folder))
        for record in records:
            lines = read_requests(tmp_path / "out" / record.cell_id)
            assert (record.sampling.temperature, record.model.suggested_sampling) == (0.0, SUGGESTED)
            assert lines
            for line in lines:
                prompt = self.prompt(line.prompt_ids_sha1, folder)
                ids = torch.tensor([prompt + line.output_ids])
                with torch.no_grad():
                    best = twin(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
                assert best.tolist() == line.output_ids
        assert "sampling: temperature 0.0, top_k 0, top_p 1.0" in said
        assert "not applied: the checkpoint suggests do_sample True, temperature 0.6, top_k 20, top_p 0.95" in said

    def prompt(self, digest: str, folder: Path) -> list[int]:
        """The prompt of that hash."""
        (config,) = configs(*TINY, "model=qwen3_1p7b", f"model.path={folder}")
        items, _ = build_items(config, spec_of(config))
        asked = [list(item.prompt_ids) for item in items]
        return next(ids for ids in asked if request_line(Request("a", ids)).prompt_ids_sha1 == digest)

    def test_nothing_set_is_the_config_and_temperature_1_is_1(self, folder: Path, tmp_path: Path) -> None:
        """The default group is `paper`, whatever the file says; a number on the command line is that number."""
        base = ["model=qwen3_1p7b", f"model.path={folder}", "verification=rejection"]
        for number, (words, wanted) in enumerate(
            [(["sampling=paper"], (0.7, 50, 0.9)), (["sampling=greedy", "sampling.temperature=1.0"], (1.0, 0, 1.0))]
        ):
            records, said = compare(tmp_path / str(number), *base, *words, methods=("autoregressive", "vegas"))
            for record in records:
                used = record.sampling
                assert (used.temperature, used.top_k, used.top_p) == wanted
            assert f"sampling: temperature {wanted[0]}, top_k {wanted[1]}, top_p {wanted[2]}" in said
        assert configs("model=qwen3_1p7b")[0]["sampling"] == {"temperature": 0.7, "top_k": 50, "top_p": 0.9}


def test_f07_a_refused_model_fails_its_cells_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """403 for one model, a local folder for the next: a failed record with the message, then a finished one."""
    folder = write_tokenizer(write_folder(tmp_path / "m", stand_in("qwen3_1p7b")))
    with serve(tmp_path, monkeypatch) as server:
        server.refusals["models/Qwen/Qwen3-8B"] = 403
        gated = run_comparison(configs(*TINY, "model=qwen3_8b"), tmp_path / "gated", lambda _: None)
    assert [record.status for record in gated] == ["failed"]
    assert (
        gated[0].error is not None and "to this account (403)" in gated[0].error and "Qwen/Qwen3-8B" in gated[0].error
    )
    assert TOKEN not in gated[0].model_dump_json()
    compare(tmp_path / "next", "model=qwen3_1p7b", f"model.path={folder}")
