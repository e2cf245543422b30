"""The forward pass of attention over whole sequences, without a cache."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels.reference.attention import newest, oldest, raised
from toolkit.kernels.torch.product import prefers_onednn, product
from toolkit.models.rope import inv_freq, query_scale
from toolkit.models.spec import AttentionSpec, LatentSpec, NormSpec, ReuseSpec, RopeSpec
from toolkit.quant.layers.forward_parts import Watch, Weights, linear, normed
from toolkit.runners.tensor.layers.mutual import bias_rows, by_distance

KEYS, VALUES = ":keys", ":values"
"""After the name of a key or value projection: what goes into the KV cache, a row a token and head."""
QUERIES = 128  # whose scores against all keys before them are held at once; twice as many where gradients are taken


def latent_attention(a: LatentSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """In expanded form: keys and values of each head."""
    batch, length, _ = x.shape
    queries = x
    if a.q_a is not None and a.q_a_norm is not None:
        queries = watch(a.q.name, normed(a.q_a_norm, weights, linear(a.q_a, weights, x)))
    q = linear(a.q, weights, queries).view(batch, length, a.heads, a.qk_dim)
    latent, shared = linear(a.kv_a, weights, x).split([a.kv_rank, a.rope_dim], dim=-1)
    latent = watch(a.kv_b.name, normed(a.kv_a_norm, weights, latent))
    k, v = linear(a.kv_b, weights, latent).view(batch, length, a.heads, -1).split([a.nope_dim, a.v_dim], dim=-1)
    cos, sin = _angles(a.rope, length, x.device)
    shared = _turn(shared[:, :, None], cos, sin).to(k.dtype).expand(-1, -1, a.heads, -1)
    k = torch.cat([k, shared], dim=-1)
    q = torch.cat([q[..., : a.nope_dim], _turn(q[..., a.nope_dim :], cos, sin).to(q.dtype)], dim=-1)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = _attend(q, k, v, None, a.scale).transpose(1, 2).flatten(2)
    return linear(a.o, weights, watch(a.o.name, out))


def attention(a: AttentionSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """As ``forward.MIXERS`` says; keys and values are watched as the cache takes them."""
    batch, length, _ = x.shape
    q = linear(a.q, weights, x).view(batch, length, a.heads, a.head_dim)
    k = linear(a.k, weights, x).view(batch, length, a.kv_heads, a.head_dim)
    v = linear(a.v, weights, x).view(batch, length, a.kv_heads, a.head_dim)
    if a.clip is not None:
        q, k, v = (t.clamp(-a.clip, a.clip) for t in (q, k, v))
    if not a.norm_last:
        q, k = _head_normed(a.q_norm, weights, q), _head_normed(a.k_norm, weights, k)
    if a.rope is not None:
        cos, sin = _angles(a.rope, length, x.device)
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    if a.norm_last:
        q, k = _head_normed(a.q_norm, weights, q), _head_normed(a.k_norm, weights, k)
    if a.q_scale is not None:
        q = q * torch.from_numpy(query_scale(a.q_scale, np.arange(length)))[:, None, None].to(x.device)
    k, v = watch(a.k.name + KEYS, k), watch(a.v.name + VALUES, _head_normed(a.v_norm, weights, v))
    if watch.along is not None:
        watch.along.keep(k, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = not a.mutual and a.block == 1 and (a.window is None or a.window >= length)
    mask = None if causal else _mask(a, length, x.device)
    if any(x is not None for x in (a.softcap, a.sinks, a.alibi, a.position_bias)):
        out = torch.cat([_capped(a, weights, *(t[i : i + 1] for t in (q, k, v))) for i in range(batch)])
    else:
        out = _attend(q, k, v, mask, a.scale)
    out = out.transpose(1, 2).reshape(batch, length, a.heads * a.head_dim)
    if a.gate is not None:
        out = out * torch.sigmoid(linear(a.gate, weights, x))
    out = out if a.o_norm is None else normed(a.o_norm, weights, out)
    return linear(a.o, weights, watch(a.o.name, out))


def reuse(a: ReuseSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """As ``forward.MIXERS`` says."""
    batch, length, _ = x.shape
    assert watch.along is not None, "keys and values of another layer go along"
    q = _head_normed(a.q_norm, weights, linear(a.q, weights, x).view(batch, length, a.heads, a.head_dim))
    if a.rope is not None:
        q = _turn(q, *_angles(a.rope, length, x.device))
    q, k, v = (t.to(x.dtype).transpose(1, 2) for t in (q, *watch.along.read(a.source)))
    kept = watch.along.kept[a.source]
    mask = None if kept.window is None or kept.window >= length else _mask(kept, length, x.device)
    out = _attend(q, k, v, mask, kept.scale).transpose(1, 2).reshape(batch, length, a.heads * a.head_dim)
    return linear(a.o, weights, watch(a.o.name, out))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q [batch, heads, length, head_dim] to k and v [batch, kv_heads, …], causal without a ``mask``; heads
    of v may have a size of their own."""
    faster = torch.is_autocast_enabled("cpu") or (prefers_onednn() and not q.requires_grad)
    if mask is None and q.device.type == "cpu" and faster:
        return _blocked(scale, q, k, v)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _blocked(scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float32 or the dtype of autocast, a block of queries after another: on a CPU torch's fused
    call takes longer, up to four times. q [batch, heads, length, head_dim], k and v [batch, kv_heads, …]."""
    narrowed = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if narrowed else torch.float32
    batch, heads, length, _ = q.shape
    repeat = heads // k.shape[1]
    q = (q * scale).to(dtype).flatten(0, 1).unflatten(0, (-1, repeat))
    k, v = (t.to(dtype).flatten(0, 1) for t in (k, v))
    each = len(q) if narrowed else 1  # float32 stays in the caches where heads come one by one
    parts = [_blocks(*part) for part in zip(*(t.split(each) for t in (q, k, v)), strict=True)]
    return torch.cat(parts).view(batch, heads, length, -1)


def _blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of scaled q [n, repeat, length, head_dim] to k and v [n, length, head_dim]."""
    step = 2 * QUERIES if q.requires_grad else QUERIES
    later = torch.ones(step, step, dtype=torch.bool).triu_(1)
    found = []
    for start in range(0, q.shape[2], step):
        rows = q[:, :, start : start + step]
        count, seen = rows.shape[2], start + rows.shape[2]
        scores = _products(rows.flatten(1, 2), k[:, :seen]).view(*rows.shape[:3], seen)
        scores[..., start:].masked_fill_(later[:count, :count], float("-inf"))
        shares = scores.softmax(-1, dtype=q.dtype).flatten(1, 2)
        found.append(_products(shares, v[:, :seen].transpose(1, 2)).view(*rows.shape[:3], -1))
    return torch.cat(found, 2)


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x [n, rows, in] @ y [n, out, in]ᵀ."""
    return product(x[0], y[0])[None] if len(x) == 1 else torch.bmm(x, y.transpose(1, 2))


def _capped(a: AttentionSpec, weights: Weights, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out, for what the fused call lacks: soft-capped scores, ALiBi, biases by position and sinks."""
    repeat = a.heads // a.kv_heads
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)) * a.scale
    if a.softcap is not None:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    if (alibi := a.alibi) is not None:
        key = torch.arange(q.shape[2], device=q.device)
        slopes = torch.tensor(alibi.slopes, device=q.device)
        if a.mutual:
            scores = scores - (alibi.scale * slopes)[:, None, None] * (key - key[:, None]).abs()
        else:
            scores = scores + raised(slopes, alibi.scale, alibi.rounded, key, key[-1] // 2)
    if (bias := a.position_bias) is not None:
        scores = scores + by_distance(bias_rows(bias, weights[bias.name].float()), q.shape[2])
    scores = scores.masked_fill(~_mask(a, q.shape[2], q.device), float("-inf"))
    if a.sinks is not None:
        sink = weights[a.sinks].view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1] @ v
    return torch.softmax(scores, dim=-1) @ v


def _mask(a: AttentionSpec, length: int, device: torch.device) -> Tensor:
    """True where the query (row) may see the key (column)."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    if a.mutual:
        return (column - row).abs() < (a.window or length)
    return (column <= newest(row, a.block)) & (column >= oldest(row, a.window, a.chunked))


def _angles(rope: RopeSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, 1, rotary_dim / 2]."""
    frequencies, factor = inv_freq(rope, long=0 < rope.original_max_position < length)
    turns = torch.arange(length, dtype=torch.float32)[:, None] * torch.from_numpy(frequencies)[None, :]
    return (turns.cos() * factor)[:, None].to(device), (turns.sin() * factor)[:, None].to(device)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·cos.shape[-1] elements of each head of x [batch, length, heads, head_dim]."""
    half = cos.shape[-1]
    x, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    turned = (x * torch.cat([cos, cos], -1)).addcmul_(x.roll(half, -1), torch.cat([-sin, sin], -1))
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _head_normed(norm: NormSpec | None, weights: Weights, x: Tensor) -> Tensor:
    """``x`` [batch, length, heads, head_dim], each head normed by itself or all of a token at once."""
    if norm is None:
        return x
    return normed(norm, weights, x) if norm.size == x.shape[-1] else normed(norm, weights, x.flatten(2)).view_as(x)
