"""The experts of a layer stacked, form by form, for the grouped kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Fp8, GroupInt, Weight
from toolkit.kernels.reference.linear import pack_codes
from toolkit.models.spec import MoeSpec
from toolkit.runners.torch.linear import Placement, becomes_dense
from toolkit.runners.torch.ops import Ops

Matrix = Callable[[str], Weight]  # the canonical weight of a name
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, chosen experts, their weights) -> weighted sum
LEAST_GROUP = 32  # inputs of a group that the grouped kernels take, and multiples of it


def stack_experts(spec: MoeSpec, matrix: Matrix, place: Placement, ops: Ops) -> Experts | None:
    """What runs all experts at once; None where they are not gated, have biases, or are of forms it does not take.

    Weights are read expert by expert and put into stacks that are made beforehand.
    """
    first = spec.experts[0]
    if first.gate is None or first.gate.bias or first.up.bias or first.down.bias:
        return None
    inner, hidden, count = first.up.out_features, first.up.in_features, len(spec.experts)
    kind = _kind(matrix(first.up.name), place)
    stacks: dict[str, Tensor] = {}
    for i, expert in enumerate(spec.experts):
        assert expert.gate is not None
        for name, rows, shape in (
            (expert.gate.name, slice(0, inner), ("gate_up", 2 * inner, hidden)),
            (expert.up.name, slice(inner, 2 * inner), ("gate_up", 2 * inner, hidden)),
            (expert.down.name, slice(0, hidden), ("down", hidden, inner)),
        ):
            weight = matrix(name)
            if kind is None or _kind(weight, place) != kind:
                return None
            for suffix, part in _parts(weight, place).items():
                key = shape[0] + suffix
                if key not in stacks:
                    size = (count, shape[1], *part.shape[1:])
                    stacks[key] = torch.empty(size, dtype=part.dtype, device=place.device)
                stacks[key][i, rows] = part.to(place.device)
    return _bind(stacks, matrix(first.up.name), first.activation, place, ops)


def _kind(weight: Weight, place: Placement) -> tuple[object, ...] | None:
    """What must be the same of all experts, None for a form that is not stacked."""
    if becomes_dense(weight, place):
        return ("dense",)
    if isinstance(weight, (ChannelInt8, Fp8)):
        return ("rows", weight.weight.dtype)
    if isinstance(weight, GroupInt) and weight.bits in (4, 8):
        even = weight.group_size % LEAST_GROUP == 0 and weight.zeros is not None and weight.group_index is None
        return ("groups", weight.bits, weight.group_size, weight.scales.dtype) if even else None
    return None


def _parts(weight: Weight, place: Placement) -> dict[str, Tensor]:
    """The tensors to be stacked, by their suffixes."""
    if becomes_dense(weight, place):
        return {"": weight.dequantize(place.dtype)}
    if isinstance(weight, GroupInt):
        assert weight.zeros is not None
        return {"": pack_codes(weight.codes, weight.bits), "_scales": weight.scales, "_zeros": weight.zeros}
    assert isinstance(weight, (ChannelInt8, Fp8)), type(weight)
    return {"": weight.weight, "_scales": weight.scales}


def _bind(stacks: dict[str, Tensor], sample: Weight, activation: str, place: Placement, ops: Ops) -> Experts:
    more: dict[str, Any] = dict(stacks)
    if "gate_up_zeros" in stacks:
        assert isinstance(sample, GroupInt)
        kernel, more["bits"] = ops.moe_experts_group_int, sample.bits
    elif "gate_up_scales" in stacks:
        kernel = ops.moe_experts_int8 if stacks["gate_up"].dtype == torch.int8 else ops.moe_experts_fp8
    else:
        kernel = ops.moe_experts

    def run(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return kernel(x, chosen, weights, **more, activation=activation)

    return run
