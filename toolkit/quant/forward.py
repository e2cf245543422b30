"""One layer of any spec over whole sequences in float32: what calibration and the held-out figures run on.

No cache, no paging, one layer's weights in memory at a time. Weights are a mapping from canonical names to dense
tensors: ``X`` [out, in] for a linear, ``X.bias`` [out], ``N`` [size] for a norm or a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels.reference.activation import swigluoai
from toolkit.kernels.reference.attention import oldest, raised
from toolkit.kernels.reference.moe import moe_route
from toolkit.kernels.torch.product import prefers_onednn, product
from toolkit.models.rope import inv_freq, query_scale
from toolkit.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from toolkit.quant.lazy import KEEP, Lazy

Weights = Mapping[str, Tensor]
Observer = Callable[[str, Tensor], None]
"""Called with a site's name (``sites.Site.name``) and its input rows [tokens, channels]."""
CACHE = ":cache"
"""After the name of a key or value projection: what goes into the KV cache, a row a token and head."""
HEAD_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # of the head that are multiplied at once; a CPU caches the part
QUERIES = 128  # whose scores against all keys before them are held at once; twice as many where gradients are taken
Rounding = Callable[[str, Tensor], Tensor]
"""Called likewise; returns the rows as linears with 8-bit activations see them."""


class Called(Lazy[Tensor]):
    """Weights of a layer some of whose linears, ``modules`` by name, are called with their inputs instead."""

    def __init__(self, weights: Weights, modules: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(weights, weights.__getitem__)
        self.modules = modules


@dataclass(frozen=True)
class _Watch:
    """Passes a site's input to whoever looks on, and gives it back as the site's linears see it."""

    observe: Observer | None
    rounding: Rounding | None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.observe is not None:
            with torch.autocast(x.device.type, enabled=False):  # sums are taken in float32
                self.observe(name, rows)
        return x if self.rounding is None else self.rounding(name, rows).view_as(x)


def layer_forward(
    layer: LayerSpec,
    weights: Weights,
    hidden: Tensor,
    observe: Observer | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """Run one layer on ``hidden`` [batch, length, hidden] (positions 0 … length-1, causal) and return the new hidden.

    ``observe`` sees the input of every site of the layer; ``rounding`` changes what its linears read (routers and
    gates, which are never quantized, read it unchanged).
    """
    watch = _Watch(observe, rounding)
    block = hidden
    for i, sub in enumerate(layer.sublayers):
        if not layer.shares(i):
            source = block if layer.beside(i) else hidden
            x = source if sub.pre_norm is None else normed(sub.pre_norm, weights, source)
            if torch.is_autocast_enabled(x.device.type):  # once, not for every linear that reads it
                x = x.to(torch.get_autocast_dtype(x.device.type))
            seen = watch(sub.mixer.input_name(), x)
        y = MIXERS[sub.mixer.kind](sub.mixer, weights, x, seen, watch)
        if sub.post_norm is not None:
            y = normed(sub.post_norm, weights, y)
        hidden = torch.add(hidden, y, alpha=sub.residual_scale)
    return hidden


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def all_finite(x: Tensor) -> bool:
    """Whether ``x`` holds neither infinity nor NaN, which extremes pass on: one look where ``isfinite`` takes three."""
    return all(bool(torch.isfinite(extreme)) for extreme in x.aminmax())


def normed(norm: NormSpec, weights: Weights, x: Tensor) -> Tensor:
    """The norm over the last dimension (over heads too, where it spans them); in float32 also within autocast."""
    if not norm.weight:
        return F.rms_norm(x.float(), (norm.size,), eps=norm.eps)
    weight = weights[norm.name].float()
    if norm.kind == "rms":
        return F.rms_norm(x.float(), (norm.size,), weight + norm.weight_offset, norm.eps)
    y = F.layer_norm(x.float(), (norm.size,), eps=norm.eps) * weight.view(norm.heads, norm.size)
    if norm.bias:
        y = y + weights[f"{norm.name}.bias"].float().view(norm.heads, norm.size)
    return y


def _head_normed(norm: NormSpec | None, weights: Weights, x: Tensor) -> Tensor:
    """``x`` [batch, length, heads, head_dim], each head normed by itself or all of a token at once."""
    if norm is None:
        return x
    return normed(norm, weights, x) if norm.size == x.shape[-1] else normed(norm, weights, x.flatten(2)).view_as(x)


def fast_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster there than of float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported()


def in_bf16(device: torch.device) -> torch.autocast:
    """A context in which linears and attention multiply bfloat16 where ``fast_bf16``: exact enough for statistics of
    inputs and for tuning, not for figures."""
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_bf16(device))


def narrow(weights: Weights, device: torch.device) -> Weights:
    """``weights`` for use ``in_bf16``: matrices are converted once, not at every use, as far as ``KEEP`` holds them."""
    if not fast_bf16(device):
        return weights

    def read(name: str) -> Tensor:
        weight = weights[name]
        return weight.bfloat16() if weight.dim() > 1 else weight

    found = Lazy(weights, read, KEEP)
    return Called(found, weights.modules) if isinstance(weights, Called) else found


def embed(spec: DecoderSpec, table: Tensor, token_ids: Tensor) -> Tensor:
    """Hidden states [batch, length, hidden] (float32) of token ids [batch, length]."""
    return table[token_ids].float() * spec.embed_scale


def head_logits(spec: DecoderSpec, weights: Weights, hidden: Tensor) -> Tensor:
    """Logits of ``hidden`` (before the final norm). ``weights`` holds the final norm and ``spec.head``, of any float
    type; the head is widened to float32 a part at a time, except under autocast."""
    x, head = normed(spec.final_norm, weights, hidden), weights[spec.head]
    if torch.is_autocast_enabled(x.device.type):
        logits = F.linear(x, head)
    else:
        rows = max(1, HEAD_ELEMENTS[x.device.type] // head.shape[1])
        parts = (product(x, part.float()) for part in head.split(rows))
        if torch.is_grad_enabled() and x.requires_grad:
            logits = torch.cat(list(parts), dim=-1)
        else:
            logits = x.new_empty(*x.shape[:-1], len(head))
            for a, part in enumerate(parts):
                logits[..., a * rows : (a + 1) * rows] = part
    if (bias := weights.get(f"{spec.head}.bias")) is not None:
        logits = logits + bias.float()
    if spec.head_scale != 1.0:
        logits = logits * spec.head_scale
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    return logits


def _linear(spec: LinearSpec, weights: Weights, x: Tensor) -> Tensor:
    if isinstance(weights, Called) and spec.name in weights.modules:
        return weights.modules[spec.name](x)
    return product(x, weights[spec.name], weights.get(f"{spec.name}.bias"))


def _latent(a: LatentSpec, weights: Weights, raw: Tensor, x: Tensor, watch: _Watch) -> Tensor:
    """In expanded form: keys and values of each head."""
    batch, length, _ = x.shape
    queries = x
    if a.q_a is not None and a.q_a_norm is not None:
        queries = watch(a.q.name, normed(a.q_a_norm, weights, _linear(a.q_a, weights, x)))
    q = _linear(a.q, weights, queries).view(batch, length, a.heads, a.qk_dim)
    latent, shared = _linear(a.kv_a, weights, x).split([a.kv_rank, a.rope_dim], dim=-1)
    latent = watch(a.kv_b.name, normed(a.kv_a_norm, weights, latent))
    k, v = _linear(a.kv_b, weights, latent).view(batch, length, a.heads, -1).split([a.nope_dim, a.v_dim], dim=-1)
    cos, sin = _angles(a.rope, length, x.device)
    shared = _turn(shared[:, :, None], cos, sin).to(k.dtype).expand(-1, -1, a.heads, -1)
    k = torch.cat([k, shared], dim=-1)
    q = torch.cat([q[..., : a.nope_dim], _turn(q[..., a.nope_dim :], cos, sin).to(q.dtype)], dim=-1)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = _attend(q, k, v, None, a.scale).transpose(1, 2).flatten(2)
    return _linear(a.o, weights, watch(a.o.name, out))


def _attention(a: AttentionSpec, weights: Weights, raw: Tensor, x: Tensor, watch: _Watch) -> Tensor:
    batch, length, _ = x.shape
    q = _linear(a.q, weights, x).view(batch, length, a.heads, a.head_dim)
    k = _linear(a.k, weights, x).view(batch, length, a.kv_heads, a.head_dim)
    v = _linear(a.v, weights, x).view(batch, length, a.kv_heads, a.head_dim)
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
    k, v = watch(a.k.name + CACHE, k), watch(a.v.name + CACHE, v)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if a.window is None or a.window >= length else _mask(a, length, x.device)
    if a.softcap is not None or a.sinks is not None or a.alibi is not None:
        out = torch.cat([_capped(a, weights, *(t[i : i + 1] for t in (q, k, v))) for i in range(batch)])
    else:
        out = _attend(q, k, v, mask, a.scale)
    out = out.transpose(1, 2).reshape(batch, length, a.heads * a.head_dim)
    return _linear(a.o, weights, watch(a.o.name, out))


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
    """Attention written out, for what the fused call lacks: soft-capped scores, ALiBi and sinks."""
    repeat = a.heads // a.kv_heads
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = (q @ k.transpose(-1, -2)) * a.scale
    if a.softcap is not None:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    if (alibi := a.alibi) is not None:
        key = torch.arange(q.shape[2], device=q.device)
        slopes = torch.tensor(alibi.slopes, device=q.device)
        scores = scores + raised(slopes, alibi.scale, alibi.rounded, key, key[-1] // 2)
    scores = scores.masked_fill(~_mask(a, q.shape[2], q.device), float("-inf"))
    if a.sinks is not None:
        sink = weights[a.sinks].view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1] @ v
    return torch.softmax(scores, dim=-1) @ v


def _mask(a: AttentionSpec, length: int, device: torch.device) -> Tensor:
    """True where the query (row) may see the key (column)."""
    row = torch.arange(length, device=device)[:, None]
    column = torch.arange(length, device=device)[None, :]
    return (column <= row) & (column >= oldest(row, a.window, a.chunked))


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


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _mlp(m: MlpSpec, weights: Weights, raw: Tensor, x: Tensor, watch: _Watch) -> Tensor:
    up = _linear(m.up, weights, x)
    if m.gate is None:
        inner = _ACTIVATIONS[m.activation](up)
    elif m.activation == "swigluoai":
        inner = swigluoai(_linear(m.gate, weights, x), up)
    else:
        inner = _ACTIVATIONS[m.activation](_linear(m.gate, weights, x)) * up
    return _linear(m.down, weights, watch(m.down.name, inner))


def _moe(m: MoeSpec, weights: Weights, raw: Tensor, x: Tensor, watch: _Watch) -> Tensor:
    """Every expert on the tokens routed to it."""
    shape, raw, seen = x.shape, _rows(raw), _rows(x)
    logits = _linear(m.router, weights, raw).float()  # under autocast a linear gives less
    gate = None if m.shared_gate is None else torch.sigmoid(_linear(m.shared_gate, weights, raw))
    correction = None if m.correction is None else weights[m.correction].float()
    groups = m.groups, m.top_groups, m.group_score
    chosen, best = moe_route.reference(
        logits, m.top_k, m.scoring, m.norm_topk, m.scale, correction, *groups, jitter=m.jitter
    )
    out = torch.zeros_like(raw, dtype=torch.float32)
    for i, expert in enumerate(m.experts):
        token, place = torch.where(chosen == i)
        if token.numel():
            share = best[token, place][:, None]
            rows = seen[token] * share.to(seen.dtype) if m.weigh_input else seen[token]
            y = _mlp(expert, weights, raw, rows, watch)
            out.index_add_(0, token, (y if m.weigh_input else y * share).float())
    if m.shared is not None:
        y = _mlp(m.shared, weights, raw, seen, watch)
        out = out + (y if gate is None else y * gate)
    return out.view(shape)


MIXERS: dict[str, Callable[[Any, Weights, Tensor, Tensor, _Watch], Tensor]] = {
    "attention": _attention,
    "latent": _latent,
    "mlp": _mlp,
    "moe": _moe,
}
"""By kind. Called with the mixer, the layer's weights, its input [batch, length, hidden], the same as linears read it
(rounded, where activations are), and what watches the inputs inside. Returns [batch, length, hidden]."""
