"""Where do random numbers come from? From (seed, position, purpose, index) alone, never from how often anyone asked.

Contract of `uniform`. seed, position [R] int64, index [R, K] int64, purpose a small int: u [R, K] fp32 strictly inside
(0, 1), 23 bits, the same for the same four numbers on every device, in any batch, at any launch.
The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to a chain of the four numbers.
"""

from torch import Tensor

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
