"""Mixtures of experts with blocked float8 weights: ``linear_block`` over slots that are gathered by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import on_request
from ...reference import moe as reference
from ..codes import EMULATE, cast
from ..elementwise.activation import act_and_mul
from ..float_codes import e4m3_as_fp16
from ..gather import Gathered, gather_by_expert, tile_rows
from ..launch import INTERPRETED, NATIVE_FLOAT8, capability_of, launch, needs, stages_of
from ..linear.block import reason, round_blocks
from ..tuning import tuned
from .dense import weighted_sum


@triton.jit(do_not_specialize=["slots"])
def expert_block_kernel(
    codes,
    row_scales,
    weight,
    scales,
    row_blocks,
    order,
    tile_expert,
    out,
    slots,
    n_out,
    n_in,
    row_tiles,
    blocks,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    ASM: tl.constexpr,
):
    """One tile of an expert's slots by COLS outputs, K inputs at a time; K divides BLOCK. ``codes`` has a row for every
    SHARE slots; ``weight`` is e4m3, or uint8 beside fp16 codes.
    """
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    BITS: tl.constexpr = weight.dtype.element_ty == tl.uint8
    slot = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = slot < slots
    row = (tl.where(valid, slot, 0) // SHARE).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = tl.where(column < n_out, column, 0)
    tile = (expert * row_tiles + tl.load(row_blocks + inside)) * blocks
    source = weight + ((expert * n_out + inside) * n_in)[:, None]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        a = tl.load(codes + (row * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        w = tl.load(source + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        if BITS:
            w = e4m3_as_fp16(w, ASM)
        if EMULATE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        part = tl.dot(a, tl.trans(w), out_dtype=tl.float32)
        block = start // BLOCK
        factor = tl.load(scales + tile + block) * (256.0 if BITS else 1.0)
        acc += part * (tl.load(row_scales + row * blocks + block)[:, None] * factor[None, :])
    target = out + slot.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=valid[:, None] & (column < n_out)[None, :])


def _product(
    x: Tensor, weight: Tensor, scales: Tensor, row_blocks: Tensor, block: int, tiles: Gathered,
    slots: int,
) -> Tensor:  # fmt: skip
    """Every slot through its expert's weight: [slots, out] in x's dtype. Two launches, the first one rounds."""
    order, tile_expert, rows = tiles
    n_out, n_in = weight.shape[1:]
    native = capability_of(x.device) >= NATIVE_FLOAT8
    codes, row_scales = round_blocks(x, block, torch.float8_e4m3fn if native else torch.float16)
    default = {"cols": 32 if rows == 16 else 64, "k": min(block, 128), "warps": 4}
    choice = tuned("expert_block_kernel", f"rows{rows}", default, x.device)
    stage = (rows * (1 if native else 2) + choice["cols"]) * choice["k"]
    choice.setdefault("stages", stages_of(x.device, stage, most=4))
    out = torch.empty(slots, n_out, dtype=x.dtype, device=x.device)
    launch(
        expert_block_kernel,
        (tile_expert.shape[0], triton.cdiv(n_out, choice["cols"])),
        codes,
        row_scales,
        weight if native else weight.view(torch.uint8),
        scales,
        row_blocks,
        order,
        tile_expert,
        out,
        slots,
        n_out,
        n_in,
        scales.shape[1],
        scales.shape[2],
        warps=choice["warps"],
        stages=choice["stages"],
        SHARE=slots // x.shape[0],
        BLOCK=block,
        ROWS=rows,
        COLS=choice["cols"],
        K=choice["k"],
        ASM=not INTERPRETED,
    )
    return out


@reference.moe_experts_block_fp8.register("triton", devices=("cuda",), unsupported=needs(more=reason), alike=on_request)
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
    alike: bool = False,
) -> Tensor:
    """Eight launches: count, place, rounding, gate·up, activation, rounding, down, weighted sum."""
    slots, count = experts.numel(), gate_up.shape[0]
    rows = tile_rows(experts, count, 64, alike)
    tiles = gather_by_expert(experts, count, rows)
    inner = _product(x, gate_up, gate_up_scales, gate_up_rows, block, tiles, slots)
    y = _product(act_and_mul(inner, activation), down, down_scales, down_rows, block, tiles, slots)
    return weighted_sum(y, weights, x)
