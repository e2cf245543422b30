"""The experts of a layer stacked, form by form, for the grouped kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt, Weight
from toolkit.artifacts.join import join_rows
from toolkit.kernels.reference.linear import pack_codes
from toolkit.models.spec import MlpSpec, MoeSpec
from toolkit.runners.tensor.layers.linear import Placement, becomes_dense
from toolkit.runners.tensor.ops import Ops

Matrix = Callable[[str], Weight]  # the canonical weight of a name
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, chosen experts, their weights) -> weighted sum
WITH_BIASES = ("dense", "fp4")  # kinds whose kernels add them
LEAST_GROUP = 32  # inputs of a group that the grouped kernels take, and multiples of it


def why_apart(spec: MoeSpec, info: Matrix, place: Placement) -> str | None:
    """Why the experts cannot be run at once, or None. One by one they go as the router says, for whom every step waits.
    ``info``: what is known of a matrix before it is read."""
    if spec.experts[0].gate is None:
        return "experts without a gate"
    linears = [x for expert in spec.experts for x in expert.linears()]
    kinds = {_kind(info(x.name), place) for x in linears}
    biased = {x.bias for x in linears}
    if None in kinds:
        return "experts in a form that its kernels for several at once do not take"
    if len(kinds) > 1 or len(biased) > 1 or len({tuple(_sizes(expert)) for expert in spec.experts}) > 1:
        return "experts that are not alike"
    if True in biased and all(kind is not None and kind[0] not in WITH_BIASES for kind in kinds):
        return "experts with biases in this form of weights"
    return None


def _sizes(expert: MlpSpec) -> Iterator[tuple[int, int]]:
    return ((x.out_features, x.in_features) for x in expert.linears())


def stack_experts(
    spec: MoeSpec, matrix: Matrix, info: Matrix, vector: Callable[[str], Tensor], place: Placement, ops: Ops
) -> Experts | None:
    """What runs all experts at once; None where ``why_apart`` has a word against it.

    Weights are read expert by expert, all of one stack before the next, for a checkpoint may have stacks too, and put
    into stacks that are made beforehand. ``vector``: the bias of a name.
    """
    if why_apart(spec, info, place) is not None:
        return None
    first = spec.experts[0]
    sample = matrix(first.up.name)
    kind = _kind(sample, place)
    biased = {x.bias for expert in spec.experts for x in expert.linears()}
    stacks: dict[str, Tensor] = {}
    for stack, linears in (
        ("gate_up", [e.readers() for e in spec.experts]),
        ("down", [(e.down,) for e in spec.experts]),
    ):
        for i, together in enumerate(linears):
            weights = [matrix(x.name) for x in together]
            if kind == ("dense",):
                weights = [Dense(w.dequantize(place.dtype)) for w in weights]
            parts = _parts(weights)
            if True in biased:
                parts["_bias"] = torch.cat([vector(f"{x.name}.bias") for x in together]).to(place.dtype)
            for suffix, part in parts.items():
                key = stack + suffix
                if key not in stacks:
                    stacks[key] = torch.empty(len(spec.experts), *part.shape, dtype=part.dtype, device=place.device)
                stacks[key][i] = part.to(place.device)
    return _bind(stacks, sample, first.activation, ops)


def _kind(weight: Weight, place: Placement) -> tuple[object, ...] | None:
    """What must be the same of all experts, None for a form that is not stacked."""
    if becomes_dense(weight, place):
        return ("dense",)
    if isinstance(weight, (ChannelInt8, Fp8)):
        return ("rows", weight.weight.dtype)
    if isinstance(weight, BlockFp8):
        return ("tiles", weight.block)
    if isinstance(weight, Fp4):
        return ("fp4", weight.group_size, weight.scales.dtype, weight.global_scale is None)
    if isinstance(weight, GroupInt) and weight.bits in (4, 8):
        even = weight.group_size % LEAST_GROUP == 0 and weight.zeros is not None and weight.group_index is None
        return ("groups", weight.bits, weight.group_size, weight.scales.dtype) if even else None
    return None


def _parts(weights: Sequence[Weight]) -> dict[str, Tensor]:
    """The tensors to be stacked, by their suffixes, of weights of one kind that share their input."""
    floats = [weight for weight in weights if isinstance(weight, Fp4)]  # each with a global scale of its own
    factors = [(1 / w.global_scale.float()).expand(w.shape[0]) for w in floats if w.global_scale is not None]
    weight = join_rows([replace(w, global_scale=None) for w in floats] or weights)
    if isinstance(weight, Fp4):
        found = {"": pack_codes(weight.codes, 4), "_scales": weight.scales}
        return found | ({"_factors": torch.cat(factors)} if factors else {})
    if isinstance(weight, Dense):
        return {"": weight.weight}
    if isinstance(weight, GroupInt):
        assert weight.zeros is not None
        return {"": pack_codes(weight.codes, weight.bits), "_scales": weight.scales, "_zeros": weight.zeros}
    assert isinstance(weight, (ChannelInt8, Fp8, BlockFp8)), type(weight)
    found = {"": weight.weight, "_scales": weight.scales}
    return found | ({"_rows": weight.block_of_rows().int()} if isinstance(weight, BlockFp8) else {})


def _bind(stacks: dict[str, Tensor], sample: Weight, activation: str, ops: Ops) -> Experts | None:
    more: dict[str, Any] = dict(stacks)
    if "gate_up_zeros" in stacks:
        assert isinstance(sample, GroupInt)
        kernel, more["bits"] = ops.moe_experts_group_int, sample.bits
    elif "gate_up_rows" in stacks:
        assert isinstance(sample, BlockFp8)
        kernel, more["block"] = ops.moe_experts_block_fp8, sample.block[1]
        for key in ("gate_up_rows", "down_rows"):  # one for all experts
            more[key] = stacks[key][0].contiguous()
            if not bool((stacks[key] == more[key]).all()):
                return None
    elif isinstance(sample, Fp4) and "gate_up_scales" in stacks:
        kernel = ops.moe_experts_fp4
    elif "gate_up_scales" in stacks:
        kernel = ops.moe_experts_int8 if stacks["gate_up"].dtype == torch.int8 else ops.moe_experts_fp8
    else:
        kernel = ops.moe_experts

    def run(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return kernel(x, chosen, weights, **more, activation=activation)

    return run
