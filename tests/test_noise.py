"""Are the random numbers a function of seed, position, purpose and index alone, and as good as uniform?"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from aspire.kernels.noise import GOLDEN, MUL_A, MUL_B, gumbel, uniform

DRAWS = 200_000
SEEDS = torch.arange(DRAWS)
INT64 = st.integers(-(2**63), 2**63 - 1)


def noise(seed: int | Tensor, position: int | Tensor, purpose: int, index: int | Tensor) -> Tensor:
    """One number for each of the rows that the arguments span.  # [R]"""
    rows = torch.broadcast_tensors(*(torch.as_tensor(x) for x in (seed, position, index)))
    seeds, positions, indices = (x.reshape(-1) for x in rows)
    return uniform(seeds, positions, purpose, indices[:, None])[:, 0]


def exact_uniform(seed: int, position: int, purpose: int, index: int) -> float:
    """The contract in Python's integers."""
    mask = 2**64 - 1
    golden, mul_a, mul_b = GOLDEN & mask, MUL_A & mask, MUL_B & mask

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ x >> 30) * mul_a & mask
        x = (x ^ x >> 27) * mul_b & mask
        return x ^ x >> 31

    chain = mix(mix(mix(seed + golden) + position * golden) + (purpose + 1) * golden)
    return ((mix(chain + (index + 1) * golden) >> 41) + 0.5) / 2**23


@given(st.lists(st.tuples(INT64, INT64, st.integers(0, 3), INT64), min_size=1, max_size=8))
def test_noise_is_a_function_of_its_four_numbers_alone(keys: list[tuple[int, int, int, int]]) -> None:
    """A40: any batch, any order gives the numbers of the contract, strictly inside (0, 1)."""
    for purpose in range(4):
        rows = [key for key in keys if key[2] == purpose]
        if rows:
            seed, position, _, index = torch.tensor(rows).T
            got = noise(seed, position, purpose, index).tolist()
            assert got == [exact_uniform(*row) for row in rows]
            assert all(0 < u < 1 for u in got)


VARIED = {
    "seed": lambda x: noise(x, 5, 1, 7),
    "position": lambda x: noise(3, x, 1, 7),
    "purpose": lambda x: torch.stack([noise(x[: DRAWS // 4], 5, p, 7) for p in range(4)], 1).flatten(),
    "index": lambda x: noise(3, 5, 1, x),
}


@pytest.mark.parametrize("varied", VARIED)
def test_noise_is_uniform_and_neighbours_are_uncorrelated(varied: str) -> None:
    """A40: mean, variance, Kolmogorov-Smirnov and lag correlations along each of the four numbers."""
    u = VARIED[varied](SEEDS).double()
    assert abs(u.mean() - 0.5) < 4 / (12 * DRAWS) ** 0.5
    assert abs(u.var() - 1 / 12) < 4 / (180 * DRAWS) ** 0.5
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    for lag in (1, 2, 3):
        assert abs(torch.corrcoef(torch.stack([u[:-lag], u[lag:]]))[0, 1]) < 4 / DRAWS**0.5


def test_noise_of_swapped_numbers_differs() -> None:
    """A40: one more in one number is not the same as one more in another."""
    streams = [noise(SEEDS, 0, 0, 0), noise(SEEDS, 1, 0, 0), noise(SEEDS, 0, 1, 0), noise(SEEDS, 0, 0, 1)]
    streams += [noise(SEEDS + 1, 0, 0, 0), noise(0, SEEDS, 0, 0), noise(0, 0, 0, SEEDS)]
    corr = torch.corrcoef(torch.stack(streams).double()) - torch.eye(len(streams))
    assert corr.abs().max() < 5 / DRAWS**0.5


def test_gumbel_is_standard() -> None:
    """Kolmogorov-Smirnov against the closed form, and finite at both ends."""
    g = gumbel(SEEDS, SEEDS, 0, torch.zeros(DRAWS, 1, dtype=torch.int64))[:, 0]
    assert g.isfinite().all()
    assert stats.kstest(g.numpy(), "gumbel_r").pvalue > 1e-3
