"""How do tokens become logits? One decoder for Llama, Qwen2 and Qwen3, which does not know where its cache is.

The pass takes flat tokens with their positions and hands q, k, v of each layer to `attend`; which keys a token
reads, and where they are kept, is the caller's affair. q, k, v and gate, up are one GEMM each. Inference only.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aspire.kernels.linear import linear, pack
from aspire.model.rope import cos_sin, inv_freq, rotate
from aspire.model.spec import ModelSpec


class Attend(Protocol):
    """Stores k and v of a layer, and returns what each query reads."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D] and k [T, Hkv, D] are rotated, v [T, Hkv, D] is not; returns [T, Hq, D].

        The three are views with strides of the fused projection, not contiguous.
        """
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

    def forward(self, index: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [T, E] -> [T, E]."""
        q, k, v = self._heads(x, cos, sin)
        packed = self.packed.get
        x = x + linear(attend(index, q, k, v).flatten(1), self.out, None, packed("out"))
        gate, up = linear(self._norm(x, self.mlp_norm), self.gate_up, None, packed("gate_up")).chunk(2, -1)
        return x + linear(F.silu(gate) * up, self.down, None, packed("down"))

    def pack(self) -> None:
        """Lay the matrices out for this machine; the plain ones stay."""
        self.packed = {name: pack(getattr(self, name)) for name in ("qkv", "out", "gate_up", "down")}

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [T, Hq, D] and k [T, Hkv, D], and v [T, Hkv, D]."""
        hq, hkv = self.spec.heads, self.spec.kv_heads
        qkv = linear(self._norm(x, self.attn_norm), self.qkv, self.qkv_bias, self.packed.get("qkv"))
        qkv = qkv.view(x.shape[0], hq + 2 * hkv, self.spec.head_dim)
        qk, v = qkv.split((hq + hkv, hkv), 1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self._norm(qk[:, :hq], self.q_norm), self._norm(qk[:, hq:], self.k_norm)), 1)
        q, k = rotate(qk, cos, sin).split((hq, hkv), 1)
        return q, k, v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension; the mean square is formed in fp32 whatever the dtype."""
        return F.rms_norm(x, weight.shape, weight, self.spec.rms_eps)


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
        self.inv_freq, self.attention_scale = inv_freq(spec)
        self.inv_freq = self.inv_freq.to(device)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, E] of int64 tokens [T] at int64 positions [T]."""
        x = F.embedding(tokens, self.embed)
        cos, sin = cos_sin(positions, self.inv_freq, self.attention_scale, x.dtype)
        for index, layer in enumerate(self.blocks):
            x = layer(index, x, cos, sin, attend)
        return F.rms_norm(x, self.norm.shape, self.norm, self.spec.rms_eps)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [N, V] of hidden states [N, E]; V is the rows of the checkpoint, padding included."""
        return linear(hidden, self.embed if self.head is None else self.head, None, self.packed_head).float()

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
