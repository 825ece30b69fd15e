"""What do memory and time cost of loading a checkpoint? A random one of a model's full shape, in a fresh process.

python -m experiments.bench_load [model=qwen3_1p7b] [device=cpu] [folder=DIR] [shard_gib=2]

The checkpoint has the Hub's layout: shards of at most shard_gib GiB with an index, in the model's dtype. It is made in
`folder` where that holds none and stays there; without a folder it is made in a temporary one. Linux only.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import save_file

from aspire.model import Decoder, ModelSpec, hf_state_dict, load
from aspire.model.files import INDEX
from aspire.model.read import PIECE
from experiments.config import CONF, check_overrides, plain, register, script, split
from experiments.environment import synchronise

OWN = {"model": "qwen3_1p7b", "device": "cpu", "folder": "", "shard_gib": "2"}
MOST_MEMORY = 1.2  # of the checkpoint's bytes
MOST_TIME = 2.0  # of a plain read, on a GPU; a CPU also has to clear the pages of fresh memory
GIB = 2**30


def write_checkpoint(folder: Path, shape: dict[str, Any], dtype: torch.dtype, shard_bytes: int) -> None:
    """Random weights of a config's shape: config.json, shards, index."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Decoder(ModelSpec.from_hf(shape), dtype, "meta")
    shapes = {name: tuple(view.shape) for name, view in hf_state_dict(model).items()}
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, size in ((name, dtype.itemsize * torch.Size(shapes[name]).numel()) for name in shapes):
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    generator, files = torch.Generator().manual_seed(0), {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: random_tensor(shapes[name], dtype, generator) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(shape | {"dtype": str(dtype).removeprefix("torch.")}))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Matrices scaled by fan-in, vectors of ones: activations stay near 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).normal_(0, shape[1] ** -0.5, generator=generator)


def plain_read(folder: Path) -> float:
    """Seconds to read the folder's weights into one small buffer, over and over."""
    buffer = bytearray(PIECE)
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def memory(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure(folder: str, dtype: str, device: str) -> dict[str, float]:
    """Load once, in this process; bytes are those that loading adds to what the libraries hold already."""
    torch.zeros(1, device=device)  # a GPU's context is not the checkpoint's
    plain_read(Path(folder))  # all reads that count find the files as warm as this leaves them
    read_s = min(plain_read(Path(folder)) for _ in range(2))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, start = memory("VmRSS"), time.perf_counter()
    model = load(folder, getattr(torch, dtype), device)
    synchronise(device)
    seconds = time.perf_counter() - start
    assert all(parameter.device.type == torch.device(device).type for parameter in model.parameters())
    return {"read_s": read_s, "load_s": seconds, "peak": memory("VmHWM") - before}


def report(folder: Path, figures: dict[str, float], device: str) -> int:
    """Print what was measured; 1 where memory, or on a GPU time, is beyond its bound."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    share, times = figures["peak"] / size, figures["load_s"] / figures["read_s"]
    print(f"checkpoint   {size / GIB:.2f} GiB in {len(files)} files")
    print(f"plain read   {figures['read_s']:.2f} s ({size / figures['read_s'] / 1e9:.1f} GB/s)")
    print(f"load         {figures['load_s']:.2f} s on {device}, {times:.2f} x the plain read")
    print(f"host memory  {figures['peak'] / GIB:.2f} GiB at its peak, {share:.2f} x the checkpoint")
    return int(share > MOST_MEMORY or (device != "cpu" and times > MOST_TIME))


def main(arguments: list[str]) -> int:
    """Returns 1 where a bound is exceeded. Raises ValueError for unknown words."""
    if arguments[:1] == ["measure"]:
        print(json.dumps(measure(*arguments[1:])))
        return 0
    own, rest = split(arguments, OWN)
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides([f"model={own['model']}", *rest])
        conf = plain(compose("config", [f"model={own['model']}", *rest, "output_dir=.", "+run_id=load"]))["model"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(own["folder"] or temporary)
        if not (folder / "config.json").exists():
            write_checkpoint(folder, conf["shape"], getattr(torch, conf["dtype"]), int(float(own["shard_gib"]) * GIB))
        words = ["measure", str(folder), conf["dtype"], own["device"]]
        done = subprocess.run([sys.executable, "-m", __spec__.name, *words], stdout=subprocess.PIPE, check=True)
        return report(folder, json.loads(done.stdout.splitlines()[-1]), own["device"])


if __name__ == "__main__":
    script(main)
