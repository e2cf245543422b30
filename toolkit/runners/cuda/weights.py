"""Which form a model's weights have on the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt, Weight
from toolkit.models.spec import DecoderSpec, LinearSpec, MoeSpec

Weights = Mapping[str, Weight | Tensor]


def routed_linears(spec: DecoderSpec) -> list[LinearSpec]:
    """The linears of all experts that are routed to."""
    mixers = (s.mixer for layer in spec.layers for s in layer.sublayers if isinstance(s.mixer, MoeSpec))
    return [x for m in mixers for e in m.experts for x in (e.gate, e.up, e.down) if x is not None]


def first_linear(spec: DecoderSpec, weights: Weights) -> Weight:
    """A layer's weight, which stands for the others."""
    found = weights[spec.linears()[0].name]
    assert not isinstance(found, Tensor)
    return found


def held_dense(weight: Weight) -> bool:
    """Whether a weight of this form stands on the GPU as a floating point matrix."""
    return not isinstance(weight, (GroupInt, ChannelInt8, Fp8, BlockFp8, Fp4))


def stored_dtype(weight: Weight | Tensor) -> torch.dtype:
    """The floating point type that the embedding was stored in; bfloat16 where it is quantized."""
    if isinstance(weight, Dense):
        return weight.weight.dtype
    return weight.dtype if isinstance(weight, Tensor) else torch.bfloat16


class DenseExperts(Mapping[str, "Weight | Tensor"]):
    """``weights``, but those of routed experts are dense: then one kernel runs them all, and the host need not look."""

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: torch.dtype) -> None:
        self._names = {x.name for x in routed_linears(spec)}
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, name: str) -> Weight | Tensor:
        found = self._weights[name]
        if name not in self._names or isinstance(found, Tensor):
            return found
        return Dense(found.dequantize(self._dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
