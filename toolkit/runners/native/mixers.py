"""What programs say of each kind of mixer, a record each; C++ reads them in ``read_<kind>`` (read.h). Numbers that are
None are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from toolkit.models.positions import bias_buckets
from toolkit.models.spec import (
    AlibiSpec,
    AttentionSpec,
    ConvSpec,
    CrossSpec,
    DeltaSpec,
    LatentSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    PerLayerSpec,
    PositionBias,
    QueryScale,
    ReuseSpec,
    ShortConvSpec,
)
from toolkit.runners.native.packing.packed import LANES
from toolkit.runners.native.tensors import Floats, Record, Tensors

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "swigluoai": 4, "relu2": 5, "xielu": -1}
_QUERY_SCALES = {"floor": 1, "log": 2}
_SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_GROUP_SCORES = {"best": 1, "two": 2}  # how many of its experts a group is as good as

STRIPE = 32  # STATE_COLS of ops.h


def attention(a: AttentionSpec, t: Tensors) -> Record:
    return {
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "rope": t.rope(a.rope),
        "window": a.window or 0,
        "chunked": a.chunked,
        "sink_tokens": a.sink_tokens,
        "mutual": a.mutual,
        "strict": a.strict,
        "group": a.group,
        "scale": a.scale,
        "softcap": a.softcap or 0.0,
        "clip": a.clip or 0.0,
        "alibi": None if a.alibi is None else _alibi(a.alibi, a.scale, t),
        "position_bias": None if a.position_bias is None else _position_bias(a.position_bias, a.scale, t),
        "norm_last": a.norm_last,
        "q_scale": None if a.q_scale is None else _query_scale(a.q_scale),
        **t.linears(q=a.q, k=a.k, v=None if a.v == a.k else a.v, gate=a.gate, o=a.o),
        "q_norm": t.norm(a.q_norm),
        "k_norm": t.norm(a.k_norm),
        "v_norm": t.norm(a.v_norm),
        "o_norm": t.norm(a.o_norm),
        "sinks": None if a.sinks is None else t.named(a.sinks),
        "own": t.own_heads(a),
    }


def reuse(m: ReuseSpec, t: Tensors) -> Record:
    return {
        "heads": m.heads,
        "kv_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "rope": t.rope(m.rope),
        **t.linears(q=m.q, o=m.o),
        "q_norm": t.norm(m.q_norm),
        "own": t.own_heads(m),
        **({"window": m.newest or 0} if m.outside else {}),
    }


def per_layer(m: PerLayerSpec, t: Tensors) -> Record:
    return {
        "activation": ACTIVATIONS[m.activation],
        "at": m.at,
        "width": m.gate.out_features,
        **t.linears(gate=m.gate, down=m.down),
    }


def _alibi(alibi: AlibiSpec, scale: float, t: Tensors) -> Record:
    factor = alibi.scale / scale  # scores are scaled afterwards
    slopes = np.asarray(alibi.slopes, np.float32) * np.float32(1.0 if alibi.rounded else factor)
    return {"slopes": t.numbers(slopes), "rounded": factor if alibi.rounded else 0.0}


def _position_bias(bias: PositionBias, scale: float, t: Tensors) -> Record:
    table = t.stored(bias.name).reshape(bias.buckets, -1) / np.float32(scale)  # scores are scaled afterwards
    rows = np.pad(table[bias_buckets(bias)].T, ((0, 0), (0, LANES)))  # cells are read whole
    return {"length": bias.length, "rows": t.numbers(rows)}


def _query_scale(scale: QueryScale) -> Record:
    form = _QUERY_SCALES[scale.form]
    return {"form": form, "length": scale.length, "offset": scale.offset, "factor": scale.factor}


def latent(a: LatentSpec, t: Tensors) -> Record:
    return {
        "heads": a.heads,
        "nope_dim": a.nope_dim,
        "rope_dim": a.rope_dim,
        "v_dim": a.v_dim,
        "kv_rank": a.kv_rank,
        "rope": t.rope(a.rope),
        "group": a.group,
        "scale": a.scale,
        **t.linears(q_a=a.q_a, q=a.q, kv_a=a.kv_a, kv_b=a.kv_b, o=a.o),
        "q_a_norm": t.norm(a.q_a_norm),
        "kv_a_norm": t.norm(a.kv_a_norm),
        "own": t.own_heads(a),
    }


def cross(c: CrossSpec, t: Tensors) -> Record:
    return {
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "scale": c.scale,
        **t.linears(q=c.q, k=c.k, v=c.v, o=c.o),
        "q_norm": t.norm(c.q_norm),
        "k_norm": t.norm(c.k_norm),
        "own": t.own_heads(c),
    }


def short_conv(m: ShortConvSpec, t: Tensors) -> Record:
    return {
        "channels": m.conv.channels,
        "group": m.group,
        **t.linears(b=m.b, c=m.c, value=m.value, out=m.out),
        "conv": _conv(m.conv, t),
    }


def _conv(conv: ConvSpec, t: Tensors, scales: Floats | float = 1.0) -> Record:
    """``scales`` of its channels: what their inputs are multiplied by."""
    weight = np.zeros((conv.kernel, _padded(conv.channels)), np.float32)
    weight[:, : conv.channels] = t.stored(conv.weight).reshape(conv.channels, conv.kernel).T * scales
    return {
        "kernel": conv.kernel,
        "weight": t.numbers(weight),
        "bias": None if conv.bias is None else t.named(conv.bias),
    }


def delta(m: DeltaSpec, t: Tensors) -> Record:
    length = m.k_dim**-0.5  # a norm whose weight this is divides by the length
    return {
        "heads": m.heads,
        "k_heads": m.k_heads,
        "k_dim": m.k_dim,
        "v_dim": m.v_dim,
        "group": m.group,
        **t.linears(qkv=m.qkv, z=m.z, beta=m.beta, fade=m.fade),
        "conv": _conv(m.conv, t),
        "q_norm": _unit(m.k_dim, length * m.k_dim**-0.5, t),
        "k_norm": _unit(m.k_dim, length, t),
        "decay": t.numbers(-np.exp(t.stored(m.a_log))),
        "dt_bias": t.named(m.dt_bias),
        "norm": t.norm(m.norm),
        "out": t.linear(m.out),
        "own": t.own_states(m),
    }


def _unit(size: int, weight: float, t: Tensors) -> Record:
    weights = t.numbers(np.full(size, weight))
    return {"size": size, "sets": 1, "layer": False, "weight": weights, "eps": 1e-6 / size}


def mamba(m: MambaSpec, t: Tensors) -> Record:
    z, u, b, c, dt = m.scales or (1.0,) * 5
    shared = m.groups * m.state_size
    norm = t.norm(m.norm)
    return {
        "heads": m.heads,
        "head_dim": m.head_dim,
        "groups": m.groups,
        "state_size": m.state_size,
        "group": m.group,
        **t.linears(z=m.z, inner=m.inner, dt=m.dt),
        "conv": _conv(m.conv, t, np.repeat(np.asarray([u, b, c], np.float32), [m.width_out, shared, shared])),
        "z_scale": z,
        "dt_scale": dt,
        "decay": t.numbers(-np.exp(t.stored(m.a_log))),
        "dt_bias": t.named(m.dt_bias),
        "skip": t.named(m.skip),
        "least": m.least,
        "norm": None if norm is None else norm | {"size": m.width_out // m.groups, "sets": m.groups},
        "norm_first": m.norm_first,
        "norm_apart": None if t.parts is None or m.norm is None else t.parts.norms_apart(m),
        "out": t.linear(m.out),
        "own": t.own_states(m),
    }


_MATRICES: dict[str, Callable[[Any], int]] = {
    "short_conv": lambda m: 0,
    "delta": lambda m: m.heads * m.k_dim * _padded(m.v_dim, STRIPE),
    "mamba": lambda m: m.heads * m.state_size * _padded(m.head_dim, STRIPE),
}


def state_numbers(mixer: Any) -> int:
    """How many float32 numbers it keeps of a request however long that is, as state_read.cpp lays them out."""
    kept = mixer.keeps()
    if kept is None or kept.kind != "state":
        return 0
    return (mixer.conv.kernel - 1) * _padded(mixer.conv.channels) + _padded(_MATRICES[mixer.kind](mixer))


def _padded(count: int, unit: int = LANES) -> int:
    return -(-count // unit) * unit


def mlp(m: MlpSpec, t: Tensors) -> Record:
    return {
        "activation": ACTIVATIONS[m.activation],
        "curve": None if m.curve is None else {name.rpartition(".")[2]: t.named(name) for name in m.curves()[:3]},
        "gate_scale": m.gate_scale,
        "width": m.up.out_features,
        "inner_norm": t.norm(m.inner_norm),
        "codes": t.codes(m.down),
        **t.linears(gate=m.gate, up=m.up, down=m.down),
    }


def moe(m: MoeSpec, t: Tensors) -> Record:
    for linear in (*m.routers(), *(() if m.shared is None else m.shared.linears())):
        t.site(linear.name)  # before those of experts, whose rows are others
    return {
        "top_k": m.top_k,
        "scoring": _SCORINGS[m.scoring],
        "norm_topk": m.norm_topk,
        "correction": None if m.correction is None else t.named(m.correction),
        "groups": m.groups,
        "top_groups": m.top_groups,
        "group_score": _GROUP_SCORES[m.group_score],
        "weigh_input": m.weigh_input,
        "scale": m.scale,
        "jitter": m.jitter,
        "logit_scale": m.logit_scale,
        "each": None if m.each is None else t.named(m.each),
        "apart": None if m.apart is None else {name: t.norm(n) for name, n in vars(m.apart).items()},
        "codes": t.codes(m.router),
        "router": t.linear(m.router),
        "experts": [mlp(expert, t) for expert in m.experts],
        "shared": None if m.shared is None else mlp(m.shared, t),
        "shared_gate": None if m.shared is None else t.linear(m.shared_gate),
    }


MIXERS: dict[str, Callable[[Any, Tensors], Record]] = {
    "attention": attention,
    "reuse": reuse,
    "latent": latent,
    "cross": cross,
    "short_conv": short_conv,
    "delta": delta,
    "mamba": mamba,
    "mlp": mlp,
    "moe": moe,
    "per_layer": per_layer,
}
"""By kind."""


def flat(record: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number with its name, those inside one another joined by dots; what is None is left out. A record or a list
    has the number of its entries."""
    match record:
        case Mapping():
            entries = [(f"{name}.{key}" if name else key, value) for key, value in record.items() if value is not None]
        case Sequence():
            entries = [(f"{name}.{i}", value) for i, value in enumerate(record)]
        case _:
            yield name, float(record)
            return
    if name:
        yield name, float(len(entries))
    for key, value in entries:
        yield from flat(value, key)
