"""What a model's weights say of it before they are loaded: their dtype, and the memory that it will take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Fp4, GroupInt, Weight
from toolkit.kernels.reference.linear import codes_per_byte
from toolkit.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec
from toolkit.runners.tensor.linear import Placement, becomes_dense
from toolkit.runners.tensor.lora import Adapters, adapter_bytes

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


def weight_bytes(spec: DecoderSpec, weights: Weights, place: Placement, adapters: Adapters) -> int:
    """Bytes of all weights as ``place`` holds them, where the layers' linears are of the first one's form. Embedding
    and head are counted dense, also a head of its own beside an embedding that could be it.
    """
    sample, size = first_linear(spec, weights), place.dtype.itemsize
    matrices = 1 if spec.tied and spec.head not in list(weights) else 2
    outside = matrices * spec.vocab_size * spec.hidden_size * size + 4 * sum(spec.vectors().values())
    if becomes_dense(sample, place):
        inside = dense_bytes(spec, place.dtype)
    else:
        each = 1.0
        if isinstance(sample, GroupInt):
            scale = sample.scales.element_size() + (1 if sample.minima is None else sample.minima.element_size())
            each = 1 / codes_per_byte(sample.bits) + scale / sample.group_size
        elif isinstance(sample, Fp4):
            each = 0.5 + 1 / sample.group_size
        inside = int(sum(x.in_features * x.out_features for x in spec.linears()) * each)
    return inside + outside + adapter_bytes(adapters, size)


def activation_bytes(spec: DecoderSpec, size: int) -> int:
    """Of one token at the widest moment of a layer, ``size`` bytes an element; the residual stream and what is added
    to it are float32.
    """
    widest = 0
    for layer in spec.layers:
        for s in layer.sublayers:
            m = s.mixer
            if isinstance(m, AttentionSpec):
                widest = max(widest, (4 * m.heads + 4 * m.kv_heads) * m.head_dim * size)
            elif isinstance(m, MlpSpec):
                widest = max(widest, 3 * m.up.out_features * size)
            elif isinstance(m, MoeSpec):
                inner = 3 * m.experts[0].up.out_features + 2 * spec.hidden_size
                widest = max(widest, m.top_k * (inner * size + 4 * spec.hidden_size))
    return 12 * spec.hidden_size + 2 * spec.hidden_size * size + widest
