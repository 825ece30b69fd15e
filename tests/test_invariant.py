"""Is a decoded row the same bits whatever else is in its pass? `EngineSettings.invariant`, alone and in a batch."""

import json
from functools import cache

import pytest
import torch
from methods import METHODS, prompts
from on_gpu import CUDA, build, mixed_requests, model_on, spec_of
from torch import Tensor

from aspire.engine import Engine
from aspire.kernels.linear import linear, linear_in_tiles, pack
from aspire.policies import Method
from experiments import invariance

PROMPTS = prompts(8, seed=31)
NEW = 20
Kept = dict[str, tuple[list[int], Tensor, Tensor]]  # request -> ids, keys and values of the answer, all layers
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="finds no GPU")])]


def decoded(engine: Engine, only: list[int] | None = None, new: int = NEW) -> Kept:
    """Run the requests and keep what the decode passes wrote."""
    found: Kept = {}
    empty = engine._empty

    def keep(slot: int) -> None:
        seat = engine.seats[slot]
        assert seat is not None
        request, page = seat.request, engine.pool.page_size
        at = range(len(request.prompt_ids), request.length - 1)
        entries = torch.tensor([seat.pages.pages[p // page] * page + p % page for p in at])
        found[request.id] = request.output_ids, engine.pool.k[:, entries].cpu(), engine.pool.v[:, entries].cpu()
        empty(slot)

    engine._empty = keep  # type: ignore[method-assign]
    batch = mixed_requests(PROMPTS, new, step=1)
    engine.generate(batch if only is None else [batch[i] for i in only])
    return found


def engine_of(method: Method, slots: int, dtype: torch.dtype, device: str, invariant: bool = True) -> Engine:
    model = model_on(spec_of("qwen3", layers=3, head_dim=64), dtype, device)
    return build(model, method, slots, page_size=16, invariant=invariant)


@cache
def alone(dtype: torch.dtype, device: str) -> Kept:
    """Plain decoding of each request in a batch of one."""
    return decoded(engine_of(METHODS[0], 1, dtype, device))


def same(one: Kept, two: Kept) -> list[str]:
    """Requests of `one` that are not, bit for bit, what they are in `two`."""
    return [
        name for name, (ids, *kv) in one.items()
        if ids != two[name][0] or not all(torch.equal(a, b) for a, b in zip(kv, two[name][1:]))
    ]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_g08_bits_do_not_depend_on_the_batch(method: Method, dtype: torch.dtype, device: str) -> None:
    """G08: plain decoding alone, and every method with one slot and with eight: the same ids, keys and values."""
    for slots in (1, 8):
        found = decoded(engine_of(method, slots, dtype, device))
        assert len(found) == 8 and same(found, alone(dtype, device)) == [], slots


def test_without_it_they_do() -> None:
    """bf16, plain decoding: what a request leaves behind in a batch of eight is not what it leaves alone.

    On the CPU only: a GPU's products of so small a model come out alike at one row and at eight.
    """
    plain = {slots: decoded(engine_of(METHODS[0], slots, torch.bfloat16, "cpu", False)) for slots in (1, 8)}
    assert same(plain[1], plain[8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_tiles(dtype: torch.dtype) -> None:
    """The plain product up to rounding; a row's result is the same bits wherever it stands."""
    x, weight, bias = (
        torch.randn(*s, generator=torch.Generator().manual_seed(i)).to(dtype)
        for i, s in enumerate([(37, 48), (33, 48), (33,)])
    )
    for packed in (None, pack(weight)):
        whole = linear_in_tiles(x, weight, bias, packed)
        torch.testing.assert_close(
            whole, linear(x, weight, bias), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2
        )
        for start, stop in ((0, 1), (5, 22), (36, 37)):
            assert torch.equal(linear_in_tiles(x[start:stop], weight, bias, packed), whole[start:stop])
    assert linear_in_tiles(x[:0], weight).shape == (0, 33)


def test_the_command_counts_texts_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The real model on one short prompt: a line a method and batch size, with what it costs."""
    words = ["prompts=1", "new_tokens=6", "methods=vegas", "batches=1,2", "device=cpu"]
    assert invariance.main(words) == 0
    lines = json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]
    assert [(x["method"], x["batch"], x["differ"]) for x in lines] == [
        (name, batch, 0) for batch in (1, 2) for name in ("autoregressive", "vegas")
    ]
    assert all(x["slowdown"] == pytest.approx(x["tok_s_without"] / x["tok_s"], rel=0.02) for x in lines)
    with pytest.raises(ValueError, match="unknown method 'vega' - did you mean 'vegas'"):
        invariance.main(["methods=vega"])
    with pytest.raises(ValueError, match="unknown argument 'batch=8'"):
        invariance.main(["batch=8"])


def test_texts_that_differ_are_counted_both_ways() -> None:
    """Against plain decoding of the smallest batch, under the same setting."""
    runs = [
        invariance.Run("autoregressive", 1, True, [[1], [2]], 10.0), invariance.Run("vegas", 8, True, [[1], [3]], 8.0),
        invariance.Run("autoregressive", 1, False, [[1], [4]], 20.0),
        invariance.Run("vegas", 8, False, [[5], [3]], 12.0),
    ]  # fmt: skip
    (_, line) = invariance.lines_of(runs)
    assert (line["method"], line["differ"], line["differ_without"], line["slowdown"]) == ("vegas", 1, 2, 1.5)
