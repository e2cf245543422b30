"""How a checkpoint spells and shapes a spec's parameters: names, linears that are stored as one, stacks of experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.config.dims import Dims
from toolkit.models.spec import DecoderSpec, LayerSpec, NormSpec, Part, Rows, StoredTensor


@dataclass(frozen=True)
class Fused:
    """Linears that the checkpoint stores as one: the module's name inside the layer, and the rows of each.

    ``shape``: where it is no matrix of all rows; it, ``transposed``, ``bare`` and ``flat`` as in ``StoredTensor``.
    """

    name: str
    rows: dict[str, Rows]  # canonical name inside the layer → rows
    shape: tuple[int, ...] = ()
    transposed: bool = False
    bare: bool = False
    flat: bool = False


def joined(name: str, sizes: Mapping[str, int]) -> Fused:
    """The module ``name``, in which so many rows of each linear stand one below the other."""
    stops = itertools.accumulate(sizes.values())
    return Fused(name, {part: ((stop - size, stop),) for (part, size), stop in zip(sizes.items(), stops, strict=True)})


def fused_qkv(dims: Dims, name: str) -> Fused:
    """The rows of q, then k, then v in the module ``name``."""
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return joined(name, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv})


def fused_by_kv_head(dims: Dims, name: str) -> Fused:
    """For each kv head the rows of its query heads, then of the key head, then of the value head, in ``name``."""
    d, q_per_kv = dims.head_dim, dims.heads // dims.kv_heads
    block = (q_per_kv + 2) * d
    starts = [h * block for h in range(dims.kv_heads)]
    return Fused(
        name,
        {
            "self_attn.q_proj": tuple((s, s + q_per_kv * d) for s in starts),
            "self_attn.k_proj": tuple((s + q_per_kv * d, s + (q_per_kv + 1) * d) for s in starts),
            "self_attn.v_proj": tuple((s + (q_per_kv + 1) * d, s + block) for s in starts),
        },
    )


def fused_gate_up(dims: Dims, name: str) -> Fused:
    """The rows of the gate, then of the up projection in the module ``name``."""
    return joined(name, {"mlp.gate_proj": dims.intermediate, "mlp.up_proj": dims.intermediate})


def fused_experts(
    count: int,
    hidden: int,
    inner: int,
    names: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    *,
    woven: bool = False,
    transposed: bool = False,
    bare: bool = True,
    inside: str = "mlp.experts",
) -> list[Fused]:
    """Experts that stand in two tensors, ``names``: [experts, 2 · inner, hidden], of each expert the gate before up, or
    where they are ``woven`` row by row in turn, and [experts, hidden, inner], down. ``transposed``: with the two last
    axes the other way round. ``inside``: what canonical names have before an expert's number."""
    both: dict[str, Rows] = {}
    for e in range(count):
        start, stop = 2 * inner * e, 2 * inner * (e + 1)
        gate, up = (
            ((start, stop, 2), (start + 1, stop, 2)) if woven else ((start, start + inner), (start + inner, stop))
        )
        both |= {f"{inside}.{e}.gate_proj": (gate,), f"{inside}.{e}.up_proj": (up,)}
    down: dict[str, Rows] = {f"{inside}.{e}.down_proj": ((hidden * e, hidden * (e + 1)),) for e in range(count)}
    found = []
    for name, rows, shape in ((names[0], both, (2 * inner, hidden)), (names[1], down, (hidden, inner))):
        stored = (count, *(shape[::-1] if transposed else shape))
        found.append(Fused(name, rows, stored, transposed=transposed, bare=bare))
    return found


def renamed(endings: Mapping[str, str], parts: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A ``rename`` that replaces how a canonical name ends, by the first of ``endings`` that fits, and then all
    ``parts`` of the name in turn."""

    def rename(name: str) -> str:
        if (ours := next((ours for ours in endings if name.endswith(ours)), None)) is not None:
            name = name.removesuffix(ours) + endings[ours]
        for ours, theirs in (parts or {}).items():
            name = name.replace(ours, theirs)
        return name

    return rename


def stored_tensors(
    spec: DecoderSpec,
    rename: Callable[[str], str] = str,
    fused: Sequence[Fused] = (),
    *,
    pairs: bool = False,
    unit_head: bool = False,
) -> list[StoredTensor]:
    """Every tensor of the checkpoint: embedding, layer after layer (norms, vectors, linears), final norm, head.

    ``rename`` turns a canonical name into the checkpoint's (of a fused module: with ``Fused.name`` in place).
    ``pairs``: the rotary embedding turns neighbouring elements of a head, so that rows of q and k change places.
    ``unit_head``: rows of the head are divided by their length.
    """
    member = {part: f for f in fused for part in f.rows}
    routers = spec.routers()
    found = [_whole(spec.embed, rename, "embed", (spec.vocab_size, spec.hidden_size))]
    if spec.encoder is not None:
        shapes = spec.encoder.shapes(spec.hidden_size)
        found += [_whole(name, rename, "vector", shape) for name, shape in shapes.items()]
        first = spec.encoder.norm
        found += [_norm(first, rename)] if first is not None and first.weight else []
    found += [_whole(name, rename, "vector", shape) for name, shape in spec.common().items()]
    if (table := spec.per_layer) is not None:
        tables = spec.tables().items()
        found += [_whole(name, rename, "embed" if name == table.embed else "router", size) for name, size in tables]
        found.append(_norm(table.norm, rename))
    for i, layer in enumerate(spec.layers):
        prefix = f"model.layers.{i}."
        modules = [_norm(n, rename) for n in layer.norms() if n.weight]
        for mixer in (s.mixer for s in layer.sublayers):
            sizes = {name: (size,) for name, size in mixer.vectors().items()} | mixer.shapes()
            modules += [_whole(name, rename, "vector", size) for name, size in sizes.items()]
        modules += [_whole(s.factor, rename, "vector", (1,)) for s in layer.sublayers if s.factor is not None]
        for m in layer.linears():
            kind: Literal["router", "linear"] = "router" if m.name in routers else "linear"
            group = member.get(m.name.removeprefix(prefix))
            if group is None:
                modules.append(_whole(m.name, rename, kind, (m.out_features, m.in_features), m.bias))
            elif m.name == prefix + next(iter(group.rows)):
                shape = group.shape or (max(r[1] for rows in group.rows.values() for r in rows), m.in_features)
                parts = tuple(Part(prefix + name, rows) for name, rows in group.rows.items())
                forms = {"transposed": group.transposed, "bare": group.bare, "flat": group.flat}
                modules.append(StoredTensor(rename(prefix + group.name), kind, shape, parts, m.bias, **forms))
        found += [_half_split(layer, m) for m in modules] if pairs else modules
    if spec.final_norm.weight:
        found.append(_norm(spec.final_norm, rename))
    if not spec.tied:
        head = _whole(spec.head, rename, "head", (spec.vocab_size, spec.hidden_size), spec.head_bias)
        found.append(replace(head, unit_rows=unit_head))
    return found


def _whole(
    name: str, rename: Callable[[str], str], kind: Any, shape: tuple[int, ...], bias: bool = False
) -> StoredTensor:
    return StoredTensor(rename(name), kind, shape, (Part(name),), bias)


def _norm(n: NormSpec, rename: Callable[[str], str]) -> StoredTensor:
    return _whole(n.name, rename, "norm", (n.heads, n.size) if n.heads > 1 else (n.size,), n.bias)


def _half_split(layer: LayerSpec, module: StoredTensor) -> StoredTensor:
    """``module`` whose parts for what turns with the position, its norms included, take the even elements of every head
    first, then the odd ones: what turned in neighbouring pairs then turns as ``RopeSpec`` has it."""
    turned = {name: rows for s in layer.sublayers for name, rows in s.mixer.rotary().items()}
    parts = []
    for part in module.parts:
        if (rotary := turned.get(part.name)) is not None:
            rows: list[tuple[int, int] | tuple[int, int, int]] = []
            for r in part.rows or ((0, module.matrix[0]),):
                for head in range(r[0], r[1], rotary.period):
                    start, end = head + rotary.start, head + rotary.start + rotary.count
                    rows += [(head, start), (start, end, 2), (start + 1, end, 2), (end, head + rotary.period)]
            part = replace(part, rows=tuple(r for r in rows if range(*r)))
        parts.append(part)
    return replace(module, parts=tuple(parts))
