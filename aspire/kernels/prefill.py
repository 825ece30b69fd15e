"""How does a chunk of one sequence attend to everything before it and to itself?

Contract of `prefill_attention`. q [W, Hq, D] are the queries at the last W of L positions, k and v [L, Hkv, D] all keys
and values of the sequence in order, contiguous or views with a contiguous last dimension; 1 <= W <= L, Hq a multiple
of Hkv. Query w sees keys 0 .. L - W + w. Returns [W, Hq, D], new, in q's dtype; nothing else is written.

A library serves it: on CUDA in half precision FlashAttention 3 or 2 where one of them is installed, else torch. Every
method shares its prefill and none is timed by it, so that an own kernel would win nothing.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# (module, lowest and highest major compute capability, dtypes), best first. The wheel fa3-fwd is built without fp16.
FLASH = (
    ("flash_attn_interface", 9, 9, (torch.bfloat16, torch.float16)),
    ("fa3_fwd_interface", 9, 9, (torch.bfloat16,)),
    ("flash_attn", 8, 99, (torch.bfloat16, torch.float16)),
)


@cache
def _flash_function(module: str) -> Callable[..., Any] | None:
    """flash_attn_func of that module, None where it is absent or built for another torch."""
    try:
        function: Callable[..., Any] = import_module(module).flash_attn_func
    except (ImportError, OSError, AttributeError):
        return None
    return function


def backend(q: Tensor) -> str:
    """Who serves queries like these: a module of FLASH, or "torch"."""
    if q.is_cuda and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        major = torch.cuda.get_device_capability(q.device)[0]
        for module, lowest, highest, dtypes in FLASH:
            if lowest <= major <= highest and q.dtype in dtypes and _flash_function(module) is not None:
                return module
    return "torch"


def prefill_attention_flash(q: Tensor, k: Tensor, v: Tensor, module: str) -> Tensor:
    """Through FlashAttention, whose causal mask is aligned to the bottom right."""
    function = _flash_function(module)
    assert function is not None
    out = function(q[None], k[None], v[None], causal=True)
    return (out[0] if isinstance(out, tuple) else out)[0]  # early versions of 3 return the log-sum-exp as well


def prefill_attention_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Through torch, with a flash kernel in half precision on CUDA and a memory-efficient one in fp32."""
    group = q.shape[1] // k.shape[1]
    if q.is_cuda and q.dtype == torch.float32 and group > 1:
        # only its flash kernel knows grouped heads; without this it would build the mask and all scores
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        group = 1
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, W or L, D]
    w, n = q.shape[0], k.shape[0]
    # one query sees every key, a whole sequence is plainly causal: neither needs an aligned mask
    mask = None if w in (1, n) else lower_right(w, n)
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=w == n and w > 1, enable_gqa=group > 1
    )
    return out[0].transpose(0, 1)


def lower_right(w: int, n: int) -> Tensor:
    """The causal mask of w queries at the end of n keys, never built in memory."""
    from torch.nn.attention.bias import causal_lower_right  # its import takes 2 s, and many runs end before a prefill

    return causal_lower_right(w, n)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a chunk; see the contract at the head of this file."""
    assert 1 <= q.shape[0] <= k.shape[0] == v.shape[0] and q.shape[1] % k.shape[1] == 0
    module = backend(q)
    return prefill_attention_torch(q, k, v) if module == "torch" else prefill_attention_flash(q, k, v, module)


CASES = [  # (W, L, Hq, Hkv, D)
    (1, 1, 2, 2, 8),
    (1, 63, 6, 2, 64),
    (17, 17, 6, 2, 8),
    (17, 63, 4, 2, 64),
    (63, 257, 3, 1, 8),
    (63, 63, 2, 2, 128),
    (256, 257, 6, 2, 16),
]
