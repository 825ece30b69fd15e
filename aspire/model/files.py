"""Which files and tensors does a checkpoint folder hold, and is it whole? Answered from headers alone, in seconds."""

import json
import warnings
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
INDEX = "model.safetensors.index.json"


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


def safetensors_header(path: Path) -> dict[str, Shape]:
    """Shapes of a file's tensors; ValueError naming the file if its size does not fit its header."""
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
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def find_tensors(folder: Path, expected: dict[str, Shape]) -> dict[str, tuple[Path, Shape]]:
    """Every tensor of the folder with its file and shape.

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


def _merge(folder: Path, files: list[Path]) -> dict[str, tuple[Path, Shape]]:
    """Tensors of several files; ValueError where there is no file, or two hold the same name."""
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; convert the checkpoint to safetensors")
    found: dict[str, tuple[Path, Shape]] = {}
    for file in files:
        for name, shape in safetensors_header(file).items():
            if name in found:
                raise ValueError(f"{name} is both in {found[name][0]} and in {file}; remove the stale file")
            found[name] = (file, shape)
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


def tokenizer_eos(folder: Path) -> int | None:
    """Id of the tokenizer's own end token, None where the folder has no tokenizer or it names none."""
    token = read_json(folder / "tokenizer_config.json", optional=True).get("eos_token")
    content = token["content"] if isinstance(token, dict) else token
    if content is None:
        return None
    tokenizer = read_json(folder / "tokenizer.json", optional=True)
    added: dict[str, int] = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    return added.get(content)
