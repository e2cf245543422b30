"""What a model's weights say of it before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.models.spec import DecoderSpec

Weights = Mapping[str, Weight | Tensor]


def first_linear(spec: DecoderSpec, weights: Weights) -> Weight:
    """A layer's weight, which stands for the others."""
    found = weights[spec.linears()[0].name]
    assert not isinstance(found, Tensor)
    return found


def stored_dtype(weight: Weight | Tensor) -> torch.dtype:
    """The floating point type that the embedding was stored in; bfloat16 where it is quantized."""
    if isinstance(weight, Dense):
        return weight.weight.dtype
    return weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
