"""The part of a model that one rank computes: its spec, and its weights by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.adapters.adapter import LowRank
from toolkit.artifacts.canonical import Weight
from toolkit.artifacts.scales import Scales
from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.routed import Routed, routed_tensors
from toolkit.models.spec import Cut, DecoderSpec, LayerSpec, Share, Unit, Units, portion
from toolkit.parallel.balance import Held, evenly
from toolkit.parallel.layout import Layout
from toolkit.runners.weights.info import info_of, scales_of

Weights = Mapping[str, Weight | Tensor]


@dataclass(frozen=True)
class Part:
    """Of rank ``rank``: the ``spec`` of what it computes, ``cuts`` of parameters by name, the rows of the embedding
    that are its own, and of the head's how many each rank has. ``shapes``: of matrices that are stored flat. ``gone``:
    names of parameters that it has nothing of."""

    spec: DecoderSpec
    cuts: Mapping[str, Cut]
    embedding: tuple[int, int]
    head: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    gone: frozenset[str] = frozenset()


def units_of(weights: Weights) -> Unit:
    """What belongs together in a weight, told from its header."""

    def units(name: str) -> Units:
        found = info_of(weights, name)
        assert not isinstance(found, Tensor), name
        return Units(found.unit, 1 if found.cut_anywhere else found.unit)

    return units


def unsupported(spec: DecoderSpec, layout: Layout, unit: Unit) -> str | None:
    """Why the model cannot be split so, or None; asked before a weight is read."""
    if spec.encodes:
        return "encoders run in one process"
    if spec.tied and spec.head_rows:
        return "its head is a part of its embedding"
    if layout.pp > 1 and (spec.per_layer or spec.lenders()):
        return "layers read what other stages have: keys and values, or embeddings of their own; leave pp out"
    if len(spec.layers) < layout.pp:
        return f"{len(spec.layers)} layers are fewer than {layout.pp} stages"
    for layer, mixer in spec.mixers():
        mixers: tuple[Any, ...] = (mixer,)
        if mixer.kind == "moe" and layout.ep > 1:
            if len(mixer.experts) < layout.ep:
                return f"layer {layer}: {len(mixer.experts)} experts are fewer than ep={layout.ep}"
            mixers = () if mixer.shared is None else (mixer.shared,)
        if layout.tp > 1 and (reason := next((why for m in mixers if (why := m.unshared(layout.tp, unit))), None)):
            return f"layer {layer}: {reason}"
    if layout.ep > 1 and not spec.mixtures():
        return f"it has no experts to share out; leave ep={layout.ep} out"
    return None if spec.head_size >= layout.tp else f"{spec.head_size} tokens are fewer than {layout.tp} ranks"


def stage_of(spec: DecoderSpec, stage: int, stages: int) -> tuple[DecoderSpec, frozenset[str]]:
    """(the model with the layers of one stage, the others without sublayers; what it has nothing of by name)."""
    first, stop = portion(len(spec.layers), stage, stages)
    others = [layer for i, layer in enumerate(spec.layers) if not first <= i < stop]
    gone = {name for layer in others for name in (*(x.name for x in layer.linears()), *layer.vectors())}
    layers = tuple(layer if first <= i < stop else LayerSpec(()) for i, layer in enumerate(spec.layers))
    if stage < stages - 1:
        gone |= {*spec.final_norm.vectors(), f"{spec.head}.bias", *(() if spec.tied else (spec.head,))}
    if stage and not (spec.tied and stage == stages - 1):
        gone.add(spec.embed)
    return replace(spec, layers=layers), frozenset(gone)


def part_of(spec: DecoderSpec, rank: int, layout: Layout, unit: Unit, held: Mapping[int, Held] | None = None) -> Part:
    """What rank ``rank`` computes and reads of a model that ``unsupported`` has no word against. ``held``: of layers by
    number where whole experts are, if not evenly."""
    spec, gone = stage_of(spec, layout.stage(rank), layout.pp)
    if layout.tp == layout.ep == 1:
        return Part(spec, {}, (0, spec.vocab_size), (spec.head_size,), {}, gone)
    seat, rank, world = layout.seat(rank), layout.part(rank), layout.tp

    def share(mixer: Any, layer: int) -> Share:
        if mixer.kind == "moe" and layout.ep > 1:
            placed = (held or {}).get(layer) or evenly(len(mixer.experts), layout.ep)
            return mixer.share_seats(placed[seat], rank, world, unit)
        return mixer.share(rank, world, unit) if world > 1 else Share(mixer)

    cuts: dict[str, Cut] = {}
    layers = []
    for number, layer in enumerate(spec.layers):
        shares = [share(s.mixer, number) for s in layer.sublayers]
        for one in shares:
            cuts |= one.cuts
        own: Any = [replace(s, mixer=one.mixer) for s, one in zip(layer.sublayers, shares, strict=True)]
        layers.append(replace(layer, sublayers=tuple(own)))
    kept = {x.name for layer in layers for x in layer.linears()}
    others = [x for layer in spec.layers for x in layer.linears() if x.name not in kept]
    gone |= {name for x in others for name in (x.name, f"{x.name}.bias")}
    embedding, head = portion(spec.vocab_size, rank, world), portion(spec.head_size, rank, world)
    cuts[spec.embed] = Cut("rows", *embedding)
    cuts |= dict.fromkeys((spec.head, f"{spec.head}.bias"), Cut("rows", *head))
    sizes = tuple(stop - start for start, stop in (portion(spec.head_size, r, world) for r in range(world)))
    spec = replace(spec, layers=tuple(layers))
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.vision is not None and spec.vision.routed:
        shapes = routed_tensors(spec.vision.routed)
        routed = tuple(_part_routed(one, cuts) for one in spec.vision.routed)
        spec = replace(spec, vision=replace(spec.vision, routed=routed))
    return Part(spec, cuts, embedding, sizes, shapes, gone)


def _part_routed(one: Routed, cuts: dict[str, Cut]) -> Routed:
    """What tokens of pictures have in place of a linear that is cut, cut alike; ``cuts`` get its tensors'."""
    cut = cuts.get(one.linear)
    if cut is None:
        return one
    size = sum(stop - start for start, stop in cut.spans)
    if cut.axis == "rows":
        cuts |= dict.fromkeys((f"{one.name}.weight", f"{one.name}.bias", f"{one.name}.b"), cut)
        return replace(one, outputs=size)
    cuts |= {f"{one.name}.weight": cut, f"{one.name}.a": cut, f"{one.name}.bias": Cut("first")}
    return replace(one, inputs=size)


def cut_adapter(adapter: Mapping[str, LowRank], cuts: Mapping[str, Cut]) -> dict[str, LowRank]:
    """A rank's part of what an adapter adds to linears."""
    found = {}
    for name, pair in adapter.items():
        cut = cuts.get(name)
        if cut is None:
            found[name] = pair
        elif cut.axis == "rows":
            found[name] = replace(pair, stored_b=_rows(pair.stored_b, cut))
        else:
            found[name] = replace(pair, stored_a=pair.stored_a[:, cut.start : cut.stop].contiguous())
    return found


def _rows(found: Any, cut: Cut) -> Any:
    """Rows of a tensor, or of a weight; one span is a view."""
    whole = isinstance(found, Tensor)
    if not cut.more:
        span = slice(cut.start, cut.stop)
        return found[span] if whole else found.take_rows(span)
    index = torch.cat([torch.arange(start, stop) for start, stop in cut.spans])
    return found[index] if whole else found.take_rows(index)


class PartWeights(Mapping[str, Weight | Tensor]):
    """A rank's part of weights, cut when asked for. Of a matrix that lies in a mapped file as it is, no more than the
    rank's rows are read from disk; others are read one by one and cut. ``rank`` 0 alone adds biases of
    sums."""

    def __init__(self, whole: Weights, part: Part, rank: int) -> None:
        self._whole, self._rank = whole, rank
        self._cuts, self._shapes, self._gone = part.cuts, part.shapes, part.gone

    def __getitem__(self, name: str) -> Weight | Tensor:
        return self._cut(name, self._whole.__getitem__)

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it."""
        return self._cut(name, lambda name: info_of(self._whole, name))

    def scales(self) -> dict[str, Scales] | None:
        """This rank's part of them."""
        found = scales_of(self._whole)
        return None if found is None else {name: self._part_of(found[name], self._cuts.get(name)) for name in found}

    def _part_of(self, scales: Scales, cut: Cut | None) -> Scales:
        columns, divisors = scales.columns, scales.divisors
        if cut is not None and cut.axis == "rows" and divisors is not None:
            divisors = _rows(divisors, cut)
        elif cut is not None and cut.axis != "rows" and columns is not None:
            columns = columns[cut.start : cut.stop]
        return Scales(columns, divisors)

    def _cut(self, name: str, read: Callable[[str], Weight | Tensor]) -> Weight | Tensor:
        found, cut = read(name), self._cuts.get(name)
        if cut is None:
            return found
        if name in self._shapes and isinstance(found, Tensor):
            found = found.reshape(self._shapes[name])
        if cut.axis == "first":
            assert isinstance(found, Tensor)
            return found if self._rank == 0 else torch.zeros_like(found)
        if cut.axis == "rows":
            rows: Weight | Tensor = _rows(found, cut)
            return rows
        if isinstance(found, Tensor):
            return found[:, cut.start : cut.stop].contiguous()
        taken: Weight = found.take_columns(cut.start, cut.stop)
        return taken

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._whole if name not in self._gone)

    def __len__(self) -> int:
        return sum(1 for _ in self)
