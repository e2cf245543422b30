"""The decoder spec as a record of named numbers, which program.cpp reads by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.rope import inv_freq
from toolkit.models.routed import Routed
from toolkit.models.spec import DecoderSpec, EncoderSpec, Mixer, PerLayerTable, RopeSpec
from toolkit.runners.native.key_means import read_means
from toolkit.runners.native.mixers import ACTIVATIONS, MIXERS, flat
from toolkit.runners.native.packing.packed import PackedTensor, PackedWeights
from toolkit.runners.native.share import STRIPE, Parts
from toolkit.runners.native.tensors import Floats, Tensors

CHUNK = 512  # of plan.h
KV_TYPES: dict[str | int, int] = {"float32": 0, "bfloat16": 1, "float16": 2, 8: 3, 4: 4, 44: 5, 55: 6, 54: 7, 65: 8}


def kinds() -> set[str]:
    """Of mixers that programs can have."""
    return set(MIXERS)


def unsupported(spec: DecoderSpec) -> str | None:
    """Why there is no program for the spec, whatever its weights, or None: the sizes that program.cpp allows."""
    kept = [found.kept for found in spec.keepers()]
    states = [n for k in kept if k.kind == "state" for part in k.parts if part.wide for n in part.shape]
    heads = [m.heads for _, m in spec.mixers() if m.kind in ("attention", "latent", "reuse")]
    if unknown := {mixer.kind for _, mixer in spec.mixers()} - kinds():
        return f"it runs no {min(unknown)} layers"
    columns = 0 if spec.per_layer is None else spec.per_layer.columns
    found = {
        "numbers of embeddings of layers' own": (columns, CHUNK * STRIPE),
        "query heads": (max(heads, default=0), 4096),
        "numbers a head": (max((k.head_dim for k in kept if k.kind != "state"), default=0), 4096),
        "heads, or numbers a head, of a state": (max(states, default=0), 4096),
        "rotary embeddings": (len(spec.ropes()), 64),
        "cache groups": (len(spec.cache_groups), 64),
        "sublayers": (sum(len(layer.sublayers) for layer in spec.layers), 1 << 16),
        "tokens that see those behind them": (max(spec.block, spec.together), CHUNK),
        "tokens of a text": (spec.max_position if spec.mutual else 0, 1 << 20),
    }
    if spec.vision is not None and (reason := _odd(spec, {x.linear: x for x in spec.vision.routed})):
        return f"tokens of pictures have other linears {reason}"
    if not spec.cache_groups:
        return "it runs no model that keeps nothing of a request"
    mlps = [m for _, mixer in spec.mixers() for m in mixer.mlps()]
    if odd := {m.activation for m in mlps} - set(ACTIVATIONS):
        return f"it has no activation {min(odd)}"
    for what, (count, most) in found.items():
        if count > most:
            return f"it takes up to {most} {what}, the model has {count}"
    return None


def _odd(spec: DecoderSpec, routed: Mapping[str, Routed]) -> str | None:
    """What is not known of linears that tokens of pictures have otherwise, or None."""
    names = set(routed)
    for _, mixer in spec.mixers():
        if mixer.kind == "attention":
            names -= {x.name for x in (mixer.q, mixer.k, mixer.v, mixer.o)}
        if mixer.kind != "mlp":
            continue
        names -= {x.name for x in mixer.linears()}
        ranks = {x.name in routed and 1 + min(routed[x.name].rank, 1) for x in mixer.readers()}
        if len(ranks) > 1:
            return "for a gate and not for what it multiplies"
        if 2 in ranks and (mixer.gate is None or mixer.gate_scale != 1 or mixer.activation == "swigluoai"):
            return f"of low rank in an MLP with {mixer.activation}, without a gate or with a scaled one"
    return f"outside of attention and MLPs: {min(names)}" if names else None


@dataclass(frozen=True)
class Program:
    """``names[i]`` has ``values[i]``. ``tensors``: in the order of the indexes among the values; they must outlive the
    model made from the program."""

    names: tuple[str, ...]
    values: tuple[float, ...]
    tensors: tuple[PackedTensor, ...]
    sites: dict[str, int]  # of linears, embedding and head: by which adapters name them
    bases: dict[str, PackedTensor]  # those linears and the head


def build_program(
    spec: DecoderSpec,
    weights: PackedWeights,
    *,
    dtype: str,
    quant_policy: int,
    block_size: int,
    parts: Parts | None = None,
    kv_layers: Sequence[int] = (),
    key_means: str = "",
    beside: DecoderSpec | None = None,
) -> Program:
    """``dtype`` names the type of keys and values where ``quant_policy`` is 0; ``parts``: of one of several ranks;
    ``kv_layers`` and ``key_means``: see RunnerOptions; ``beside``: of the model whose cache it reads, if that is
    another. KeyError where a weight is missing."""
    tensors = Tensors(weights, spec.ropes(), () if spec.vision is None else spec.vision.routed, parts)
    record = {
        "rank": 0 if parts is None else parts.share.rank,
        "ranks": 1 if parts is None else parts.share.ranks,
        "vocabulary": spec.vocab_size,
        "hidden": spec.hidden_size,
        "block_size": block_size,
        "cache_type": KV_TYPES[quant_policy or dtype],
        "deep": 0 if spec.vision is None else len(spec.vision.deep),
        "bfloat16": dtype == "bfloat16",
        "groups": [
            {"window": g.window or 0, "sink_tokens": g.sink_tokens, "state": g.kind == "state"}
            for g in spec.cache_groups
        ],
        "chunk": max(CHUNK, spec.max_position if spec.mutual else 0),
        "encoder": None if spec.encoder is None else _encoder(spec.encoder, tensors),
        "ropes": [_rope(rope, tensors) for rope in spec.ropes()],
        "embed_scale": spec.embed_scale,
        "head_scale": spec.head_scale,
        "softcap": spec.logit_softcap or 0.0,
        "embed": tensors.matrix(spec.embed, None) | {"site": tensors.site(spec.embed)},
        "per_layer": None if spec.per_layer is None else _per_layer(spec.per_layer, tensors),
        "sublayers": _sublayers(spec, tensors, _caches(spec, tensors, dtype, kv_layers, key_means), beside or spec),
        "final_norm": tensors.norm(spec.final_norm),
        "head_rows": spec.head_size,
        "head": _head(spec, tensors),
    }
    names, values = zip(*flat(record), strict=True)
    bases = {name: tensors.found[at] for name in tensors.sites if (at := tensors.place(name)) is not None}
    bases[spec.head] = weights[spec.embed if spec.tied else spec.head]
    return Program(names, values, tuple(tensors.found), tensors.sites, bases)


def _encoder(added: EncoderSpec, tensors: Tensors) -> dict[str, Any]:
    return {
        "positions": None if added.positions is None else tensors.named(added.positions),
        "position_rows": added.position_rows,
        "offset": added.offset,
        "types": None if added.types is None else tensors.named(added.types),
        "type_rows": added.type_rows,
        "norm": tensors.norm(added.norm),
    }


def _per_layer(table: PerLayerTable, tensors: Tensors) -> dict[str, Any]:
    return {
        "table": tensors.matrix(table.embed, None),
        "rows": table.rows,
        "columns": table.columns,
        "embed_scale": table.embed_scale,
        "projection": tensors.matrix(table.projection.name, None),
        "projection_scale": table.projection_scale,
        "norm": tensors.norm(table.norm),
        "scale": table.scale,
        "pad": table.pad,
    }


def _head(spec: DecoderSpec, tensors: Tensors) -> dict[str, Any]:
    made = tensors.matrix(spec.embed if spec.tied else spec.head, f"{spec.head}.bias" if spec.head_bias else None)
    made |= {"site": tensors.site(spec.head)}
    return made if tensors.parts is None else made | {"own": tensors.parts.head._asdict()}


def _rope(rope: RopeSpec, tensors: Tensors) -> dict[str, Any]:
    record: dict[str, Any] = {"rotary_dim": rope.rotary_dim, "axis": tensors.numbers(_axes(rope))}
    for name, long in (("short", False), ("long", True)):
        frequencies, factor = inv_freq(rope, long)
        record[name] = {"inv_freq": tensors.numbers(frequencies), "factor": factor}
    if rope.own:
        numbers = tensors.numbers(np.array([rope.theta, rope.factor], np.float32))
        record["ntk"] = {"trained": rope.original_max_position, "numbers": numbers}
    return record


def _axes(rope: RopeSpec) -> Floats:
    """By which of a token's positions each frequency turns: 0 time, 1 rows, 2 columns."""
    found = np.zeros(rope.rotary_dim // 2, np.float32)
    for axis, count in enumerate(rope.sections):
        before = sum(rope.sections[:axis])
        found[slice(axis, 3 * count, 3) if rope.woven and axis else slice(before, before + count)] = axis
    return found


def _gate(mixer: Mixer) -> str | None:
    """The number whose tanh multiplies what tokens are given that see pictures, others nothing."""
    if mixer.kind == "cross":
        return mixer.gate
    return mixer.seen if mixer.kind == "mlp" else None


def _caches(
    spec: DecoderSpec, tensors: Tensors, dtype: str, kv_layers: Sequence[int], key_means: str
) -> Iterator[dict[str, Any]]:
    """How the layers that keep rows of tokens keep them, in their order, as far as the program does not say."""
    means = read_means(spec, key_means)
    policies: Sequence[int | None] = kv_layers or [None] * len(means)
    for policy, mean in zip(policies, means, strict=True):
        yield {
            "cache_type": None if policy is None else KV_TYPES[policy or dtype],
            "key_mean": None if mean is None else tensors.numbers(mean),
        }


def _sublayers(
    spec: DecoderSpec, tensors: Tensors, caches: Iterator[dict[str, Any]], keeps: DecoderSpec
) -> list[dict[str, Any]]:
    """``caches``: see ``_caches``; ``keeps``: the model whose keys and values are read."""

    def cache(mixer: Mixer) -> dict[str, Any]:
        kept = mixer.keeps()
        return {} if kept is None or kept.kind == "state" else next(caches)

    def source(mixer: Mixer) -> dict[str, Any]:
        return {"source": keepers[mixer.source]} if mixer.kind == "reuse" else {}

    deep = 0 if spec.vision is None else len(spec.vision.deep)
    keepers = {layer: i for i, (layer, mixer) in enumerate(keeps.mixers()) if mixer.kind == "attention"}
    return [
        {
            "pre_norm": tensors.norm(s.pre_norm),
            "post_norm": tensors.norm(s.post_norm),
            "residual_scale": s.residual_scale,
            "beside": layer.beside(i),
            "carries": s.carries,
            "gate": None if (gate := _gate(s.mixer)) is None else tensors.named(gate),
            "factor": None if s.factor is None else tensors.named(s.factor),
            "deep": number if number <= deep and i == len(layer.sublayers) - 1 else 0,
            s.mixer.kind: MIXERS[s.mixer.kind](s.mixer, tensors) | cache(s.mixer) | source(s.mixer),
        }
        for number, layer in enumerate(spec.layers, start=1)
        for i, s in enumerate(layer.sublayers)
    ]
