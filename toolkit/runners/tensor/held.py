"""What a model's weights will take once they are held, told from their headers."""

from __future__ import annotations

import math

from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, Dense, Fp4, GroupInt, Weight
from toolkit.kernels.reference.linear import codes_per_byte
from toolkit.models.eyes.vision import PREFIX
from toolkit.models.spec import DecoderSpec
from toolkit.runners.tensor.build import Weights, for_kernels
from toolkit.runners.tensor.layers.linear import Placement, becomes_dense
from toolkit.runners.tensor.layers.lora import Adapters, adapter_bytes
from toolkit.runners.weights.info import info_of


def weight_bytes(spec: DecoderSpec, weights: Weights, place: Placement, adapters: Adapters) -> int:
    """Bytes of all weights as ``place`` holds them, adapters included. Of those that a CUDA kernel packs for itself it
    is what they take before, which is no less.
    """
    size = place.dtype.itemsize
    biases = {f"{linear.name}.bias" for linear in spec.linears()} | {f"{spec.head}.bias"}
    matrices = {linear.name for _, mixer in spec.mixers() for linear in mixer.matrices()}
    factors = {s.factor for layer in spec.layers for s in layer.sublayers}  # numbers, no tensors
    common = spec.common()  # tables of which the rows are held
    total = adapter_bytes(adapters, size)
    total += sum(4 * norm.size for norm in spec.norms() if not norm.weight)  # of ones
    total += sum(4 * len(a.alibi.slopes) for _, a in spec.attention_layers() if a.alibi is not None)
    biases_by_place = ((a.heads, a.position_bias) for _, a in spec.attention_layers())
    total += sum(4 * heads * (2 * bias.length - 1) for heads, bias in biases_by_place if bias is not None)
    for name in weights:
        found = info_of(weights, name)
        if name in factors or name in common:
            continue
        if name.startswith(PREFIX):
            total += math.prod(found.shape) * size
        elif isinstance(found, Tensor):
            total += found.numel() * (size if name in biases else 4)
        elif spec.per_layer is not None and name == spec.per_layer.embed:
            total += _dense_bytes(found, place)
        elif name == spec.embed or name == spec.head:
            total += _outer_bytes(name == spec.head, spec.tied, found, place)
        elif name in matrices:
            total += _dense_bytes(found, place)
        else:
            total += linear_bytes(found, place)
    return total


def _outer_bytes(head: bool, tied: bool, weight: Weight, place: Placement) -> int:
    """Of the embedding, which is held dense, or of the head: see ``build_decoder``."""
    if head and isinstance(weight, GroupInt):
        kept = not place.dequantize and for_kernels(weight)
        return linear_bytes(weight, place) if kept else _dense_bytes(weight, place)
    return 0 if head and tied else _dense_bytes(weight, place)


def linear_bytes(weight: Weight, place: Placement) -> int:
    """Of one linear, its bias aside."""
    if becomes_dense(weight, place):
        return _dense_bytes(weight, place)
    rows, columns = weight.shape
    if isinstance(weight, GroupInt):
        parts = [weight.scales, weight.zeros if weight.minima is None else weight.minima, weight.group_index]
        return rows * -(-columns // codes_per_byte(weight.bits)) + sum(t.nbytes for t in parts if t is not None)
    if isinstance(weight, Fp4):
        return rows * columns // 2 + weight.scales.nbytes + (0 if weight.global_scale is None else 4 * rows)
    assert not isinstance(weight, Dense) and hasattr(weight, "weight")
    return weight.weight.nbytes + weight.scales.nbytes + (4 * rows if isinstance(weight, BlockFp8) else 0)


def _dense_bytes(weight: Weight, place: Placement) -> int:
    rows, columns = weight.shape
    return rows * columns * place.dtype.itemsize
