"""Do the products for few rows do what their twins do, and does a layer made of them give what the plain one gives?

On a GPU the kernels run there, also in bf16; elsewhere under Triton's interpreter, in fp32.
"""

import pytest
import torch
from tiny import dense_logits, tiny_model
from torch import Tensor

from aspire.kernels import skinny
from aspire.kernels.jit import triton
from aspire.kernels.skinny import CASES, Tile, tile_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
# fp32: sums of up to 257 terms in another order; bf16: three roundings to 8 bits, of the normed row, of the gate's and
# up's product and of the result, which the twin and the kernel place differently
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}
EPS = 1e-6
needs_triton = pytest.mark.skipif(triton is None, reason="no Triton here")
SMALL = Tile(16, 64, 3, 4)  # several steps of K
TILES = (None, SMALL, Tile(32, 64, 3, 2, split=2))
pytestmark = pytest.mark.usefixtures("poisoned")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def strided(x: Tensor) -> Tensor:
    """The same values with room between the rows, and NaN in it."""
    return torch.cat((x, torch.full_like(x, float("nan"))), -1)[..., : x.shape[-1]]


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, norm weight, weight; results of order one."""
    x, norm = randn(m, k, dtype=dtype), 1 + randn(k, dtype=dtype, seed=1, scale=0.2)
    return strided(x), norm, randn(n, k, dtype=dtype, seed=2, scale=k**-0.5)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), CASES)
def test_norm_linear(m: int, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    x, norm, weight = operands(m, n, k, dtype)
    added = randn(n, dtype=dtype, seed=3) if bias else None
    want = skinny.norm_linear_torch(x, norm, EPS, weight, added)
    for tile in TILES:
        got = skinny.norm_linear_triton(x, norm, EPS, weight, added, tile)
        torch.testing.assert_close(got, want, **CLOSE[dtype])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), CASES)
def test_norm_gated(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, norm, weight = operands(m, 2 * n, k, dtype)
    want = skinny.norm_gated_torch(x, norm, EPS, weight)
    for tile in TILES:
        torch.testing.assert_close(skinny.norm_gated_triton(x, norm, EPS, weight, tile), want, **CLOSE[dtype])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), CASES)
def test_linear_add(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The residual is left alone."""
    x, _, weight = operands(m, n, k, dtype)
    residual = strided(randn(m, n, dtype=dtype, seed=4))
    before = residual.clone()
    want = skinny.linear_add_torch(x, weight, residual)
    for tile in TILES:
        torch.testing.assert_close(skinny.linear_add_triton(x, weight, residual, tile), want, **CLOSE[dtype])
    assert torch.equal(residual, before)


@needs_triton
def test_no_rows() -> None:
    x, _, weight = operands(0, 17, 64, torch.float32)
    assert skinny.linear_add_triton(x, weight, x.new_empty(0, 17)).shape == (0, 17)


@needs_triton
def test_too_many_rows_are_refused() -> None:
    x, _, weight = operands(17, 17, 64, torch.float32)
    with pytest.raises(AssertionError):
        skinny.linear_add_triton(x, weight, x.new_zeros(17, 17))


@pytest.mark.parametrize("kind", ["norm_linear", "norm_gated", "linear_add"])
@pytest.mark.parametrize("k", [2048, 6144, 576, 1536, 4096, 3])
def test_the_tile_fits(k: int, kind: str) -> None:
    """Its stages fit the shared memory of an H200."""
    for itemsize in (2, 4):
        tile = tile_of(kind, k, itemsize)
        held = skinny.MOST_ROWS + tile.block_n * (2 if kind == "norm_gated" else 1)
        assert held * tile.block_k * itemsize * tile.stages <= 227 * 1024


@needs_triton
def test_a_layer_of_these_gives_the_plain_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layer, forced on, with qkv bias and without."""
    for kind in ("qwen2", "qwen3"):
        model = tiny_model(kind).to(DEVICE)
        ids = torch.randint(97, (13,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        want = dense_logits(model, ids)
        with monkeypatch.context() as patch:
            patch.setattr("aspire.model.decoder.serves", lambda x: True)
            for name in ("norm_linear", "norm_gated", "linear_add"):
                patch.setattr(f"aspire.model.decoder.{name}", getattr(skinny, f"{name}_triton"))
            torch.testing.assert_close(dense_logits(model, ids), want, rtol=1e-4, atol=1e-4)
