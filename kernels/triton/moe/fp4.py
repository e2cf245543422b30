"""Mixtures of experts with 4-bit floating point weights: ``linear_fp4`` over slots that are gathered by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import on_request
from ...reference import moe as reference
from ..codes import cast
from ..elementwise.activation import act_and_mul
from ..float_codes import block_scale, fp4
from ..gather import Gathered, gather_by_expert, tile_rows
from ..launch import INTERPRETED, dot_dtype, launch, needs, stages_of
from ..linear.fp4 import scale_bits, spread
from ..tuning import tuned
from .dense import weighted_sum


@triton.jit(do_not_specialize=["slots"])
def expert_fp4_kernel(
    x,
    packed,
    scales,
    factors,
    bias,
    order,
    tile_expert,
    out,
    slots,
    n_out,
    n_in,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile of an expert's slots by COLS outputs, K inputs at a time; GROUP divides K. ``x`` has a row for every
    SHARE slots; ``factors``: float32 [experts, n_out] or None, likewise ``bias``, of any float type.
    """
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    BYTES: tl.constexpr = K // 2
    slot = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = slot < slots
    source = x + (tl.where(valid, slot, 0) // SHARE).to(tl.int64)[:, None] * n_in
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    safe = expert * n_out + tl.where(column < n_out, column, 0)
    codes, groups = packed + (safe * (n_in // 2))[:, None], n_in // GROUP
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        tile = tl.load(source + k[None, :], mask=valid[:, None] & (k < n_in)[None, :], other=0.0).to(DOT)
        even, odd = tl.split(tl.reshape(tile, [ROWS, BYTES, 2]))
        byte = start // 2 + tl.arange(0, BYTES)
        w = tl.load(codes + byte[None, :], mask=(byte < n_in // 2)[None, :], other=0)
        group = start // GROUP + tl.arange(0, K // GROUP)
        s = tl.load(scales + (safe * groups)[:, None] + group[None, :], mask=(group < groups)[None, :], other=0)
        s = spread(block_scale(s, E8M0, DOT, ASM), COLS, BYTES, GROUP)
        acc = tl.dot(even, tl.trans(fp4(w, 0, DOT, ASM) * s), acc, input_precision="ieee")
        acc = tl.dot(odd, tl.trans(fp4(w, 1, DOT, ASM) * s), acc, input_precision="ieee")
    if factors is not None:
        acc *= tl.load(factors + safe)[None, :]
    if bias is not None:
        acc += tl.load(bias + safe).to(tl.float32)[None, :]
    target = out + slot.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=valid[:, None] & (column < n_out)[None, :])


def _product(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    factors: Tensor | None,
    bias: Tensor | None,
    tiles: Gathered,
    slots: int,
) -> Tensor:
    """Every slot through its expert's weight: [slots, out]."""
    order, tile_expert, rows = tiles
    n_out, n_in = packed.shape[1], x.shape[1]
    default = {"cols": 32 if rows == 16 else 64, "k": 128, "warps": 4 if rows <= 32 else 8}
    if x.dtype == torch.float32:  # no tensor cores: for parity alone
        default = {"cols": 32, "k": 128, "warps": 4}
    choice = tuned("expert_fp4_kernel", f"rows{rows}", default, x.device)
    stage = rows * choice["k"] * x.element_size() + choice["cols"] * choice["k"]
    bits, e8m0 = scale_bits(scales)
    out = torch.empty(slots, n_out, dtype=x.dtype, device=x.device)
    launch(
        expert_fp4_kernel,
        (tile_expert.shape[0], triton.cdiv(n_out, choice["cols"])),
        x,
        packed,
        bits,
        factors,
        bias,
        order,
        tile_expert,
        out,
        slots,
        n_out,
        n_in,
        warps=choice["warps"],
        stages=choice.get("stages", stages_of(x.device, stage, rows * choice["cols"] * 4, most=4)),
        SHARE=slots // x.shape[0],
        GROUP=n_in // scales.shape[2],
        E8M0=e8m0,
        ROWS=rows,
        COLS=choice["cols"],
        K=choice["k"],
        DOT=dot_dtype(x.dtype),
        ASM=not INTERPRETED,
    )
    return out


@reference.moe_experts_fp4.register("triton", devices=("cuda",), unsupported=needs(), alike=on_request)
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
    alike: bool = False,
) -> Tensor:
    """Six launches: count, place, gate·up, activation, down, weighted sum."""
    x, slots, count = x.contiguous(), experts.numel(), gate_up.shape[0]
    rows = 16 if x.dtype == torch.float32 else tile_rows(experts, count, 64, alike)
    tiles = gather_by_expert(experts, count, rows)
    inner = _product(x, gate_up, gate_up_scales, gate_up_factors, gate_up_bias, tiles, slots)
    y = _product(act_and_mul(inner, activation), down, down_scales, down_factors, down_bias, tiles, slots)
    return weighted_sum(y, weights, x)
