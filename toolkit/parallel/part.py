"""The part of a model that one rank computes: its spec, and its weights by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.adapter import LowRank
from toolkit.artifacts.canonical import Weight
from toolkit.models.routed import Routed, routed_tensors
from toolkit.models.spec import Cut, DecoderSpec, Unit, Units, portion
from toolkit.runners.weights.info import info_of

Weights = Mapping[str, Weight | Tensor]


@dataclass(frozen=True)
class Part:
    """Of rank ``rank``: the ``spec`` of what it computes, ``cuts`` of parameters by name, the rows of the embedding
    that are its own, and of the head's how many each rank has. ``shapes``: of matrices that are stored flat."""

    spec: DecoderSpec
    cuts: Mapping[str, Cut]
    embedding: tuple[int, int]
    head: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]


def units_of(weights: Weights) -> Unit:
    """What belongs together in a weight, told from its header."""

    def units(name: str) -> Units:
        found = info_of(weights, name)
        assert not isinstance(found, Tensor), name
        return Units(found.unit, 1 if found.cut_anywhere else found.unit)

    return units


def unsupported(spec: DecoderSpec, world: int, unit: Unit) -> str | None:
    """Why the model cannot be split over ``world`` ranks, or None; asked before a weight is read."""
    if spec.tied and spec.head_rows:
        return "its head is a part of its embedding"
    for layer, mixer in spec.mixers():
        if (reason := mixer.unshared(world, unit)) is not None:
            return f"layer {layer}: {reason}"
    return None if spec.head_size >= world else f"{spec.head_size} tokens are fewer than {world} ranks"


def part_of(spec: DecoderSpec, rank: int, world: int, unit: Unit) -> Part:
    """What rank ``rank`` computes and reads of a model that ``unsupported`` has no word against."""
    cuts: dict[str, Cut] = {}
    layers = []
    for layer in spec.layers:
        shares = [s.mixer.share(rank, world, unit) for s in layer.sublayers]
        for one in shares:
            cuts |= one.cuts
        own: Any = [replace(s, mixer=one.mixer) for s, one in zip(layer.sublayers, shares, strict=True)]
        layers.append(replace(layer, sublayers=tuple(own)))
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
    return Part(spec, cuts, embedding, sizes, shapes)


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
            found[name] = LowRank(pair.a, _rows(pair.b, cut))
        else:
            found[name] = LowRank(pair.a[:, cut.start : cut.stop].contiguous(), pair.b)
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
    rank's rows are read from disk; others are read one by one and cut. ``rank`` 0 alone adds biases of sums."""

    def __init__(
        self, whole: Weights, cuts: Mapping[str, Cut], rank: int, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self._whole, self._cuts, self._rank, self._shapes = whole, cuts, rank, shapes or {}

    def __getitem__(self, name: str) -> Weight | Tensor:
        return self._cut(name, self._whole.__getitem__)

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it."""
        return self._cut(name, lambda name: info_of(self._whole, name))

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
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)
