"""Do the decoder's kernels do what their twins do, and does prefill attention see exactly the keys it may?

On a GPU the kernels run there, also in bf16; elsewhere under Triton's interpreter, in fp32.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model
from torch import Tensor

from aspire.cache.pages import OutOfPages
from aspire.cache.pool import KVPool
from aspire.kernels import activation, heads, norm
from aspire.kernels import prefill as chunk
from aspire.kernels.heads import Angles, Heads, rotate_heads, store_heads_torch, store_heads_triton
from aspire.kernels.jit import triton
from aspire.kernels.kv import write_kv
from aspire.prefill import KEPT_QUERIES, RANDOM_KV, random_prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
# fp32: sums of up to 257 terms in another order; bf16: up to four roundings to 8 bits
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}
NAN = float("nan")
EPS = 1e-6
needs_triton = pytest.mark.skipif(triton is None, reason="no Triton here")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def strided(x: Tensor) -> Tensor:
    """The same values with room between the rows."""
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


# -- norm and activation -----------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), norm.CASES)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype, poisoned: None) -> None:
    x, weight = randn(tokens, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    want = norm.rms_norm_torch(x, weight, EPS)
    for given in (x, strided(x)):
        torch.testing.assert_close(norm.rms_norm_triton(given, weight, EPS), want, **CLOSE[dtype])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), norm.CASES)
def test_add_rms_norm(tokens: int, width: int, dtype: torch.dtype, poisoned: None) -> None:
    """The sum is exact, and neither summand changes."""
    x, delta, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(tokens, width)] * 2 + [(width,)]))
    before = x.clone(), delta.clone()
    want_sum, want = norm.add_rms_norm_torch(x, delta, weight, EPS)
    total, normed = norm.add_rms_norm_triton(strided(x), delta, weight, EPS)
    assert torch.equal(total, want_sum) and total.dtype == normed.dtype == dtype
    torch.testing.assert_close(normed, want, **CLOSE[dtype])
    norm.add_rms_norm_triton(x, delta, weight, EPS)
    assert torch.equal(x, before[0]) and torch.equal(delta, before[1])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), activation.CASES)
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype, poisoned: None) -> None:
    gate_up = randn(tokens, 2 * width, dtype=dtype)
    got = activation.silu_mul_triton(strided(gate_up))
    torch.testing.assert_close(got, activation.silu_mul_torch(gate_up), **CLOSE[dtype])


@needs_triton
def test_no_tokens_launch_nothing() -> None:
    x, weight = randn(0, 64), randn(64)
    assert norm.rms_norm_triton(x, weight, EPS).shape == (0, 64)
    assert norm.add_rms_norm_triton(x, x, weight, EPS)[1].shape == (0, 64)
    assert activation.silu_mul_triton(x).shape == (0, 32)
    h, caches, _ = make_heads(1, 2, 1, 8, True)
    none = replace(h, qkv=h.qkv[:0], angles=replace(h.angles, cos=h.angles.cos[:0], sin=h.angles.sin[:0]))
    assert store_heads_triton(none, *caches, torch.zeros(0, dtype=torch.int64, device=DEVICE)).shape == (0, 2, 8)


# -- heads -------------------------------------------------------------------------------------------------------------


def make_heads(
    tokens: int, hq: int, hkv: int, dim: int, norms: bool, dtype: torch.dtype = torch.float32
) -> tuple[Heads, tuple[Tensor, Tensor], Tensor]:
    """Heads at random positions, NaN caches strided in token and head, random entries with padding among them."""
    rng = torch.Generator().manual_seed(tokens)
    angle = torch.randint(5000, (tokens, 1), generator=rng) * 10.0 ** -torch.linspace(0, 4, dim // 2)
    angles = Angles(angle.cos().to(DEVICE), angle.sin().to(DEVICE), dtype)
    weights = [randn(dim, dtype=dtype, seed=i) if norms else None for i in (1, 2)]
    h = Heads(randn(tokens, (hq + 2 * hkv) * dim, dtype=dtype), angles, weights[0], weights[1], EPS, hq, hkv)
    size = 2 * tokens + 3
    k_cache = torch.full((size, 2, hkv, dim), NAN, dtype=dtype, device=DEVICE)[:, 1]  # [M, 2, Hkv, D]: by token
    v_cache = torch.full((hkv, size, dim), NAN, dtype=dtype, device=DEVICE).transpose(0, 1)  # head outermost
    entries = torch.randperm(size, generator=rng)[:tokens]
    entries[1::3] = -1
    return h, (k_cache, v_cache), entries.to(DEVICE)


def naive_heads(h: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in fp64, head by head, straight from the definitions."""
    qkv = h.qkv.double().view(len(h.qkv), -1, h.dim)
    cos, sin = h.angles.cos.double(), h.angles.sin.double()
    out = []
    for i in range(qkv.shape[1]):
        x, weight = qkv[:, i], h.q_norm if i < h.heads else h.k_norm
        if i < h.heads + h.kv_heads:
            if weight is not None:
                x = x / (x.square().mean(-1, keepdim=True) + h.eps).sqrt() * weight.double()
            low, high = x.chunk(2, -1)
            x = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        out.append(x)
    q, k, v = torch.stack(out, 1).to(h.qkv.dtype).split((h.heads, h.kv_heads, h.kv_heads), 1)
    return q, k, v


@pytest.mark.parametrize(("tokens", "hq", "hkv", "dim", "norms"), heads.CASES)
def test_rotate_heads(tokens: int, hq: int, hkv: int, dim: int, norms: bool) -> None:
    h, _, _ = make_heads(tokens, hq, hkv, dim, norms)
    for got, want in zip(rotate_heads(h), naive_heads(h)):
        torch.testing.assert_close(got, want, **CLOSE[torch.float32])


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hq", "hkv", "dim", "norms"), heads.CASES)
def test_store_heads(tokens: int, hq: int, hkv: int, dim: int, norms: bool, dtype: torch.dtype, poisoned: None) -> None:
    """Queries of all tokens, keys and values at the entries named and nowhere else; values arrive bit by bit."""
    h, (k_cache, v_cache), entries = make_heads(tokens, hq, hkv, dim, norms, dtype)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    if dtype == torch.float32:
        want_q = store_heads_torch(h, want_k, want_v, entries)
    else:  # the twin rounds cos and sin as well, which the kernel does not
        want_q, k, v = naive_heads(h)
        write_kv(want_k, want_v, entries, k, v)
    got_q = store_heads_triton(h, k_cache, v_cache, entries)
    assert got_q.is_contiguous() and got_q.isfinite().all()
    torch.testing.assert_close(got_q, want_q, **CLOSE[dtype])
    torch.testing.assert_close(k_cache, want_k, equal_nan=True, **CLOSE[dtype])
    assert torch.equal(v_cache.nan_to_num(), want_v.nan_to_num())
    written = int((entries >= 0).sum())
    for cache in (k_cache, v_cache):
        assert cache.isnan().all(-1).all(-1).sum() == len(cache) - written == cache.isnan().any(-1).any(-1).sum()


@needs_triton
def test_store_heads_leaves_the_rest_of_a_larger_cache_alone(poisoned: None) -> None:
    """The other layer that shares the storage, and every entry when all tokens are padding."""
    h, _, entries = make_heads(17, 4, 2, 8, True)
    both = torch.full((40, 2, 2, 8), NAN, device=DEVICE)
    store_heads_triton(h, both[:, 0], both[:, 1], torch.full_like(entries, -1))
    assert both.isnan().all()
    store_heads_triton(h, both[:, 1], both[:, 1], entries)
    assert both[:, 0].isnan().all()


def test_write_kv_skips_padding() -> None:
    caches = [torch.full((9, 2, 4), NAN) for _ in range(2)]
    new = torch.randn(2, 3, 2, 4)
    write_kv(*caches, torch.tensor([5, -1, 2]), *new)
    for cache, values in zip(caches, new):
        assert torch.equal(cache[[5, 2]], values[[0, 2]]) and cache.isnan().all(-1).all(-1).sum() == 7


# -- prefill -----------------------------------------------------------------------------------------------------------


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The contract, with a mask written out, in fp64."""
    (w, hq, dim), (n, hkv, _) = q.shape, k.shape
    keys, values = (x.double().repeat_interleave(hq // hkv, 1) for x in (k, v))
    logits = torch.einsum("whd,lhd->hwl", q.double(), keys) * dim**-0.5
    at = torch.arange(n, device=q.device)
    logits.masked_fill_(at > n - w + at[:w, None], float("-inf"))
    return torch.einsum("hwl,lhd->whd", logits.softmax(-1), values).to(q.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("w", "n", "hq", "hkv", "dim"), chunk.CASES)
def test_prefill_attention(w: int, n: int, hq: int, hkv: int, dim: int, dtype: torch.dtype) -> None:
    """Whole sequences, chunks and one query; grouped heads; keys and values as views of another layout."""
    q = randn(w, hq, dim, dtype=dtype)
    k, v = randn(2, n, hkv, dim, dtype=dtype, seed=1)
    want = masked_attention(q, k, v)
    by_head = v.transpose(0, 1).contiguous().transpose(0, 1)
    for values in (v, by_head):
        torch.testing.assert_close(chunk.prefill_attention(q, k, values), want, **CLOSE[dtype])
        torch.testing.assert_close(chunk.prefill_attention_torch(q, k, values), want, **CLOSE[dtype])


def test_prefill_attention_refuses_more_queries_than_keys() -> None:
    with pytest.raises(AssertionError):
        chunk.prefill_attention(randn(3, 2, 8), *randn(2, 2, 2, 8))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("w", [4096, 1000, 1])
def test_prefill_attention_builds_no_mask(w: int) -> None:
    """Memory stays that of the tensors; the scores of 1000 queries alone would take 65 MB."""
    q, (k, v) = randn(w, 8, 64, dtype=torch.bfloat16), randn(2, 4096, 2, 64, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chunk.prefill_attention_torch(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 8 * q.numel() * 2 + 2**22


@pytest.mark.parametrize("length", [1, 17, 63])
def test_a_random_prompt_fills_its_own_positions(length: int) -> None:
    """Finite KV at its positions and poison elsewhere; the same seed gives the same prompt."""
    model = tiny_model("qwen3")
    spec = model.spec
    made = []
    for seed in (3, 3, 4):
        pool = KVPool(spec.layers, spec.kv_heads, spec.head_dim, 20, 4, poison=True)
        prompt = random_prompt(model, pool, length, seed)
        entries = pool.entries(prompt.pages, 0, length)
        for cache in (pool.k, pool.v):
            assert cache[:, entries].isfinite().all() and cache.isnan().all(-1).all(-1)[0].sum() == 80 - length
        assert prompt.queries.shape == (spec.layers, min(length, KEPT_QUERIES), spec.heads, spec.head_dim)
        assert prompt.logits.shape == (spec.vocab_size,) and prompt.logits.dtype == torch.float32
        made.append(torch.cat([pool.k[:, entries].flatten(), prompt.queries.flatten(), prompt.logits]))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    if length == 63:
        assert float(pool.k[:, entries].std()) == pytest.approx(RANDOM_KV, rel=0.1)
    with pytest.raises(OutOfPages):
        random_prompt(model, pool, 81, 0)


def test_fused_residual_equals_separate_steps() -> None:
    """What the decoder leaves to the norms adds up to the plain residual stream."""
    x, delta, weight = randn(5, 64), randn(5, 64, seed=1), randn(64, seed=2)
    total, normed = norm.add_rms_norm(x, delta, weight, EPS)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (64,), weight, EPS), **CLOSE[torch.float32])
    assert torch.equal(total, x + delta)
