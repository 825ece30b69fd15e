"""How do tokens become logits? One decoder for Llama, Qwen2 and Qwen3, which does not know where its cache is.

The pass takes flat tokens with their positions and hands the projected heads of each layer to `attend`; which keys a
token reads, and where they are kept, is the caller's affair. q, k, v and gate, up are one GEMM each. Inference only.
Nothing in a pass depends on data or waits for the device, so that a CUDA graph can hold it.
"""

from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aspire.kernels.activation import silu_mul
from aspire.kernels.heads import Angles, Heads
from aspire.kernels.linear import linear, linear_in_tiles, pack
from aspire.kernels.norm import add_rms_norm, rms_norm
from aspire.kernels.skinny import linear_add, norm_gated, norm_linear, serves
from aspire.model.rope import angles, inv_freq
from aspire.model.spec import ModelSpec


class Attend(Protocol):
    """Rotates a layer's heads, stores its keys and values, and returns what each query reads."""

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        """The projection of all tokens -> [T, Hq, D]; `store_heads` or `rotate_heads` make q, k and v of it."""
        ...


class Layer(nn.Module):
    """One pre-norm block: attention, then the gated MLP."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        width = spec.heads * spec.head_dim
        self.spec = spec
        self.attn_norm = weight(spec.hidden_size)
        self.qkv = weight(spec.qkv_rows, spec.hidden_size)
        self.qkv_bias = weight(spec.qkv_rows) if spec.qkv_bias else None
        self.q_norm = weight(spec.head_dim) if spec.qk_norm else None
        self.k_norm = weight(spec.head_dim) if spec.qk_norm else None
        self.out = weight(spec.hidden_size, width)
        self.mlp_norm = weight(spec.hidden_size)
        self.gate_up = weight(2 * spec.intermediate_size, spec.hidden_size)
        self.down = weight(spec.hidden_size, spec.intermediate_size)
        self.packed: dict[str, Tensor | None] = {}
        self.invariant = False

    def forward(
        self, index: int, x: Tensor, delta: Tensor | None, at: Angles, attend: Attend
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, E] and what is still to be added to it [T, E], None = nothing -> the same two after this layer."""
        if delta is None and serves(x) and not self.invariant:
            return self._few_rows(index, x, at, attend), None
        return self._any_rows(index, x, delta, at, attend)

    def _few_rows(self, index: int, x: Tensor, at: Angles, attend: Attend) -> Tensor:
        """Four products that norm, gate and add on the way; nothing is left to be added."""
        eps = self.spec.rms_eps
        qkv = norm_linear(x, self.attn_norm, eps, self.qkv, self.qkv_bias)
        x = linear_add(attend(index, self._heads(qkv, at)).flatten(1), self.out, x)
        return linear_add(norm_gated(x, self.mlp_norm, eps, self.gate_up), self.down, x)

    def _any_rows(
        self, index: int, x: Tensor, delta: Tensor | None, at: Angles, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The last sum is left to the next norm, which reads both summands anyway."""
        eps, packed, product = self.spec.rms_eps, self.packed.get, linear_in_tiles if self.invariant else linear
        if delta is None:
            normed = rms_norm(x, self.attn_norm, eps)
        else:
            x, normed = add_rms_norm(x, delta, self.attn_norm, eps)
        qkv = product(normed, self.qkv, self.qkv_bias, packed("qkv"))
        mixed = product(attend(index, self._heads(qkv, at)).flatten(1), self.out, None, packed("out"))
        x, normed = add_rms_norm(x, mixed, self.mlp_norm, eps)
        gate_up = product(normed, self.gate_up, None, packed("gate_up"))
        return x, product(silu_mul(gate_up), self.down, None, packed("down"))

    def _heads(self, qkv: Tensor, at: Angles) -> Heads:
        spec = self.spec
        return Heads(qkv, at, self.q_norm, self.k_norm, spec.rms_eps, spec.heads, spec.kv_heads)

    def pack(self) -> None:
        """Lay the matrices out for this machine; the plain ones stay."""
        self.packed = {name: pack(getattr(self, name)) for name in ("qkv", "out", "gate_up", "down")}


class Decoder(nn.Module):
    """The whole model. Weights are uninitialised: load.py fills them. `forward` ends after the final norm."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.spec = spec
        shape = (spec.vocab_size, spec.hidden_size)
        self.embed = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self.blocks = [Layer(spec, dtype, device) for _ in range(spec.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.Parameter(torch.empty(spec.hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.head = None if spec.tied else nn.Parameter(torch.empty_like(self.embed), requires_grad=False)
        self.packed_head: Tensor | None = None
        self.invariant = False
        self.inv_freq, self.attention_scale = inv_freq(spec)
        self.inv_freq = self.inv_freq.to(device)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of int64 tokens [T] at int64 positions [T]."""
        x = self.embed[tokens]  # F.embedding takes five times as long for a few tokens
        at = angles(positions, self.inv_freq, self.attention_scale, x.dtype)
        delta: Tensor | None = None
        for index, layer in enumerate(self.blocks):
            x, delta = layer(index, x, delta, at, attend)
        eps = self.spec.rms_eps
        return rms_norm(x, self.norm, eps) if delta is None else add_rms_norm(x, delta, self.norm, eps)[1]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, E]; V is the rows of the checkpoint, padding included.

        On a CPU fp32. On CUDA in the model's dtype: an upcast would write 4 V bytes a row that are read once, and the
        sampler upcasts what it loads.
        """
        multiply = linear_in_tiles if self.invariant else linear
        product = multiply(hidden, self.embed if self.head is None else self.head, None, self.packed_head)
        return product if product.is_cuda else product.float()

    def made_invariant(self) -> "Decoder":
        """The same weights, multiplied so that a row's result does not depend on the other rows; slower."""
        twin = copy(self)
        twin.invariant, twin.blocks = True, [copy(layer) for layer in self.blocks]
        for layer in twin.blocks:
            layer.invariant = True
        return twin

    def pack(self) -> "Decoder":
        """Lay the weights out for this machine, where that helps; call it again after a weight has changed."""
        for layer in self.blocks:
            layer.pack()
        self.packed_head = pack(self.embed if self.head is None else self.head)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "Decoder":
        """Move or cast the weights; the frequencies follow to the device but stay fp32, packed copies are dropped."""
        super()._apply(fn, recurse)
        self.packed_head = None
        for layer in self.blocks:
            layer.packed = {}
        self.inv_freq = self.inv_freq.to(self.embed.device)
        return self
