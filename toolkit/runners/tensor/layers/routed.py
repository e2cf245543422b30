"""Linears that tokens of pictures have otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.routed import Routed
from toolkit.models.spec import LinearSpec
from toolkit.runners.tensor.layers.linear import Activations, Linear, Placement
from toolkit.runners.tensor.layers.lora import AdapterStep
from toolkit.runners.tensor.towers.vision import dense


@dataclass(frozen=True)
class ByKind:
    """``base``, and of each linear inside what tokens of pictures have: (weight, bias), or (a, b) of a low rank, the
    second one scaled."""

    base: Linear
    pairs: tuple[tuple[Tensor, Tensor | None, bool], ...]
    step: AdapterStep

    def __call__(self, x: Activations) -> Tensor:
        y, seen = self.base(x), self.step.seen
        if seen is None:
            return y
        assert isinstance(x, Tensor), "no norm rounds for it"
        rows, found = x.index_select(0, seen), []
        for (first, second, added), own in zip(self.pairs, self._own(y, seen), strict=True):
            if added:
                assert second is not None
                found.append(own + functional.linear(functional.linear(rows, first), second))
            else:
                found.append(functional.linear(rows, first, second))
        return y.index_copy(0, seen, torch.cat(found, 1))

    def _own(self, y: Tensor, seen: Tensor) -> Sequence[Tensor]:
        widths = [(second if added and second is not None else first).shape[0] for first, second, added in self.pairs]
        return y.index_select(0, seen).split(widths, 1)


def by_kind(
    base: Linear,
    specs: Sequence[LinearSpec],
    routed: Mapping[str, Routed],
    weights: Mapping[str, Any],
    step: AdapterStep,
    place: Placement,
) -> Linear:
    """``base``, which runs ``specs``, with what tokens of pictures have; itself where that is the same."""
    found = [routed[s.name] for s in specs if s.name in routed]
    if not found:
        return base
    assert len(found) == len(specs), "of linears that run as one all are routed, or none"

    def tensor(name: str, *shape: int) -> Tensor:
        return dense(weights[name]).reshape(shape).to(place.device, place.dtype)

    pairs: list[tuple[Tensor, Tensor | None, bool]] = []
    for one in found:
        if one.rank:
            b = tensor(f"{one.name}.b", one.outputs, one.rank) * one.scale
            pairs.append((tensor(f"{one.name}.a", one.rank, one.inputs), b, True))
        else:
            bias = tensor(f"{one.name}.bias", one.outputs) if one.bias else None
            pairs.append((tensor(f"{one.name}.weight", one.outputs, one.inputs), bias, False))
    return ByKind(base, tuple(pairs), step)
