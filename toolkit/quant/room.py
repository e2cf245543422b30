"""How much disk a run of ``tool lite`` takes: what is saved of each layer on the way, and the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from toolkit.artifacts.canonical import Weight
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.result import storable_bits
from toolkit.quant.layers.source import LayerSource

CODE_BYTES = 1  # of a weight, as layers are saved: codes are not packed


def dense_bytes(source: LayerSource, dtype: torch.dtype) -> int:
    """Bytes of the model's weights as ``dtype``."""
    return sum(math.prod(item.shape) for item in source.present) * torch.finfo(dtype).bits // 8


def disk_bytes(
    source: LayerSource,
    linears: Iterable[LinearSpec],
    sample: Callable[[int, int], Weight],
    dtype: torch.dtype,
    activations: int,
) -> int:
    """Bytes. ``linears``: those that become what ``sample(out, in)`` stands for; ``activations``: in files at once."""
    linears = list(linears)
    quantized = sum(x.in_features * x.out_features for x in linears)
    inside = sum(math.prod(item.shape) for items in source.stored for item in items)
    width = torch.finfo(dtype).bits // 8
    dense = max(0, dense_bytes(source, dtype) - quantized * width)
    result = dense + sum(storable_bits(sample(x.out_features, x.in_features)) for x in linears) // 8
    saved = quantized * CODE_BYTES + max(0, inside - quantized) * width
    return result + saved + activations
