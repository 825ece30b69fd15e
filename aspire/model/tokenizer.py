"""Which ids does a text become? The tokenizer of a folder, or one built from the vocabulary inside a GGUF file.

transformers can read a GGUF vocabulary too, but takes long over it and guesses the pre-tokenizer from the
architecture; here `tokenizer.ggml.pre` decides, and an unknown one is refused rather than guessed.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from aspire.model.files import read_json
from aspire.model.gguf_file import read_gguf
from aspire.model.load import resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"qwen2": rf"{CONTRACTIONS}|\p{{N}}|{REST}", "llama-bpe": rf"{CONTRACTIONS}|\p{{N}}{{1,3}}|{REST}"}


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerFast":
    """Tokenizer of a folder, a .gguf file or the embedded model; never asks the network.

    ValueError for an absent folder or file, a vocabulary that is no byte-level BPE, or an unknown pre-tokenizer.
    """
    path = resolve(source)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if not (path / "tokenizer.json").is_file():
        raise ValueError(f"{path} holds no tokenizer.json; download it with the checkpoint")
    from transformers import AutoTokenizer

    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path, local_files_only=True))
    wanted = read_json(path / "tokenizer_config.json", optional=True).get("add_bos_token")
    if wanted is not None and tokenizer.bos_token is not None:
        _set_bos(tokenizer, wanted)
    return tokenizer


def _set_bos(tokenizer: "PreTrainedTokenizerFast", wanted: bool) -> None:
    """Let texts begin with the begin token or not, as `add_bos_token` says; transformers 5 ignores that setting."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    if wanted == (ids[:1] == [tokenizer.bos_token_id]):
        return
    bare = processors.ByteLevel(trim_offsets=False)
    backend = tokenizer.backend_tokenizer
    bos = str(tokenizer.bos_token)
    backend.post_processor = _begin_with(bos, tokenizer.bos_token_id) if wanted else bare


def _begin_with(bos: str, index: int) -> processors.Sequence:
    """The begin token before each text."""
    template = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, index)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def prompt_ids(tokenizer: "PreTrainedTokenizerFast", prompt: str | list[dict[str, str]], **template: Any) -> list[int]:
    """Ids of a plain text, or of chat messages with the opening of the answer; `template` is handed to the template.

    The template brings its own special tokens, so its text must not be tokenised with special tokens once more.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **template)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _from_gguf(path: Path) -> "PreTrainedTokenizerFast":
    """Vocabulary, merges, special tokens and chat template of the metadata."""
    from transformers import PreTrainedTokenizerFast

    meta = {key.removeprefix("tokenizer.ggml."): value for key, value in read_gguf(path).meta.items()}
    if meta.get("model") != "gpt2":
        raise ValueError(
            f"{path}: vocabulary {meta.get('model')!r} is not byte-level BPE; use a folder's tokenizer.json"
        )
    tokens = meta["tokens"]
    names = {key: meta.get(f"{key}_token_id") for key in ("bos", "eos", "padding", "unknown")}
    special = {key: tokens[index] for key, index in names.items() if index is not None}
    tokenizer = _byte_level_bpe(meta, path)
    # llama.cpp adds the first token for this vocabulary unless the file says otherwise
    if meta.get("add_bos_token", meta.get("pre") == "llama-bpe") and "bos" in special:
        tokenizer.post_processor = _begin_with(special["bos"], meta["bos_token_id"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special.get("bos"),
        eos_token=special.get("eos"),
        pad_token=special.get("padding", special.get("eos")),
        unk_token=special.get("unknown"),
        chat_template=meta.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level_bpe(meta: dict[str, Any], path: Path) -> Tokenizer:
    """The `tokenizers` pipeline: normaliser, split, merges, special tokens."""
    pre, tokens = meta.get("pre"), meta["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    elif pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        parts = [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    else:
        supported = ", ".join(("smollm", *SPLITS))
        raise ValueError(f"{path}: pre-tokenizer {pre!r} is not supported; supported: {supported}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["token_type"]
    for kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special) for token in added])
    return tokenizer
