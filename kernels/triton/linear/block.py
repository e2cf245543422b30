"""Linear layers with blocked float8 weights: a scale for every tile of the weight and every block of a token's inputs.

A first launch rounds the activations. In the second the products of one block are summed by tensor cores from zero,
scaled, and added in float32, so that the few bits of Hopper's float8 accumulators do not matter. GPUs without float8
tensor cores multiply the same numbers in fp16, which holds every e4m3 number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target, on_request
from ...reference import linear_blocks as reference
from ..codes import EMULATE, cast, divide, encode, row_scale
from ..float_codes import e4m3_as_fp16
from ..launch import (
    ALIKE_ROWS,
    INTERPRETED,
    NATIVE_FLOAT8,
    capability_of,
    launch,
    needs,
    power_of_2,
    stages_of,
    tensor_memory,
)
from ..tuning import tuned
from .bands import rows_and_columns

TOP = tl.constexpr(448.0)  # the largest e4m3 number


@triton.jit
def round_blocks_kernel(x, codes, scales, size, blocks, stride, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """COUNT blocks of BLOCK inputs of one token; codes are e4m3, or fp16 that hold e4m3 numbers."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    h = tl.load(x + row * stride + i, mask=i < size, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(h), 1), TOP)
    tl.store(scales + row * blocks + block, scale, mask=block < blocks)
    tl.store(codes + row * size + i, encode(divide(h, scale[:, None]), codes.dtype.element_ty, TOP), mask=i < size)


@triton.jit(do_not_specialize=["tokens"])
def block_linear_kernel(
    codes,
    row_scales,
    weight,
    scales,
    row_blocks,
    bias,
    out,
    tokens,
    n_out,
    n_in,
    blocks,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS tokens by COLS outputs, K inputs at a time; K divides BLOCK. ``weight`` is e4m3, or uint8 beside fp16 codes.
    For BAND see ``rows_and_columns``.
    """
    row, column = rows_and_columns(tokens, n_out, ROWS, COLS, BAND)
    safe_row = tl.where(row < tokens, row, 0).to(tl.int64)
    safe_column = tl.where(column < n_out, column, 0).to(tl.int64)
    BITS: tl.constexpr = weight.dtype.element_ty == tl.uint8
    tile = tl.load(row_blocks + safe_column).to(tl.int64) * blocks
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        a = tl.load(codes + (safe_row * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        w = tl.load(weight + (safe_column * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        if BITS:
            w = e4m3_as_fp16(w, ASM)
        if EMULATE:
            a, w = a.to(tl.float32), w.to(tl.float32)
        part = tl.dot(a, tl.trans(w), out_dtype=tl.float32)
        block = start // BLOCK
        factor = tl.load(scales + tile + block) * (256.0 if BITS else 1.0)
        acc += part * (tl.load(row_scales + safe_row * blocks + block)[:, None] * factor[None, :])
    if bias is not None:
        acc += tl.load(bias + safe_column).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * n_out)[:, None] + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < n_out)[None, :])


def round_blocks(x: Tensor, block: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes of ``dtype`` [T, in], float32 scales [T, blocks]); float16 codes hold e4m3 numbers."""
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, size = x.shape
    blocks = triton.cdiv(size, block)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(tokens, blocks, dtype=torch.float32, device=x.device)
    count = max(1, min(power_of_2(blocks), 2048 // block))
    grid = (tokens, triton.cdiv(blocks, count))
    launch(round_blocks_kernel, grid, x, codes, scales, size, blocks, x.stride(0), warps=4, BLOCK=block, COUNT=count)
    return codes, scales


def _choice(tokens: int, block: int, native: bool, device: torch.device, alike: bool) -> dict[str, int]:
    """Tile, warps and stages by the number of tokens. Two blocks share a multiprocessor: one scales, one multiplies."""
    rows = ALIKE_ROWS if alike else max(16, power_of_2(min(tokens, 128 if native else 64)))
    default = {"cols": 32 if rows == 16 else 64, "k": min(block, 128), "warps": 4}
    if rows == 128 and tensor_memory(capability_of(device)):
        default["warps"] = 8  # both sums are read from tensor memory: 4 warps would spill them
    found = {"rows": rows, **tuned("block_linear_kernel", f"rows{rows}", default, device)}
    stage = (rows * (1 if native else 2) + found["cols"]) * found["k"]
    found.setdefault("stages", stages_of(device, stage))
    return found


def reason(target: Target) -> str | None:
    """Why the kernels do not take blocks of trait ``block`` inputs, or None."""
    block = target.traits.get("block")
    whole = block is None or (block >= 32 and block & (block - 1) == 0)
    return None if whole else f"takes blocks of a power of two of at least 32 inputs, not {block}"


@reference.linear_block_fp8.register("triton", devices=("cuda",), unsupported=needs(more=reason), alike=on_request)
def linear_block_fp8(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    row_blocks: Tensor,
    block: int,
    bias: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Two launches: rounding, product."""
    (tokens, n_in), n_out = x.shape, weight.shape[0]
    native = capability_of(x.device) >= NATIVE_FLOAT8
    codes, row_scales = round_blocks(x, block, torch.float8_e4m3fn if native else torch.float16)
    choice = _choice(tokens, block, native, x.device, alike)
    out = torch.empty(tokens, n_out, dtype=x.dtype, device=x.device)
    launch(
        block_linear_kernel,
        (triton.cdiv(tokens, choice["rows"]) * triton.cdiv(n_out, choice["cols"]),),
        codes,
        row_scales,
        weight if native else weight.view(torch.uint8),
        scales,
        row_blocks,
        bias,
        out,
        tokens,
        n_out,
        n_in,
        scales.shape[1],
        warps=choice["warps"],
        stages=choice["stages"],
        BLOCK=block,
        ROWS=choice["rows"],
        COLS=choice["cols"],
        K=choice["k"],
        BAND=8,
        ASM=not INTERPRETED,
    )
    return out
