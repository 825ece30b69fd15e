"""What holds for every test? One thread a process, and Triton's interpreter where there is no GPU.

Tiny tensors gain nothing from more threads, and workers share the cores. The interpreter has to be asked for before
Triton is first imported.
"""

import os

import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: what nobody writes must not get into anything, and shows where it does."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poison(empty(*a, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: poison(empty_like(*a, **kw)))
