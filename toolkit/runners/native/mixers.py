"""What programs say of each kind of mixer, a record each; C++ reads them in ``read_<kind>`` (read.h). Numbers that are
None are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.models.routed import Routed
from toolkit.models.spec import (
    AlibiSpec,
    AttentionSpec,
    ConvSpec,
    CrossSpec,
    DeltaSpec,
    LatentSpec,
    LinearSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    QueryScale,
    RopeSpec,
    ShortConvSpec,
)
from toolkit.runners.native.packing.packed import LANES, PackedTensor, PackedWeights, floats, vector
from toolkit.runners.native.share import Parts

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "swigluoai": 4, "relu2": 5}
_QUERY_SCALES = {"floor": 1, "log": 2}
_SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_GROUP_SCORES = {"best": 1, "two": 2}  # how many of its experts a group is as good as

STRIPE = 32  # STATE_COLS of ops.h

Record = dict[str, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Tensors:
    """The tensors of a program, ``found``, which records name by their index. KeyError where one is missing. ``sites``:
    linears that adapters may change, by the numbers that they are named by; those that read one input side by side are
    less than 8 apart (``Lowered``).

    ``routed``: what linears are for tokens of pictures. ``parts``: what of them a rank computes, None = all.
    """

    def __init__(
        self,
        weights: PackedWeights,
        ropes: Sequence[RopeSpec] = (),
        routed: Sequence[Routed] = (),
        parts: Parts | None = None,
    ) -> None:
        self.parts = parts
        self._routed = {x.linear: x for x in routed}
        self.sites: dict[str, int] = {}
        self.found: list[PackedTensor] = []
        self.weights = weights
        self._ropes = ropes
        self._index: dict[str, int] = {}
        self._orders: dict[bytes, np.ndarray[Any, np.dtype[np.int32]]] = {}

    def add(self, tensor: PackedTensor) -> int:
        """One that no checkpoint has. Equal orders of columns become one array: by its address the library tells that
        linears quantize their input alike."""
        if tensor.perm is not None:
            one = self._orders.setdefault(tensor.perm.tobytes(), tensor.perm)
            tensor = replace(tensor, perm=one)
        self.found.append(tensor)
        return len(self.found) - 1

    def numbers(self, values: Any) -> int:
        """The same, of float32 values."""
        return self.add(vector(np.asarray(values, np.float32)))

    def named(self, name: str) -> int:
        """That of the weights."""
        if name not in self._index:
            self._index[name] = self.add(self.weights[name])
        return self._index[name]

    def stored(self, name: str) -> Floats:
        """The numbers of a vector among the weights."""
        found = self.weights[name]
        return found.data.view(np.float32)[: found.meta.rows]

    def matrix(self, name: str, bias: str | None) -> Record:
        """A matrix and, where it has a name, its bias."""
        return {"matrix": self.named(name), "bias": None if bias is None else self.named(bias)}

    def linear(self, linear: LinearSpec | None) -> Record | None:
        """As ``matrix``, where there is one."""
        if linear is None:
            return None
        made = self.matrix(linear.name, f"{linear.name}.bias" if linear.bias else None)
        own = None if self.parts is None else self.parts.tiles.get(linear.name)
        return made | {
            "site": self.site(linear.name),
            "seen": self._seen(self._routed.get(linear.name)),
            "own": None if own is None else own._asdict(),
        }

    def codes(self, linear: LinearSpec) -> bool | None:
        """Whether ranks hand on what it reads in integers; None = there are no others."""
        return None if self.parts is None else self.parts.codes.get(linear.name)

    def own_heads(self, a: Any) -> Record | None:
        """Those of a rank."""
        if self.parts is None:
            return None
        if a.kind == "latent":
            start, stop = self.parts.share.portion(a.heads)
            return {"first_head": start, "heads": stop - start, "codes": self.codes(a.o)}
        found = self.parts.share.heads(a.heads, a.kv_heads)
        return {
            "first_head": found.first,
            "heads": found.number,
            "first_kv_head": found.first_kv,
            "kv_heads": found.kv_number,
            "codes": self.codes(a.o),
        }

    def own_states(self, m: Any) -> Record | None:
        """Heads of a state that are a rank's."""
        if self.parts is None:
            return None
        start, stop = self.parts.state_heads(m)
        return {"first": start, "last": stop}

    def site(self, name: str) -> int:
        """That of a linear, or of embedding or head."""
        return self.sites.setdefault(name, len(self.sites))

    def _seen(self, routed: Routed | None) -> Record | None:
        """What it is for tokens of pictures."""
        if routed is None:
            return None
        if routed.rank:
            low = {x: {"matrix": self.named(f"{routed.name}.{x}")} for x in "ab"}
            return {**low, "scale": routed.scale}
        bias = self.numbers(floats(self.weights[f"{routed.name}.bias"])) if routed.bias else None
        return {"whole": {"matrix": self.named(f"{routed.name}.weight"), "bias": bias}}

    def norm(self, norm: NormSpec | None) -> Record | None:
        """A norm, where there is one."""
        if norm is None:
            return None
        return {
            "size": norm.size,
            "sets": norm.heads,
            "layer": norm.kind == "layer",
            "weight": self._norm_weight(norm),
            "bias": self.named(f"{norm.name}.bias") if norm.bias else None,
            "eps": norm.eps,
        }

    def _norm_weight(self, norm: NormSpec) -> int:
        if not norm.weight:
            return self.numbers(np.ones(norm.size))
        if norm.weight_offset == 0:
            return self.named(norm.name)
        return self.numbers(self.stored(norm.name) + np.float32(norm.weight_offset))

    def rope(self, rope: RopeSpec | None) -> int | None:
        """Its index among the program's."""
        return None if rope is None else self._ropes.index(rope)


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
        "group": a.group,
        "scale": a.scale,
        "softcap": a.softcap or 0.0,
        "clip": a.clip or 0.0,
        "alibi": None if a.alibi is None else _alibi(a.alibi, a.scale, t),
        "norm_last": a.norm_last,
        "q_scale": None if a.q_scale is None else _query_scale(a.q_scale),
        "q": t.linear(a.q),
        "k": t.linear(a.k),
        "v": t.linear(a.v),
        "gate": t.linear(a.gate),
        "o": t.linear(a.o),
        "q_norm": t.norm(a.q_norm),
        "k_norm": t.norm(a.k_norm),
        "sinks": None if a.sinks is None else t.named(a.sinks),
        "own": t.own_heads(a),
    }


def _alibi(alibi: AlibiSpec, scale: float, t: Tensors) -> Record:
    factor = alibi.scale / scale  # scores are scaled afterwards
    slopes = np.asarray(alibi.slopes, np.float32) * np.float32(1.0 if alibi.rounded else factor)
    return {"slopes": t.numbers(slopes), "rounded": factor if alibi.rounded else 0.0}


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
        "q_a": t.linear(a.q_a),
        "q_a_norm": t.norm(a.q_a_norm),
        "q": t.linear(a.q),
        "kv_a": t.linear(a.kv_a),
        "kv_a_norm": t.norm(a.kv_a_norm),
        "kv_b": t.linear(a.kv_b),
        "o": t.linear(a.o),
        "own": t.own_heads(a),
    }


def cross(c: CrossSpec, t: Tensors) -> Record:
    return {
        "heads": c.heads,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "scale": c.scale,
        "q": t.linear(c.q),
        "k": t.linear(c.k),
        "v": t.linear(c.v),
        "o": t.linear(c.o),
        "q_norm": t.norm(c.q_norm),
        "k_norm": t.norm(c.k_norm),
        "own": t.own_heads(c),
    }


def short_conv(m: ShortConvSpec, t: Tensors) -> Record:
    return {
        "channels": m.conv.channels,
        "group": m.group,
        "b": t.linear(m.b),
        "c": t.linear(m.c),
        "value": t.linear(m.value),
        "out": t.linear(m.out),
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
        "qkv": t.linear(m.qkv),
        "z": t.linear(m.z),
        "beta": t.linear(m.beta),
        "fade": t.linear(m.fade),
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
        "z": t.linear(m.z),
        "inner": t.linear(m.inner),
        "dt": t.linear(m.dt),
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
        "gate_scale": m.gate_scale,
        "width": m.up.out_features,
        "codes": t.codes(m.down),
        "gate": t.linear(m.gate),
        "up": t.linear(m.up),
        "down": t.linear(m.down),
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
        "codes": t.codes(m.router),
        "router": t.linear(m.router),
        "experts": [mlp(expert, t) for expert in m.experts],
        "shared": None if m.shared is None else mlp(m.shared, t),
        "shared_gate": None if m.shared is None else t.linear(m.shared_gate),
    }


MIXERS: dict[str, Callable[[Any, Tensors], Record]] = {
    "attention": attention,
    "latent": latent,
    "cross": cross,
    "short_conv": short_conv,
    "delta": delta,
    "mamba": mamba,
    "mlp": mlp,
    "moe": moe,
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
