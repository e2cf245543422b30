"""The decoder spec as flat arrays of numbers, in the order in which program.cpp reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from toolkit.models.rope import inv_freq
from toolkit.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    Sublayer,
)
from toolkit.runners.native.packed import PackedTensor, PackedWeights, vector

MAGIC = 0x746B3035
KV_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, 8: 3, 4: 4}
_QUERY_SCALES = {"floor": 1, "log": 2}
_SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_GROUP_SCORES = {"best": 1, "two": 2}  # how many of its experts a group is as good as
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "swigluoai": 4}


def kinds() -> set[str]:
    """Of mixers that programs can have."""
    return set(_Writer.MIXERS)


def unsupported(spec: DecoderSpec) -> str | None:
    """Why there is no program for the spec, whatever its weights, or None: the sizes that program.cpp allows."""
    kept = [found.kept for found in spec.keepers()]
    heads = [m.heads for _, m in spec.mixers() if m.kind in ("attention", "latent")]
    if unknown := {mixer.kind for _, mixer in spec.mixers()} - kinds():
        return f"it runs no {min(unknown)} layers"
    found = {
        "query heads": (max(heads, default=0), 4096),
        "numbers a head": (max((k.head_dim for k in kept if k.kind != "state"), default=0), 4096),
        "rotary embeddings": (len(spec.ropes()), 64),
        "cache groups": (len(spec.cache_groups), 64),
        "sublayers": (sum(len(layer.sublayers) for layer in spec.layers), 1 << 16),
    }
    if any(rope.woven for rope in spec.ropes()):
        return "its frequencies turn by rows and columns one after the other, the model's in turn"
    if spec.vision is not None and spec.vision.deep:
        return "it adds nothing of pictures behind layers"
    if not spec.cache_groups:
        return "it runs no model without attention"
    mlps = [m for _, mixer in spec.mixers() for m in mixer.mlps()]
    if odd := {m.activation for m in mlps} - set(_ACTIVATIONS):
        return f"it has no activation {min(odd)}"
    if any(m.gate_scale != 1 for m in mlps):
        return "it multiplies no gate of an MLP"
    if any(a.gate is not None for _, a in spec.attention_layers()):
        return "it has no gate behind attention"
    for what, (count, most) in found.items():
        if count > most:
            return f"it takes up to {most} {what}, the model has {count}"
    return None


@dataclass
class Program:
    """``tensors``: in the order of the indexes in ``ints``; they must outlive the model made from the program."""

    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)
    tensors: list[PackedTensor] = field(default_factory=list)


def build_program(
    spec: DecoderSpec, weights: PackedWeights, *, dtype: str, quant_policy: int, block_size: int
) -> Program:
    """``dtype`` names the type of keys and values where ``quant_policy`` is 0. KeyError where a weight is missing."""
    return _Writer(spec, weights).write(dtype, quant_policy, block_size)


class _Writer:
    def __init__(self, spec: DecoderSpec, weights: PackedWeights) -> None:
        self._spec, self._weights = spec, weights
        self._out = Program()
        self._index: dict[str, int] = {}

    def write(self, dtype: str, quant_policy: int, block_size: int) -> Program:
        spec, out = self._spec, self._out
        kv = KV_TYPES[quant_policy] if quant_policy else KV_TYPES[dtype]
        out.ints += [MAGIC, spec.vocab_size, spec.hidden_size, block_size, kv, int(dtype == "bfloat16")]
        out.ints += [len(spec.cache_groups), *(g.window or 0 for g in spec.cache_groups)]
        out.ints.append(len(spec.ropes()))
        for rope in spec.ropes():
            self._rope(rope)
        out.floats += [spec.embed_scale, spec.head_scale, spec.logit_softcap or 0.0]
        self._matrix(spec.embed, False)
        sublayers = [(s, layer.beside(i)) for layer in spec.layers for i, s in enumerate(layer.sublayers)]
        out.ints.append(len(sublayers))
        for s, beside in sublayers:
            self._sublayer(s, beside)
        self._norm(spec.final_norm)
        self._matrix(spec.embed if spec.tied else spec.head, False)
        out.ints[-1] = self._tensor(f"{spec.head}.bias") if spec.head_bias else -1
        return out

    def _add(self, tensor: PackedTensor) -> int:
        self._out.tensors.append(tensor)
        return len(self._out.tensors) - 1

    def _tensor(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = self._add(self._weights[name])
        return self._index[name]

    def _norm_weight(self, norm: NormSpec) -> int:
        if not norm.weight:
            return self._add(vector(np.ones(norm.size, np.float32)))
        stored = self._weights[norm.name]
        if norm.weight_offset == 0:
            return self._tensor(norm.name)
        values = stored.data.view(np.float32)[: stored.meta.rows]
        return self._add(vector(values + np.float32(norm.weight_offset)))

    def _matrix(self, name: str, bias: bool) -> None:
        self._out.ints += [self._tensor(name), self._tensor(f"{name}.bias") if bias else -1]

    def _linear(self, linear: LinearSpec | None) -> None:
        if linear is None:
            self._out.ints += [-1, -1]
        else:
            self._matrix(linear.name, linear.bias)

    def _norm(self, norm: NormSpec | None) -> None:
        if norm is None:
            self._out.ints += [0, 1, 0, -1, -1]
        else:
            bias = self._tensor(f"{norm.name}.bias") if norm.bias else -1
            self._out.ints += [norm.size, norm.heads, int(norm.kind == "layer"), self._norm_weight(norm), bias]
        self._out.floats.append(0.0 if norm is None else norm.eps)

    def _rope(self, rope: RopeSpec) -> None:
        time, rows, _ = rope.sections or (rope.rotary_dim // 2, 0, 0)
        self._out.ints += [rope.rotary_dim, time, time + rows]
        for long in (False, True):
            frequencies, factor = inv_freq(rope, long)
            self._out.ints.append(self._add(vector(np.asarray(frequencies, np.float32))))
            self._out.floats.append(factor)

    def _sublayer(self, s: Sublayer, beside: bool) -> None:
        number, write = self.MIXERS[s.mixer.kind]
        self._out.ints.append(number)
        self._norm(s.pre_norm)
        self._norm(s.post_norm)
        self._out.floats.append(s.residual_scale)
        self._out.ints.append(int(beside))
        write(self, s.mixer)

    def _attention(self, a: AttentionSpec) -> None:
        rope = -1 if a.rope is None else self._spec.ropes().index(a.rope)
        self._out.ints += [a.heads, a.kv_heads, a.head_dim, rope, a.window or 0, int(a.chunked), a.group]
        self._out.floats += [a.scale, a.softcap or 0.0, a.clip or 0.0]
        self._alibi(a)
        self._out.ints.append(int(a.norm_last))
        scale = a.q_scale
        self._out.ints += [0, 1, 0] if scale is None else [_QUERY_SCALES[scale.form], scale.length, scale.offset]
        self._out.floats.append(0.0 if scale is None else scale.factor)
        for linear in (a.q, a.k, a.v, a.o):
            self._linear(linear)
        self._norm(a.q_norm)
        self._norm(a.k_norm)
        self._out.ints.append(-1 if a.sinks is None else self._tensor(a.sinks))

    def _latent(self, a: LatentSpec) -> None:
        self._out.ints += [
            a.heads,
            a.nope_dim,
            a.rope_dim,
            a.v_dim,
            a.kv_rank,
            self._spec.ropes().index(a.rope),
            a.group,
        ]
        self._out.floats.append(a.scale)
        self._linear(a.q_a)
        self._norm(a.q_a_norm)
        self._linear(a.q)
        self._linear(a.kv_a)
        self._norm(a.kv_a_norm)
        self._linear(a.kv_b)
        self._linear(a.o)

    def _mlp(self, m: MlpSpec) -> None:
        self._out.ints += [_ACTIVATIONS[m.activation], m.up.out_features]
        for linear in (m.gate, m.up, m.down):
            self._linear(linear)

    def _alibi(self, a: AttentionSpec) -> None:
        if a.alibi is None:
            self._out.ints.append(-1)
            self._out.floats.append(0.0)
            return
        factor = a.alibi.scale / a.scale  # scores are scaled afterwards
        slopes = np.asarray(a.alibi.slopes, np.float32) * np.float32(1.0 if a.alibi.rounded else factor)
        self._out.ints.append(self._add(vector(slopes)))
        self._out.floats.append(factor if a.alibi.rounded else 0.0)

    def _moe(self, m: MoeSpec) -> None:
        self._out.ints += [len(m.experts), m.top_k, _SCORINGS[m.scoring], int(m.norm_topk)]
        self._out.ints.append(-1 if m.correction is None else self._tensor(m.correction))
        self._out.ints += [m.groups, m.top_groups, _GROUP_SCORES[m.group_score], int(m.weigh_input)]
        self._out.floats += [m.scale, m.jitter]
        self._linear(m.router)
        for expert in m.experts:
            self._mlp(expert)
        self._out.ints.append(int(m.shared is not None))
        if m.shared is not None:
            self._mlp(m.shared)
            self._linear(m.shared_gate)

    MIXERS: ClassVar[dict[str, tuple[int, Callable[[_Writer, Any], None]]]] = {
        "attention": (0, _attention),
        "mlp": (1, _mlp),
        "moe": (2, _moe),
        "latent": (3, _latent),
    }  # by kind: its number in program.cpp, and what writes it
