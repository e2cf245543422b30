"""Linear layers with 4-bit floating point weights (mxfp4, nvfp4), activations in 16 bits.

For few tokens codes become 16-bit floats in registers and are multiplied by the scale of their block before the
product. Above a number of tokens that is data, the weight is expanded into scratch memory and multiplied by cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...op import on_request
from ...reference import linear_blocks as reference
from ..codes import cast
from ..float_codes import block_scale, fp4
from ..launch import (
    ALIKE_ROWS,
    INTERPRETED,
    capability_of,
    dot_dtype,
    launch,
    needs,
    power_of_2,
    stages_of,
    tensor_memory,
)
from ..tuning import tuned


@triton.jit
def spread(scales, COLS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr):
    """Scales [COLS, blocks] beside the bytes [COLS, BYTES] of their codes."""
    BLOCKS: tl.constexpr = 2 * BYTES // GROUP
    each = tl.broadcast_to(scales[:, :, None], [COLS, BLOCKS, GROUP // 2])
    return tl.reshape(each, [COLS, BYTES])


@triton.jit(do_not_specialize=["tokens"])
def fp4_linear_kernel(
    x,
    packed,
    scales,
    row_scales,
    bias,
    out,
    tokens,
    n_out,
    n_in,
    stride_x,
    GROUP: tl.constexpr,
    E8M0: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS tokens by COLS outputs, K inputs at a time; GROUP divides K."""
    BYTES: tl.constexpr = K // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    safe = tl.where(column < n_out, column, 0).to(tl.int64)
    source = x + (row.to(tl.int64) * stride_x)[:, None]
    groups = n_in // GROUP
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        tile = tl.load(source + k[None, :], mask=(row < tokens)[:, None] & (k < n_in)[None, :], other=0.0).to(DOT)
        even, odd = tl.split(tl.reshape(tile, [ROWS, BYTES, 2]))
        byte = start // 2 + tl.arange(0, BYTES)
        w = tl.load(packed + (safe * (n_in // 2))[:, None] + byte[None, :], mask=(byte < n_in // 2)[None, :], other=0)
        group = start // GROUP + tl.arange(0, K // GROUP)
        s = tl.load(scales + (safe * groups)[:, None] + group[None, :], mask=(group < groups)[None, :], other=0)
        s = spread(block_scale(s, E8M0, DOT, ASM), COLS, BYTES, GROUP)
        acc = tl.dot(even, tl.trans(fp4(w, 0, DOT, ASM) * s), acc, input_precision="ieee")
        acc = tl.dot(odd, tl.trans(fp4(w, 1, DOT, ASM) * s), acc, input_precision="ieee")
    if row_scales is not None:
        acc *= tl.load(row_scales + safe)[None, :]
    if bias is not None:
        acc += tl.load(bias + safe).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * n_out)[:, None] + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < n_out)[None, :])


@triton.jit
def fp4_expand_kernel(
    packed, scales, row_scales, out, n_out, n_in, GROUP: tl.constexpr, E8M0: tl.constexpr, COLS: tl.constexpr,
    BYTES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """COLS rows by 2·BYTES columns of the weight, dequantized into ``out`` [n_out, n_in]."""
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    safe = tl.where(column < n_out, column, 0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    w = tl.load(packed + (safe * (n_in // 2))[:, None] + byte[None, :], mask=(byte < n_in // 2)[None, :], other=0)
    group = tl.program_id(1) * (2 * BYTES // GROUP) + tl.arange(0, 2 * BYTES // GROUP)
    inside = (group < n_in // GROUP)[None, :]
    s = tl.load(scales + (safe * (n_in // GROUP))[:, None] + group[None, :], mask=inside, other=0)
    s = spread(block_scale(s, E8M0, tl.float32, ASM), COLS, BYTES, GROUP)
    if row_scales is not None:
        s = s * tl.load(row_scales + safe)[:, None]
    low, high = fp4(w, 0, tl.float32, False) * s, fp4(w, 1, tl.float32, False) * s
    k = tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    mask = (column < n_out)[:, None] & (k < n_in)[None, :]
    y = cast(tl.interleave(low, high), out.dtype.element_ty)
    tl.store(out + (column.to(tl.int64) * n_in)[:, None] + k[None, :], y, mask=mask)


def scale_bits(scales: Tensor) -> tuple[Tensor, bool]:
    """(scales as uint8, whether they are e8m0)."""
    return scales.view(torch.uint8), scales.dtype == torch.uint8


def expand(packed: Tensor, scales: Tensor, row_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in ``dtype``; rounded once."""
    n_out, n_in = packed.shape[0], 2 * packed.shape[1]
    bits, e8m0 = scale_bits(scales)
    out = torch.empty(n_out, n_in, dtype=dtype, device=packed.device)
    launch(
        fp4_expand_kernel,
        (triton.cdiv(n_out, 16), triton.cdiv(n_in, 256)),
        packed,
        bits,
        row_scales,
        out,
        n_out,
        n_in,
        warps=4,
        GROUP=n_in // scales.shape[1],
        E8M0=e8m0,
        COLS=16,
        BYTES=128,
        ASM=not INTERPRETED,
    )
    return out


def _choice(tokens: int, x: Tensor) -> dict[str, int]:
    """Tile, warps and stages by the number of tokens."""
    rows, cols, warps = max(16, power_of_2(min(tokens, 128))), 32 if tokens <= 16 else 64, 4 if tokens <= 32 else 8
    if x.dtype == torch.float32:  # no tensor cores: for parity alone
        rows, cols, warps = 16, 32, 4
    found = {
        "rows": rows,
        **tuned("fp4_linear_kernel", f"rows{rows}", {"cols": cols, "k": 128, "warps": warps}, x.device),
    }
    stage = found["rows"] * found["k"] * x.element_size() + found["cols"] * found["k"]
    found.setdefault("stages", stages_of(x.device, stage, found["rows"] * found["cols"] * 4))
    return found


@reference.linear_fp4.register("triton", devices=("cuda",), unsupported=needs(), alike=on_request)
def linear_fp4(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    row_scales: Tensor | None = None,
    bias: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """One launch for few tokens, or where rows are to be alike; expansion and cuBLAS for many."""
    (tokens, n_in), n_out = x.shape, packed.shape[0]
    if not alike and tokens > tuned("linear_fp4", "expand", {"rows": 384}, x.device)["rows"]:
        return F.linear(x, expand(packed, scales, row_scales, x.dtype), bias)
    if x.stride(1) != 1:
        x = x.contiguous()
    choice, (bits, e8m0) = _choice(ALIKE_ROWS if alike else tokens, x), scale_bits(scales)
    out = torch.empty(tokens, n_out, dtype=x.dtype, device=x.device)
    launch(
        fp4_linear_kernel,
        (triton.cdiv(tokens, choice["rows"]), triton.cdiv(n_out, choice["cols"])),
        x,
        packed,
        bits,
        row_scales,
        bias,
        out,
        tokens,
        n_out,
        n_in,
        x.stride(0),
        warps=choice["warps"],
        stages=choice["stages"],
        registers=128 if choice["rows"] == 64 and tensor_memory(capability_of(x.device)) else None,  # alone, some spill
        GROUP=n_in // scales.shape[1],
        E8M0=e8m0,
        ROWS=choice["rows"],
        COLS=choice["cols"],
        K=choice["k"],
        DOT=dot_dtype(x.dtype),
        ASM=not INTERPRETED,
    )
    return out
