"""What holds for every test? One thread a process, and Triton's interpreter where there is no GPU.

Tiny tensors gain nothing from more threads, and workers share the cores. The interpreter has to be asked for before
Triton is first imported.
"""

import os
import socket

import pytest
import torch
from torch import Tensor

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever opens a connection or asks a name server fails the test; nothing else tells the code to stay offline."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: what nobody writes must not get into anything, and shows where it does."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poison(empty(*a, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: poison(empty_like(*a, **kw)))
