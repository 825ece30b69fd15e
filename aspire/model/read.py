"""How do a file's numbers get into a tensor? Straight into its memory, in pieces; no file is mapped or held whole.

A mapped file counts as memory of the process until it is closed, so a checkpoint read through a map costs twice its
size. Here a CPU tensor of the stored dtype is the buffer that the file is read into; anything else goes through a
buffer of `PIECE` bytes, and on its way to a GPU through two pinned ones, so that reading and copying overlap.
"""

from collections.abc import Iterable
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from aspire.model.files import Stored

PIECE = 32 * 2**20  # bytes


def read_tensors(places: Iterable[tuple[Stored, Tensor]]) -> None:
    """Fill each contiguous tensor with what is stored for it, cast to its dtype; file by file, in the order of bytes.

    Raises ValueError naming the file where it ends early, OSError as the file system does.
    """
    ordered = sorted(places, key=lambda place: (place[0].file, place[0].offset))
    files: dict[Path, list[tuple[Stored, Tensor]]] = {}
    for stored, target in ordered:
        assert target.is_contiguous() and target.shape == stored.shape
        files.setdefault(stored.file, []).append((stored, target))
    pieces = _Pieces(any(target.is_cuda for _, target in ordered))
    for path, inside in files.items():
        with path.open("rb", buffering=0) as file:
            for stored, target in inside:
                file.seek(stored.offset)
                if target.is_cpu and target.dtype == stored.dtype:
                    _fill(file, path, target.view(-1))
                else:
                    pieces.copy(file, path, stored, target.view(-1))
    pieces.finish()


class _Pieces:
    """Two buffers that take turns: while one is copied to the device, the other is read into."""

    def __init__(self, pinned: bool) -> None:
        self.pinned, self.turn = pinned, 0
        self.buffers: list[Tensor] = []
        self.copied: list[torch.cuda.Event] = []

    def copy(self, file: FileIO, path: Path, stored: Stored, target: Tensor) -> None:
        """Read one tensor piece by piece; target is flat."""
        step = PIECE // stored.dtype.itemsize
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            buffer = self._free().view(stored.dtype)[: part.numel()]
            _fill(file, path, buffer)
            if part.is_cuda and part.dtype == stored.dtype:
                part.copy_(buffer, non_blocking=True)
                self.copied[self.turn].record()
            else:
                part.copy_(buffer)

    def _free(self) -> Tensor:
        """The buffer whose last copy has ended, allocated at first use."""
        self.turn = 1 - self.turn
        while len(self.buffers) < 2:
            self.buffers.append(torch.empty(PIECE, dtype=torch.uint8, pin_memory=self.pinned))
            self.copied += [torch.cuda.Event()] if self.pinned else []
        if self.pinned:
            self.copied[self.turn].synchronize()
        return self.buffers[self.turn]

    def finish(self) -> None:
        """Wait for the copies under way, which read these buffers."""
        for event in self.copied:
            event.synchronize()


def _fill(file: FileIO, path: Path, target: Tensor) -> None:
    """Read as many bytes as a flat CPU tensor holds; the system gives at most 2 GiB at a time."""
    memory: memoryview = target.view(torch.uint8).numpy().data
    while len(memory):
        count = file.readinto(memory)
        if not count:
            raise ValueError(f"{path} ends early: it was changed while it was read; download it again")
        memory = memory[count:]
