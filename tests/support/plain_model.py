"""A whole decoder of any spec written out in plain torch, in float64: what every executor is compared with.

``logits(spec, weights, ids)``: of one text, no cache. ``weights``: dense tensors by canonical name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.models.positions import bias_buckets
from toolkit.models.rope import inv_freq, query_scale

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}
ACTIVATIONS["relu2"] = lambda x: F.relu(x).square()


def logits(spec: Any, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """float64 [len(ids), vocabulary]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = states(spec, w, ids) @ w[spec.embed if spec.tied else spec.head].T
    x = (x + (w[f"{spec.head}.bias"] if spec.head_bias else 0)) * spec.head_scale
    return x if spec.logit_softcap is None else spec.logit_softcap * torch.tanh(x / spec.logit_softcap)


def states(spec: Any, weights: dict[str, Tensor], ids: list[int], types: list[int] | None = None) -> Tensor:
    """The last hidden states, float64 [len(ids), hidden]; ``types``: of an encoder's tokens."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w[spec.embed][torch.tensor(ids)] * spec.embed_scale
    if (e := spec.encoder) is not None:
        table = {n: w[n].view(-1, spec.hidden_size) for n in (e.types, e.positions) if n}
        x = x + (table[e.types][torch.tensor(types or [0] * len(ids))] if e.types else 0)
        x = x + (table[e.positions][e.offset : e.offset + len(ids)] if e.positions else 0)
        x = _norm(e.norm, w, x)
    kept: dict[Any, Tensor] = {}  # what layers read of one another
    if (table := spec.per_layer) is not None:
        told = _norm(table.norm, w, x @ w[table.projection.name].T * table.projection_scale)
        kept["given"] = (told + w[table.embed][torch.tensor(ids)] * table.embed_scale) * table.scale
    for i, layer in enumerate(spec.layers):
        block = x
        for s in layer.sublayers:
            y = _norm(s.pre_norm, w, block if s.reads == "block" else x)
            x = y if s.carries else x
            if i in {m.source for _, m in spec.mixers() if m.kind == "reuse"} and s.mixer.kind == "attention":
                kept[i] = s.mixer, y
            more = {"reuse": lambda m: kept[m.source], "per_layer": lambda m: (kept["given"],)}.get(s.mixer.kind)
            y = MIXERS[s.mixer.kind](s.mixer, w, y, *(more(s.mixer) if more else ()))
            x = (x + s.residual_scale * _norm(s.post_norm, w, y)) * (1 if s.factor is None else w[s.factor])
    return _norm(spec.final_norm, w, x)


def _norm(n: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Over the last ``n.size`` numbers of each row of x, a row after another of the weight where it has more."""
    if n is None:
        return x
    y = x.reshape(*x.shape[:-1], -1, n.size)
    y = y - y.mean(-1, keepdim=True) if n.kind == "layer" else y
    weight = w[n.name].view(-1, n.size) + n.weight_offset if n.weight else 1
    y = y / (y.square().mean(-1, keepdim=True) + n.eps).sqrt() * weight
    return (y + w[f"{n.name}.bias"].view(-1, n.size) if n.bias else y).reshape(x.shape)


def _linear(x: Any, w: dict[str, Tensor], y: Tensor) -> Tensor:
    y = y @ w[x.name].T
    return y + w[f"{x.name}.bias"] if x.bias else y


def _attention(a: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (_linear(p, w, x) for p in (a.q, a.k, a.v))
    if a.clip is not None:
        q, k, v = (y.clamp(-a.clip, a.clip) for y in (q, k, v))
    q, k, v = (y.view(len(x), -1, a.head_dim) for y in (q, k, v))
    plain = [_norm(n, w, y.flatten(1)).view(y.shape) for n, y in ((a.q_norm, q), (a.k_norm, k))]
    for normed in (not a.norm_last, a.norm_last):
        if normed:
            q, k = (_norm(n, w, y.flatten(1)).view(y.shape) for n, y in ((a.q_norm, q), (a.k_norm, k)))
        elif a.rope is not None:
            frequencies, factor = inv_freq(a.rope, 0 < a.rope.original_max_position < len(x))
            angle = torch.arange(len(x))[:, None, None] * torch.from_numpy(frequencies).double()
            q, k = (_turn(y, angle.cos() * factor, angle.sin() * factor) for y in (q, k))
    if a.q_scale is not None:
        q = q * torch.from_numpy(query_scale(a.q_scale, np.arange(len(x)))).double().view(-1, 1, 1)
    k, v = (y.repeat_interleave(a.heads // a.kv_heads, 1) for y in (k, _norm(a.v_norm, w, v)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * a.scale
    scores = scores if a.softcap is None else a.softcap * torch.tanh(scores / a.softcap)
    if a.alibi is not None:
        kept = (lambda y: y.bfloat16().double()) if a.alibi.rounded else (lambda y: y)
        risen = kept(torch.tensor(a.alibi.slopes).double()[:, None] * kept(torch.arange(len(x)).double()))
        scores = scores + a.alibi.scale * risen[:, None]
    age = torch.arange(len(x))[:, None] - torch.arange(len(x))
    if a.mutual and a.alibi is not None:
        far = torch.tensor(a.alibi.slopes).double()[:, None, None] * age.abs()
        scores = scores - a.alibi.scale * (far + risen[:, None])  # in place of what was added
    if (bias := a.position_bias) is not None:
        bucket = torch.tensor(bias_buckets(bias))[bias.length - 1 - age]
        scores = scores + w[bias.name].view(bias.buckets, a.heads).double()[bucket].permute(2, 0, 1)
    reach = torch.full((len(x),), len(x) if a.window is None else a.window)
    reach = torch.arange(len(x)) % a.window + 1 if a.chunked else reach
    full = a.sink_tokens and a.sink_tokens + a.window
    reach[:full] = torch.arange(len(reach[:full])) + 1
    ahead = a.block - 1 - torch.arange(len(x)) % a.block  # tokens of its own block behind each
    unseen = age.abs() >= reach[:, None] if a.mutual else (age < -ahead[:, None]) | (age >= reach[:, None])
    scores = scores.masked_fill(unseen, float("-inf"))
    for at in range(full, len(x)) if full else ():
        scores[:, at, : at + 1] = _streamed(a, *plain, at)
    sink = torch.full((a.heads,), float("-inf")) if a.sinks is None else w[a.sinks]
    shares = torch.cat([scores, sink.view(-1, 1, 1).expand(-1, len(x), 1)], -1).softmax(-1)[..., :-1]
    y = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
    y = y if a.gate is None else y * torch.sigmoid(_linear(a.gate, w, x))
    return _linear(a.o, w, _norm(a.o_norm, w, y))


def _reuse(m: Any, w: dict[str, Tensor], x: Tensor, source: Any, read: Tensor) -> Tensor:
    """What layer ``m.source`` gives of ``read``, with this layer's queries in place of its own."""
    q = _norm(m.q_norm, w, _linear(m.q, w, x)).view(len(x), -1, m.head_dim)
    k, v = (_linear(p, w, read).view(len(x), -1, m.head_dim) for p in (source.k, source.v))
    k, v = _norm(source.k_norm, w, k.flatten(1)).view(k.shape), _norm(source.v_norm, w, v)
    for rope, turned in ((m.rope, q), (source.rope, k)):
        if rope is not None:
            frequencies, factor = inv_freq(rope, 0 < rope.original_max_position < len(x))
            angle = torch.arange(len(x))[:, None, None] * torch.from_numpy(frequencies).double()
            turned.copy_(_turn(turned, angle.cos() * factor, angle.sin() * factor))
    age = torch.arange(len(x))[:, None] - torch.arange(len(x))
    k, v = (y.repeat_interleave(m.heads // m.kv_heads, 1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * source.scale
    shares = scores.masked_fill((age < 0) | (age >= (source.window or len(x))), float("-inf")).softmax(-1)
    return _linear(m.o, w, torch.einsum("hqk,khd->qhd", shares, v).flatten(1))


def _per_layer(m: Any, w: dict[str, Tensor], x: Tensor, given: Tensor) -> Tensor:
    inner = ACTIVATIONS[m.activation](_linear(m.gate, w, x))
    return _linear(m.down, w, inner * given[:, m.at : m.at + m.gate.out_features])


def _streamed(a: Any, q: Tensor, k: Tensor, at: int) -> Tensor:
    """Scores of the query at ``at`` where the first tokens and a window are kept: all turn by their places in the
    cache, as the paper has it (Xiao et al. 2023)."""
    kept = torch.tensor([*range(a.sink_tokens), *range(at - a.window + 1, at + 1)])
    q, k, places = q[at][None], k[kept], torch.arange(len(kept))
    if a.rope is not None:
        frequencies, factor = inv_freq(a.rope)
        angle = places[:, None, None] * torch.from_numpy(frequencies).double()
        k = _turn(k, angle.cos() * factor, angle.sin() * factor)
        q = _turn(q, angle[-1:].cos() * factor, angle[-1:].sin() * factor)
    scores = torch.einsum("hd,khd->hk", q[0], k.repeat_interleave(a.heads // a.kv_heads, 1)) * a.scale
    scores = scores if a.softcap is None else a.softcap * torch.tanh(scores / a.softcap)
    if a.alibi is not None:
        scores = scores + a.alibi.scale * torch.tensor(a.alibi.slopes).double()[:, None] * places
    return torch.full((a.heads, at + 1), float("-inf")).double().index_copy(1, kept, scores)


def _latent(a: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    queries = x if a.q_a is None else _norm(a.q_a_norm, w, _linear(a.q_a, w, x))
    q = _linear(a.q, w, queries).view(len(x), a.heads, -1)
    latent, shared = _linear(a.kv_a, w, x).split([a.kv_rank, a.rope_dim], -1)
    both = _linear(a.kv_b, w, _norm(a.kv_a_norm, w, latent)).view(len(x), a.heads, -1)
    frequencies, factor = inv_freq(a.rope, 0 < a.rope.original_max_position < len(x))
    angle = torch.arange(len(x))[:, None, None] * torch.from_numpy(frequencies).double()
    turned, shared = (
        _turn(y, angle.cos() * factor, angle.sin() * factor) for y in (q[..., a.nope_dim :], shared[:, None])
    )
    scores = torch.einsum("qhd,khd->hqk", q[..., : a.nope_dim], both[..., : a.nope_dim])
    scores = (scores + torch.einsum("qhd,kd->hqk", turned, shared[:, 0])) * a.scale
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return _linear(a.o, w, torch.einsum("hqk,khd->qhd", shares, both[..., a.nope_dim :]).flatten(1))


def _short_conv(m: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    b, c, value = (_linear(p, w, x) for p in (m.b, m.c, m.value))
    return _linear(m.out, w, c * _convolved(m.conv, w, b * value))


def _mamba(m: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    z, inner, dt = (_linear(p, w, x) for p in (m.z, m.inner, m.dt))
    width, shared = m.heads * m.head_dim, m.groups * m.state_size
    s = m.scales or (1.0,) * 5
    by = torch.tensor(s[1:4]).double().repeat_interleave(torch.tensor([width, shared, shared]))
    u, b, c = F.silu(_convolved(m.conv, w, inner * by)).split([width, shared, shared], -1)
    dt = F.softplus(dt * s[4] + w[m.dt_bias]).clamp(min=m.least)
    state, rows = torch.zeros(m.heads, m.head_dim, m.state_size).double(), []
    for t in range(len(x)):
        key, query = (y[t].view(m.groups, -1).repeat_interleave(m.heads // m.groups, 0) for y in (b, c))
        mine = u[t].view(m.heads, -1)
        state = state * torch.exp(-w[m.a_log].exp() * dt[t])[:, None, None]
        state = state + torch.einsum("h,hp,hn->hpn", dt[t], mine, key)
        rows.append((torch.einsum("hpn,hn->hp", state, query) + w[m.skip][:, None] * mine).flatten())
    y, gate = torch.stack(rows), F.silu(z * s[0])
    if m.norm is None:
        return _linear(m.out, w, y * gate)
    parts = (y if m.norm_first else y * gate).view(len(x), m.groups, -1)
    y = (parts / (parts.square().mean(-1, keepdim=True) + m.norm.eps).sqrt()).flatten(1) * w[m.norm.name]
    return _linear(m.out, w, y * gate if m.norm_first else y)


def _delta(m: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    mixed = F.silu(_convolved(m.conv, w, _linear(m.qkv, w, x)))
    q, k, v = mixed.split([m.k_heads * m.k_dim] * 2 + [m.heads * m.v_dim], -1)
    q, k = (y.view(len(x), m.k_heads, -1).repeat_interleave(m.heads // m.k_heads, 1) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = torch.sigmoid(_linear(m.beta, w, x))
    fade = -w[m.a_log].exp() * F.softplus(_linear(m.fade, w, x) + w[m.dt_bias])
    state, rows = torch.zeros(m.heads, m.k_dim, m.v_dim).double(), []
    for t in range(len(x)):
        state = state * fade[t].exp()[:, None, None]
        missing = v[t].view(m.heads, -1) - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], missing)
        rows.append(torch.einsum("hk,hkv->hv", q[t], state) / m.k_dim**0.5)
    y = torch.stack(rows)
    y = y / (y.square().mean(-1, keepdim=True) + m.norm.eps).sqrt() * w[m.norm.name]
    return _linear(m.out, w, y.flatten(1) * F.silu(_linear(m.z, w, x)))


def _convolved(conv: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    taps = w[conv.weight].view(conv.channels, conv.kernel)
    rows = torch.cat([torch.zeros(conv.kernel - 1, conv.channels).double(), x])
    y = torch.stack([(rows[t : t + conv.kernel].T * taps).sum(-1) for t in range(len(x))])
    return y if conv.bias is None else y + w[conv.bias]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _mlp(m: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    up = _linear(m.up, w, x)
    if m.activation == "swigluoai":
        gate = (_linear(m.gate, w, x) * m.gate_scale).clamp(max=7.0)
        inner = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
    elif m.activation == "xielu":
        p, n, beta, _ = (w[name] for name in m.curves())
        bent = (F.softplus(n) + beta) * (torch.exp(up) - 1 - up)
        inner = torch.where(up > 0, F.softplus(p) * up**2, bent) + beta * up
    else:
        act = ACTIVATIONS[m.activation]
        inner = act(up) if m.gate is None else act(_linear(m.gate, w, x) * m.gate_scale) * up
    return _linear(m.down, w, _norm(m.inner_norm, w, inner))


def _shares(m: Any, w: dict[str, Tensor], row: Tensor) -> Tensor:
    """Of one token's logits, a number an expert: what it is weighed by, 0 for those that are not chosen."""
    if m.scoring == "sparsemixer":
        return m.scale * _mixed_shares(m, row)
    scores = row.softmax(-1) if m.scoring == "softmax" else row.sigmoid()
    ranks = scores if m.correction is None else scores + w[m.correction]
    each = len(row) // m.groups
    by_group = [sorted(g, reverse=True) for g in ranks.view(m.groups, each).tolist()]
    goods = [sum(g[: 2 if m.group_score == "two" else 1]) for g in by_group]
    groups = sorted(range(m.groups), key=lambda g: -goods[g])[: m.top_groups]
    open_to = [e for g in groups for e in range(g * each, (g + 1) * each)]
    chosen = sorted(open_to, key=lambda e: -float(ranks[e]))[: m.top_k]
    total = sum(float(scores[e]) for e in chosen) if m.norm_topk else 1.0
    return torch.tensor([m.scale * float(s) / total if e in chosen else 0.0 for e, s in enumerate(scores)]).double()


def _mixed_shares(m: Any, row: Tensor) -> Tensor:
    found, left = torch.zeros_like(row), row.clone()
    for _ in range(m.top_k):
        best = left.max()
        near = [s for s, mine in zip(row.tolist(), left, strict=True) if mine > -torch.inf
                and (best - s) / max(abs(s), float(best)) <= 2 * m.jitter]  # fmt: skip
        found[left.argmax()] = 1 / sum((torch.tensor(near).double() - best).exp())
        left[left.argmax()] = -torch.inf
    return found


def _moe(m: Any, w: dict[str, Tensor], x: Tensor) -> Tensor:
    apart = m.apart
    read, x, beside = (
        (x,) * 3 if apart is None else (_norm(n, w, x) for n in (apart.router, apart.experts, apart.shared))
    )
    shares = torch.stack([_shares(m, w, row) for row in _linear(m.router, w, read) * m.logit_scale])
    shares = shares if m.each is None else shares * w[m.each]
    if m.weigh_input:
        weighed = (_mlp(e, w, x * shares[:, i : i + 1]) * (shares[:, i : i + 1] != 0) for i, e in enumerate(m.experts))
    else:
        weighed = (_mlp(e, w, x) * shares[:, i : i + 1] for i, e in enumerate(m.experts))
    y = sum(weighed)
    if m.shared is not None:
        extra = _mlp(m.shared, w, beside)
        y, extra = (y, extra) if apart is None else (_norm(apart.experts_out, w, y), _norm(apart.shared_out, w, extra))
        y = y + (extra if m.shared_gate is None else extra * torch.sigmoid(_linear(m.shared_gate, w, x)))
    return y


MIXERS = {
    "attention": _attention,
    "reuse": _reuse,
    "per_layer": _per_layer,
    "latent": _latent,
    "short_conv": _short_conv,
    "mamba": _mamba,
    "delta": _delta,
    "mlp": _mlp,
    "moe": _moe,
}
