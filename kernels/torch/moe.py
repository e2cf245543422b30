"""Mixture of experts: tokens are sorted by expert, and every expert runs once on its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import moe
from ..reference.linear import linear_fp8
from ..reference.linear_blocks import linear_block_fp8, linear_fp4
from .dense import act_and_mul
from .linear import linear_group_int, linear_int8


def _by_expert(x: Tensor, experts: Tensor, weights: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``run(expert, its tokens)`` once for each expert that got tokens; the weighted sum in x's dtype."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ids, order = experts.flatten().sort(stable=True)
    used, counts = ids.unique_consecutive(return_counts=True)
    token, weight = order // experts.shape[1], weights.flatten()[order]
    start = 0
    for e, n in zip(used.tolist(), counts.tolist(), strict=True):
        rows = token[start : start + n]
        total.index_add_(0, rows, run(e, x[rows]).float() * weight[start : start + n, None])
        start += n
    return total.to(x.dtype)


@moe.moe_experts.register("torch")
def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """One pair of products for each expert that got tokens."""

    def run(e: int, rows: Tensor) -> Tensor:
        first, second = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        return F.linear(act_and_mul(F.linear(rows, gate_up[e], first), activation), down[e], second)

    return _by_expert(x, experts, weights, run)


@moe.moe_experts_group_int.register("torch")
def moe_experts_group_int(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor,
    bits: int,
    activation: str,
) -> Tensor:
    """One pair of ``linear_group_int`` for each expert that got tokens."""

    def run(e: int, rows: Tensor) -> Tensor:
        inner = linear_group_int(rows, gate_up[e], gate_up_scales[e], gate_up_zeros[e], None, bits)
        return linear_group_int(act_and_mul(inner, activation), down[e], down_scales[e], down_zeros[e], None, bits)

    return _by_expert(x, experts, weights, run)


@moe.moe_experts_int8.register("torch")
def moe_experts_int8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
) -> Tensor:
    """One pair of ``linear_int8`` for each expert that got tokens."""

    def run(e: int, rows: Tensor) -> Tensor:
        inner = act_and_mul(linear_int8(rows, gate_up[e], gate_up_scales[e]), activation)
        return linear_int8(inner, down[e], down_scales[e])

    return _by_expert(x, experts, weights, run)


@moe.moe_experts_fp8.register("torch")
def moe_experts_fp8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
) -> Tensor:
    """One pair of float8 products, by way of float32, for each expert that got tokens."""

    def run(e: int, rows: Tensor) -> Tensor:
        inner = act_and_mul(linear_fp8.reference(rows, gate_up[e], gate_up_scales[e]), activation)
        return linear_fp8.reference(inner, down[e], down_scales[e])

    return _by_expert(x, experts, weights, run)


@moe.moe_experts_block_fp8.register("torch")
def moe_experts_block_fp8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_rows: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_rows: Tensor,
    block: int,
    activation: str,
) -> Tensor:
    """One pair of blocked float8 products, by way of float32, for each expert that got tokens."""

    def run(e: int, rows: Tensor) -> Tensor:
        inner = linear_block_fp8.reference(rows, gate_up[e], gate_up_scales[e], gate_up_rows, block)
        return linear_block_fp8.reference(act_and_mul(inner, activation), down[e], down_scales[e], down_rows, block)

    return _by_expert(x, experts, weights, run)


@moe.moe_experts_fp4.register("torch")
def moe_experts_fp4(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
    gate_up_factors: Tensor | None = None,
    down_factors: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """One pair of products with dequantized weights for each expert that got tokens."""

    def run(e: int, rows: Tensor) -> Tensor:
        more = (gate_up_factors, gate_up_bias, down_factors, down_bias)
        factors, bias, down_factor, offset = (None if t is None else t[e] for t in more)
        inner = act_and_mul(linear_fp4.reference(rows, gate_up[e], gate_up_scales[e], factors, bias), activation)
        return linear_fp4.reference(inner, down[e], down_scales[e], down_factor, offset)

    return _by_expert(x, experts, weights, run)
