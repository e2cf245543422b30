"""What a model's weights say of it before they are loaded: their dtype, and the memory that it will take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Fp4, GroupInt, Weight
from toolkit.models.spec import DecoderSpec
from toolkit.runners.tensor.layers.linear import Placement, becomes_dense
from toolkit.runners.weights.info import info_of

Weights = Mapping[str, Weight | Tensor]


def first_linear(spec: DecoderSpec, weights: Weights) -> Weight:
    """A layer's weight, which stands for the others."""
    found = weights[spec.linears()[0].name]
    assert not isinstance(found, Tensor)
    return found


def stored_dtype(weight: Weight | Tensor) -> torch.dtype:
    """The floating point type that an embedding was stored in; bfloat16 where it is quantized."""
    if isinstance(weight, Dense):
        return weight.weight.dtype
    return weight.dtype if isinstance(weight, Tensor) else torch.bfloat16


def dense_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Of all linears inside the layers, dense."""
    return sum(x.in_features * x.out_features for x in spec.linears()) * dtype.itemsize


def expands(spec: DecoderSpec, weights: Weights, place: Placement) -> bool:
    """Whether some linear becomes dense for a product of many rows: kept in few bits, and no expert's."""
    experts = [e for _, mixer in spec.mixers() if mixer.kind == "moe" for e in mixer.experts]
    together = {linear.name for expert in experts for linear in expert.linears()}
    alone = (info_of(weights, linear.name) for linear in spec.linears() if linear.name not in together)
    return any(isinstance(w, (GroupInt, Fp4)) and not becomes_dense(w, place) for w in alone)


def activation_bytes(spec: DecoderSpec, size: int) -> int:
    """Of one token at the widest moment of a layer, ``size`` bytes an element; the residual stream and what is added
    to it are float32.
    """
    widest = max(mixer.width(spec.hidden_size) for _, mixer in spec.mixers())
    given = 0 if spec.per_layer is None else 2 * spec.per_layer.columns
    return 12 * spec.hidden_size + (2 * spec.hidden_size + widest + given) * size
