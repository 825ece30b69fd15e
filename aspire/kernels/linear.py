"""How is a weight multiplied? Plainly, or on a CPU in fp32 through a copy laid out once for the machine.

Contract of `linear`. x [M, I], weight [O, I], bias [O] or None: x @ weight.T + bias, [M, O]. `packed` is None or
`pack(weight)`, and then the result is the same up to rounding. On two cores with M = 8 the packed product of SmolLM2's
layers took 0.6 of the plain one's time, at M = 1 1.3 of it; and, which matters more here, a row's result hardly depends
on how many rows there are, so that one query and a verify of many see the same logits. `linear_in_tiles` is the same
product, of `TILE` rows at a time, the last ones filled up: there a row's result does not depend on the others at all.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16  # rows


def pack(weight: Tensor) -> Tensor | None:
    """The weight laid out for oneDNN, or None where it would not serve (another device or dtype, no oneDNN)."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; see the contract at the head of this file."""
    if packed is None:
        return F.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def linear_in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; see the contract at the head of this file."""
    filled = F.pad(x, (0, 0, 0, -len(x) % TILE))
    return torch.cat([linear(tile, weight, bias, packed) for tile in filled.split(TILE)])[: len(x)]
