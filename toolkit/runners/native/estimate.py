"""What a model takes once it is packed, told from its weights' headers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.artifacts.outline import taller
from toolkit.models.spec import DecoderSpec
from toolkit.runners.native.pack import nearest_meta, quantize_head
from toolkit.runners.native.packed import VECTOR, PackedMeta
from toolkit.runners.weight_info import info_of


def packed_bytes(spec: DecoderSpec, weights: Mapping[str, Weight | Tensor]) -> int:
    """Bytes of what ``pack_model`` makes of canonical weights. Of 8-bit codes with stored zero points, which may all be
    in the middle, it is what they take at most.
    """
    layers = {linear.name for linear in spec.linears()}
    first = next((info_of(weights, name) for name in weights if name in layers), None)
    rounded = first is not None and not isinstance(first, Dense)
    total = 0
    for name in weights:
        found = info_of(weights, name)
        if isinstance(found, Tensor):
            total += PackedMeta(VECTOR, found.numel()).nbytes
        elif spec.tied and name == spec.head:
            continue
        elif rounded and name not in layers and isinstance(found, Dense):
            total += _head_meta(found).nbytes
        else:
            total += nearest_meta(found).nbytes
    return total


def _head_meta(head: Dense) -> PackedMeta:
    rows, columns = head.shape
    one = quantize_head(Dense(torch.zeros(1, columns)), 8)
    return nearest_meta(head if one is None else taller(one, rows))
