"""Is a spec sound? What a family builds always is; one read from a file may have been tampered with or cut short."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from toolkit.models.rope_config import KINDS
from toolkit.models.spec import AttentionSpec, DecoderSpec, LinearSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec, Sublayer

# Integer fields that may be zero; every other one is a size or a count.
_MAY_BE_ZERO = {"group", "original_max_position", "max_position"}


def check_spec(spec: DecoderSpec) -> None:
    """Raise ValueError, one line, where numbers of the spec are impossible or contradict one another."""
    _numbers(spec, "")
    _expect("max_position", spec.max_position >= 1, spec.max_position, "at least 1")
    _expect("layers", bool(spec.layers), 0, "at least one")
    _norm(spec.final_norm, spec.hidden_size)
    for layer in spec.layers:
        _expect("sublayers", bool(layer.sublayers), 0, "at least one in each layer")
        for i, s in enumerate(layer.sublayers):
            good = s.reads == "stream" or i <= 1 or layer.beside(i - 1)
            _expect("reads", good, s.reads, "stream, as the sublayer before it reads")
            _sublayer(s, spec)
    _groups(spec)
    names = [spec.embed, spec.head, *(x.name for x in spec.linears()), *(n.name for n in spec.norms())]
    names += [name for layer in spec.layers for s in layer.sublayers for name in s.mixer.vectors()]
    for name, count in Counter(names).items():
        _expect("name", bool(name) and count == 1, name, "a name that is given once")


def _expect(field: str, good: bool, found: object, expected: str) -> None:
    if not good:
        shown = "a huge integer" if isinstance(found, int) and found.bit_length() > 64 else f"{found!r:.60}"
        raise ValueError(f"{field}: found {shown}, expected {expected}")


def _numbers(node: Any, field: str) -> None:
    """Every integer positive (or zero where that has a meaning), every float finite."""
    if dataclasses.is_dataclass(node):
        for f in dataclasses.fields(node):
            _numbers(getattr(node, f.name), f.name)
    elif isinstance(node, tuple):
        for x in node:
            _numbers(x, "" if field == "layers" else field)
    elif isinstance(node, float):
        _expect(field, math.isfinite(node), node, "a finite number")
    elif isinstance(node, int) and not isinstance(node, bool):
        low = 0 if field in _MAY_BE_ZERO or not field else 1
        _expect(field, low <= node < 1 << 40, node, f"an integer from {low} up")


def _sublayer(s: Sublayer, spec: DecoderSpec) -> None:
    for norm in (s.pre_norm, s.post_norm):
        if norm is not None:
            _norm(norm, spec.hidden_size)
    if isinstance(s.mixer, AttentionSpec):
        _attention(s.mixer, spec.hidden_size)
    elif isinstance(s.mixer, MlpSpec):
        _mlp(s.mixer, spec.hidden_size)
    else:
        _moe(s.mixer, spec.hidden_size)


def _norm(norm: NormSpec, *sizes: int, heads: int = 1) -> None:
    """``heads``: how many may have weights of their own."""
    _expect(f"{norm.name}.size", norm.size in sizes, norm.size, " or ".join(map(str, sizes)))
    _expect(f"{norm.name}.eps", 0 < norm.eps < 1, norm.eps, "a number between 0 and 1")
    layer = norm.kind == "layer"
    _expect(f"{norm.name}.bias", layer or not norm.bias, norm.bias, "false for an RMS norm")
    _expect(f"{norm.name}.weight_offset", not (layer and norm.weight_offset), norm.weight_offset, "0 for a layer norm")
    several = heads if layer and norm.size == sizes[0] else 1
    _expect(f"{norm.name}.heads", norm.heads in (1, several), norm.heads, f"1 or {several}" if several > 1 else "1")


def _linear(x: LinearSpec, n_in: int, n_out: int) -> None:
    found = (x.in_features, x.out_features)
    _expect(x.name, found == (n_in, n_out), found, f"{(n_in, n_out)} input and output features")


def _attention(a: AttentionSpec, hidden: int) -> None:
    q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
    _expect("kv_heads", a.heads % a.kv_heads == 0, a.kv_heads, f"a divisor of {a.heads}")
    _linear(a.q, hidden, q_size)
    _linear(a.k, hidden, kv_size)
    _linear(a.v, hidden, kv_size)
    _linear(a.o, q_size, hidden)
    if a.q_norm is not None:
        _norm(a.q_norm, a.head_dim, q_size, heads=a.heads)
    if a.k_norm is not None:
        _norm(a.k_norm, a.head_dim, kv_size, heads=a.kv_heads)
    _expect("softcap", a.softcap is None or a.softcap > 0, a.softcap, "a number above 0")
    if a.rope is not None:
        _rope(a.rope, a.head_dim)


def _rope(rope: RopeSpec, head_dim: int) -> None:
    dim = rope.rotary_dim
    _expect("rotary_dim", dim % 2 == 0 and dim <= head_dim, dim, f"an even number up to {head_dim}")
    _expect("kind", rope.kind in KINDS, rope.kind, f"one of {', '.join(KINDS)}")
    _expect("theta", rope.theta > 1, rope.theta, "a number above 1")
    _expect("factor", rope.factor > 0, rope.factor, "a number above 0")
    if rope.kind in ("dynamic", "llama3", "yarn", "longrope"):
        _expect("original_max_position", rope.original_max_position > 0, rope.original_max_position, "at least 1")
    if rope.kind == "dynamic":
        _expect("rotary_dim", dim >= 4, dim, "at least 4 for dynamic rope")
        _expect("max_position", rope.max_position >= rope.original_max_position, rope.max_position, "the longer one")
        _expect("factor", rope.factor >= 1, rope.factor, "at least 1 for dynamic rope")
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        _expect("high_freq_factor", 0 < low < high, high, f"a number above low_freq_factor ({low})")
    if rope.kind == "yarn":
        _expect("beta_fast", rope.beta_fast > 0 and rope.beta_slow > 0, rope.beta_fast, "betas above 0")
    if rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            good = len(factors) == dim // 2 and all(f > 0 for f in factors)
            _expect(name, good, f"{len(factors)} values", f"{dim // 2} numbers above 0")


def _mlp(m: MlpSpec, hidden: int) -> None:
    inner = m.up.out_features
    _expect("activation", m.activation != "swigluoai" or m.gate is not None, m.activation, "one that needs no gate")
    for x in m.readers():
        _linear(x, hidden, inner)
    _linear(m.down, inner, hidden)


def _moe(m: MoeSpec, hidden: int) -> None:
    _expect("experts", bool(m.experts), 0, "at least one")
    _expect("top_k", m.top_k <= len(m.experts), m.top_k, f"at most {len(m.experts)}")
    _linear(m.router, hidden, len(m.experts))
    for expert in m.experts:
        _mlp(expert, hidden)
        inner = m.experts[0].up.out_features
        _expect(expert.up.name, expert.up.out_features == inner, expert.up.out_features, f"{inner}, as in expert 0")
    if m.shared is not None:
        _mlp(m.shared, hidden)
    if m.shared_gate is not None:
        _linear(m.shared_gate, hidden, 1)


def _groups(spec: DecoderSpec) -> None:
    """Every attention layer stands in exactly the group that it names, whose window is its own."""
    members: list[list[int]] = [[] for _ in spec.cache_groups]
    for i, a in spec.attention_layers():
        _expect("group", a.group < len(members), a.group, f"below {len(members)}, the number of cache_groups")
        members[a.group].append(i)
        window = spec.cache_groups[a.group].window
        _expect("window", a.window == window, a.window, f"{window}, as its cache group has it")
    for group, layers in zip(spec.cache_groups, members, strict=True):
        _expect("cache_groups", list(group.layers) == layers, group.layers, f"layers {layers}"[:60])
        _expect("kind", (group.kind == "full") == (group.window is None), group.kind, "window where a window is given")
