"""Which files and tensors does a checkpoint folder hold, and is it whole? Answered from headers alone, in seconds."""

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies: its file, its first byte there, its shape and the dtype of its numbers."""

    file: Path
    offset: int
    shape: Shape
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object; {} for an absent optional file, ValueError for an absent or broken one."""
    if not path.is_file():
        if optional:
            return {}
        raise ValueError(f"{path} does not exist; give the folder of a Hugging Face checkpoint")
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON ({error}); download it again") from None
    return content


def safetensors_header(path: Path) -> dict[str, Stored]:
    """A file's tensors, one by one behind each other from the first byte after the header to the last of the file.

    ValueError naming the file where sizes do not fit, and naming the tensor where it is no floating-point one.
    Source: the safetensors format (8 bytes of header length, the header as JSON, the tensors).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if 2 <= length <= size - 8 else b"{}"
    try:
        header = json.loads(raw)
    except ValueError:
        header = {}
    header.pop("__metadata__", None)
    needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if not header or needed != size:
        raise ValueError(f"{path} is truncated or damaged: {size} bytes where {needed} belong; download it again")
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            kind, supported = entry["dtype"], ", ".join(DTYPES)
            raise ValueError(f"{path}: {name} is {kind}, supported: {supported}; use an unquantised checkpoint")
        first, end = entry["data_offsets"]
        found[name] = Stored(path, 8 + length + first, tuple(entry["shape"]), DTYPES[entry["dtype"]])
        if found[name].size != end - first:
            raise ValueError(f"{path} is damaged: {name} has {end - first} bytes for its shape; download it again")
    return found


def find_tensors(folder: Path, expected: dict[str, Shape]) -> dict[str, Stored]:
    """Every tensor of the folder.

    An index that names absent files gives way, with a warning, to files that hold a complete set without doubles;
    ValueError naming the absent files otherwise.
    """
    present = sorted(folder.glob("*.safetensors"))
    if not (folder / INDEX).is_file():
        single = [folder / "model.safetensors"]
        return _merge(folder, single if single[0] in present else present)
    named = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    if not named:
        raise ValueError(f"{folder / INDEX} has no weight_map; download it again")
    absent = [name for name in named if not (folder / name).is_file()]
    if not absent:
        return _merge(folder, [folder / name for name in named])
    message = f"{folder / INDEX} names {', '.join(absent)}, which the folder lacks"
    rest = [path for path in present if path.name not in named]
    if not rest:
        raise ValueError(f"{message}; download them again")
    found = _merge(folder, rest)
    if not expected.keys() <= found.keys():
        raise ValueError(f"{message}, and the other files there are no complete set; download them again")
    files = ", ".join(path.name for path in rest)
    warnings.warn(f"{message}; the index is stale, reading the complete set in {files}; delete it", stacklevel=3)
    return found


def _merge(folder: Path, files: list[Path]) -> dict[str, Stored]:
    """Tensors of several files; ValueError where there is no file, or two hold the same name."""
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; convert the checkpoint to safetensors")
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in safetensors_header(file).items():
            if name in found:
                raise ValueError(f"{name} is both in {found[name].file} and in {file}; remove the stale file")
            found[name] = stored
    return found


def check_tensors(found: dict[str, Shape], expected: dict[str, Shape], source: Path) -> None:
    """ValueError listing missing, unexpected and misshapen tensors, so that none keeps its initial memory."""
    wrong = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(found.keys() - expected.keys()),
        "of another shape": [n for n in expected if n in found and found[n] != expected[n]],
    }
    lists = [
        f"{len(names)} {kind} ({', '.join(names[:4])}{', ...' if names[4:] else ''})"
        for kind, names in wrong.items()
        if names
    ]
    if lists:
        raise ValueError(f"{source}: tensors do not fit its config: {'; '.join(lists)}; download the checkpoint again")


def absent_files(folder: Path, weights: bool = True) -> list[str]:
    """Names of the files that a checkpoint folder needs and lacks; of its tokenizer where weights is False."""
    needed = ["config.json"] if weights else ["tokenizer.json"]
    if weights and (folder / INDEX).is_file():
        needed += sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    elif weights and not list(folder.glob("*.safetensors")):
        needed.append("model.safetensors")
    return [name for name in needed if not (folder / name).is_file()]


def suggested_sampling(folder: Path) -> dict[str, Any]:
    """What generation_config.json suggests for sampling, for the reader of a record; nothing here applies it."""
    config = read_json(folder / "generation_config.json", optional=True)
    keys = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {key: config[key] for key in keys if config.get(key) is not None}


def tokenizer_eos(folder: Path) -> int | None:
    """Id of the tokenizer's own end token, None where the folder has no tokenizer or it names none."""
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    token = settings.get("eos_token")
    content = token["content"] if isinstance(token, dict) else token
    if content is None:
        return None
    tokenizer = read_json(folder / "tokenizer.json", optional=True)
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    ids |= {entry["content"]: int(index) for index, entry in settings.get("added_tokens_decoder", {}).items()}
    ids |= {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    return ids.get(content)
