"""Where do random numbers come from? From (seed, position, purpose, index) alone, never from how often anyone asked.

Contract of `uniform`. seed, position [R] int64, index [R, K] int64, purpose a small int: u [R, K] fp32 strictly inside
(0, 1), 23 bits, the same for the same four numbers on every device, in any batch, at any launch.
The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to a chain of the four numbers.

`uniform_of` and `gumbel_of` are the same for use inside kernels: blocks or scalars of any shapes that broadcast, the
purpose constexpr. Uniform numbers are equal to the last bit; Gumbel numbers differ as the logarithms of devices do.
"""

from torch import Tensor

from aspire.kernels.jit import jit, tl

DRAFT_OR_TARGET, ACCEPT, RESIDUAL, EMULATE = range(4)


def _signed(x: int) -> int:
    """An integer as int64 arithmetic wraps it."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN, MUL_A, MUL_B = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically; the mask makes it logical


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MUL_A
    x = (x ^ _shift(x, 27)) * MUL_B
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, position: Tensor, purpose: int, index: Tensor) -> Tensor:
    """Uniform numbers in (0, 1); see the contract at the head of this file.  # [R, K]"""
    chain = _mix(_mix(_mix(seed + GOLDEN) + position * GOLDEN) + _signed((purpose + 1) * GOLDEN))
    bits = _shift(_mix(chain[:, None] + (index + 1) * GOLDEN), 41)
    return (bits.float() + 0.5) * 2.0**-23


def gumbel(seed: Tensor, position: Tensor, purpose: int, index: Tensor) -> Tensor:
    """Standard Gumbel numbers: argmax(log p + gumbel) is a draw from p.  # [R, K]"""
    return -(-uniform(seed, position, purpose, index).log()).log()


# Kernels cannot read module constants that are plain integers: the three of the mixer stand here once more, unsigned,
# where products wrap and shifts are logical of their own accord.


@jit
def _mixed(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@jit
def uniform_of(seed, position, PURPOSE: tl.constexpr, index):
    """`uniform` inside a kernel; seed, position and index int64."""
    chain = _mixed(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    chain = _mixed(chain + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    chain = _mixed(chain + (((PURPOSE + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF))
    bits = _mixed(chain + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 41
    return (bits.to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23


@jit
def gumbel_of(seed, position, PURPOSE: tl.constexpr, index):
    """`gumbel` inside a kernel; seed, position and index int64."""
    return -tl.log(-tl.log(uniform_of(seed, position, PURPOSE, index)))
