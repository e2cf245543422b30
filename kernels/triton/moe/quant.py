"""Mixtures of experts with quantized weights: integers of 4 or 8 bits in groups, and int8 or float8 for rounded inputs.

Slots are gathered by expert as in ``dense``; the activation function is a launch between the two products, and
for W8A8 the one that rounds what the second product reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target, on_request
from ...reference import moe as reference
from ...reference.linear import codes_per_byte
from ..codes import EMULATE, cast, exact_float
from ..elementwise.activation import act_and_mul, act_and_mul_quant
from ..gather import Gathered, gather_by_expert, tile_rows
from ..launch import (
    INTERPRETED,
    NATIVE_FLOAT8,
    capability_of,
    dot_dtype,
    from_shared,
    launch,
    needs,
    stages_of,
)
from ..linear.group import code_plane, planes_of
from ..linear.row import round_rows
from ..tuning import tuned
from .dense import weighted_sum


@triton.jit(do_not_specialize=["slots"])
def expert_group_kernel(
    x,
    packed,
    scales,
    zeros,
    order,
    tile_expert,
    out,
    slots,
    n_out,
    n_in,
    SHARE: tl.constexpr,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile of an expert's slots by COLS outputs. ``x`` has a row for every SHARE slots; K divides GROUP.

    Codes are multiplied as they are; a group's scale and zero are applied to the sums of its products.
    """
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    BYTES: tl.constexpr = K // PLANES
    slot = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = slot < slots
    source = x + (tl.where(valid, slot, 0) // SHARE).to(tl.int64)[:, None] * n_in
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    safe = expert * n_out + tl.where(column < n_out, column, 0)
    codes = packed + (safe * (n_in // PLANES))[:, None]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        tile = tl.load(source + k[None, :], mask=valid[:, None] & (k < n_in)[None, :], other=0.0).to(DOT)
        byte = start // PLANES + tl.arange(0, BYTES)
        w = tl.load(codes + byte[None, :], mask=(byte < n_in // PLANES)[None, :], other=0)
        x0, x1, _, _ = planes_of(tile, ROWS, BYTES, PLANES)
        part = tl.dot(x0, tl.trans(code_plane(w, 0, BITS, DOT, ASM)), input_precision="ieee")
        if PLANES > 1:
            part = tl.dot(x1, tl.trans(code_plane(w, 1, BITS, DOT, ASM)), part, input_precision="ieee")
        at = safe * (n_in // GROUP) + start // GROUP
        scale, zero = tl.load(scales + at).to(tl.float32), exact_float(tl.load(zeros + at))
        acc += (part - tl.sum(tile.to(tl.float32), 1)[:, None] * zero[None, :]) * scale[None, :]
    target = out + slot.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=valid[:, None] & (column < n_out)[None, :])


@triton.jit(do_not_specialize=["slots"])
def expert_row_kernel(
    codes,
    row_scales,
    weight,
    scales,
    order,
    tile_expert,
    out,
    slots,
    n_out,
    n_in,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
):
    """One tile of an expert's slots by COLS outputs, int8 or float8. ``codes`` has a row for every SHARE slots."""
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    INTEGER: tl.constexpr = weight.dtype.element_ty == tl.int8
    slot = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = slot < slots
    row = (tl.where(valid, slot, 0) // SHARE).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    safe = expert * n_out + tl.where(column < n_out, column, 0)
    acc = tl.zeros([ROWS, COLS], tl.int32 if INTEGER else tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        a = tl.load(codes + (row * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        w = tl.load(weight + (safe * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        if EMULATE and not INTEGER:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, tl.trans(w), acc, out_dtype=tl.int32 if INTEGER else tl.float32)
    y = acc.to(tl.float32) * tl.load(row_scales + row)[:, None] * tl.load(scales + safe)[None, :]
    target = out + slot.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(target, cast(y, out.dtype.element_ty), mask=valid[:, None] & (column < n_out)[None, :])


def _group_product(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, tiles: Gathered, slots: int, bits: int
) -> Tensor:
    """Every slot through its expert's weight: [slots, out]."""
    order, tile_expert, rows = tiles
    (n_out, groups), n_in, planes = scales.shape[1:], x.shape[1], codes_per_byte(bits)
    group = n_in // groups
    k = min(64 if rows > 32 and (bits == 8 or not from_shared(capability_of(x.device))) else 128, group & -group)
    default = {"cols": 32 if rows == 16 else 64, "warps": 4 if rows <= 32 else 8}
    if x.dtype == torch.float32:  # no tensor cores: for parity alone
        default = {"cols": 32, "warps": 4}
    choice = tuned("expert_group_kernel", f"rows{rows}", default, x.device)
    stage = rows * k * x.element_size() + choice["cols"] * k
    out = torch.empty(slots, n_out, dtype=x.dtype, device=x.device)
    launch(
        expert_group_kernel,
        (tile_expert.shape[0], triton.cdiv(n_out, choice["cols"])),
        x,
        packed,
        scales,
        zeros,
        order,
        tile_expert,
        out,
        slots,
        n_out,
        n_in,
        warps=choice["warps"],
        stages=choice.get("stages", stages_of(x.device, stage, rows * choice["cols"] * 4, most=4)),
        registers=128 if rows == 16 and capability_of(x.device) >= 100 else None,  # left alone, some spill
        SHARE=slots // x.shape[0],
        BITS=bits,
        PLANES=planes,
        GROUP=group,
        ROWS=rows,
        COLS=choice["cols"],
        K=k,
        DOT=dot_dtype(x.dtype),
        ASM=not INTERPRETED,
    )
    return out


def _reason(target: Target) -> str | None:
    bits = target.traits.get("bits")
    return f"takes weights of 4 or 8 bits, not {bits}" if bits not in (None, 0, 4, 8) else None


@reference.moe_experts_group_int.register(
    "triton", devices=("cuda",), unsupported=needs(more=_reason), alike=on_request
)
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
    alike: bool = False,
) -> Tensor:
    """Six launches: count, place, gate·up, activation, down, weighted sum."""
    x, slots, count = x.contiguous(), experts.numel(), gate_up.shape[0]
    rows = 16 if x.dtype == torch.float32 else tile_rows(experts, count, 64, alike)
    tiles = gather_by_expert(experts, count, rows)
    inner = _group_product(x, gate_up, gate_up_scales, gate_up_zeros, tiles, slots, bits)
    y = _group_product(act_and_mul(inner, activation), down, down_scales, down_zeros, tiles, slots, bits)
    return weighted_sum(y, weights, x)


def _row_product(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    tiles: Gathered,
    slots: int,
    dtype: torch.dtype,
) -> Tensor:
    """Every slot through its expert's weight: [slots, out] in ``dtype``."""
    order, tile_expert, rows = tiles
    n_out, n_in = weight.shape[1:]
    default = {"cols": 64 if rows == 16 else 128, "k": 128, "warps": 4 if rows <= 64 else 8}
    choice = tuned("expert_row_kernel", f"rows{rows}", default, codes.device)
    stage = (rows + choice["cols"]) * choice["k"]
    out = torch.empty(slots, n_out, dtype=dtype, device=codes.device)
    launch(
        expert_row_kernel,
        (tile_expert.shape[0], triton.cdiv(n_out, choice["cols"])),
        codes,
        row_scales,
        weight,
        scales,
        order,
        tile_expert,
        out,
        slots,
        n_out,
        n_in,
        warps=choice["warps"],
        stages=choice.get("stages", stages_of(codes.device, stage, most=4)),
        SHARE=slots // codes.shape[0],
        ROWS=rows,
        COLS=choice["cols"],
        K=choice["k"],
    )
    return out


@reference.moe_experts_int8.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
@reference.moe_experts_fp8.register("triton", devices=("cuda",), unsupported=needs(NATIVE_FLOAT8), alike=on_request)
def moe_experts_row(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
    alike: bool = False,
) -> Tensor:
    """int8, whose sums are exact, and float8. Seven launches: rounding, count, place, gate·up, activation and rounding,
    down, weighted sum.
    """
    slots, count = experts.numel(), gate_up.shape[0]
    rows = tile_rows(experts, count, 128, alike)
    tiles = gather_by_expert(experts, count, rows)
    codes, row_scales = round_rows(x, gate_up.dtype)
    inner = _row_product(codes, row_scales, gate_up, gate_up_scales, tiles, slots, x.dtype)
    codes, row_scales = act_and_mul_quant(inner, activation, down.dtype)
    y = _row_product(codes, row_scales, down, down_scales, tiles, slots, x.dtype)
    return weighted_sum(y, weights, x)
