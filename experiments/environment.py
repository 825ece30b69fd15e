"""On what did it run? Device, driver, versions, commit, and the measured copy bandwidth."""

import os
import platform
import subprocess
import time
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from experiments.records import Environment


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


@lru_cache
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpu_gib() -> float:
    """Memory of the first GPU, 0 without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0


@lru_cache
def copy_tb_s(device: str) -> float:
    """Bytes read + written a second by a device-to-device copy, TB/s; best of five."""
    size = 2**32 if device.startswith("cuda") else 2**27  # long beside what a launch and a wait cost
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(_timed_copy(target, source) for _ in range(5))
    return 2 * size / best / 1e12


def _timed_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    synchronise(source.device.type)
    start = time.perf_counter()
    target.copy_(source)
    synchronise(source.device.type)
    return time.perf_counter() - start


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> tuple[str | None, bool | None]:
    """The commit of this code, and whether files differ from it.

    ASPIRE_COMMIT names the commit that a tree without its history was copied from, unchanged.
    """
    if named := os.environ.get("ASPIRE_COMMIT"):
        return named, False
    # Redrawn results do not make a run's code another one.
    status = git("status", "--porcelain", "--untracked-files=no", "--", ":!results")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)


def driver() -> str | None:
    """NVIDIA driver version, None without one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no package, no library or no device: there is no driver to name
        return None


def environment(device: str) -> Environment:
    head, dirty = commit()
    return Environment(
        device=device_name(device), driver=driver() if device.startswith("cuda") else None,
        torch=torch.__version__, triton=installed("triton"), transformers=installed("transformers"),
        commit=head, dirty=dirty, copy_tb_s=copy_tb_s(device),
    )  # fmt: skip
