"""Linear layers whose activations are rounded at run time, one scale a token: int8 and float8 (W8A8).

A first launch rounds the activations, a second multiplies: integer sums are exact, and both scales and the bias are
applied to the finished sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import linear as reference
from .codes import EMULATE, cast, round_even
from .launch import FLOATS, capability_of, launch, needs, power_of_2, shared_limit
from .tuning import tuned


@triton.jit
def _to_float8(x, DTYPE: tl.constexpr):
    """float32 -> DTYPE, to nearest even; |x| does not exceed its largest number."""
    if EMULATE:  # the interpreter does not round halves to even: leave it nothing to round
        LEAST: tl.constexpr = -6 if DTYPE == tl.float8e4nv else -14
        DIGITS: tl.constexpr = 3 if DTYPE == tl.float8e4nv else 2
        exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST) - DIGITS
        unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        x = round_even(x / unit) * unit
    return x.to(DTYPE)


@triton.jit
def round_rows_kernel(x, codes, scales, size, stride, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """One token: scale = max|x| / TOP, codes = x / scale rounded to the codes' type; a row of zeros has scale 1."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        h = tl.load(x + row * stride + i, mask=i < size, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(h))
    scale = tl.div_rn(tl.full([1], 0.0, tl.float32) + tl.max(peak, 0), tl.full([1], TOP, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row + tl.arange(0, 1), scale)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        h = tl.load(x + row * stride + i, mask=i < size, other=0.0).to(tl.float32)
        h = tl.div_rn(h, tl.broadcast_to(scale, [BLOCK]))
        if codes.dtype.element_ty == tl.int8:
            code = tl.minimum(tl.maximum(round_even(h), -127.0), 127.0).to(tl.int8)
        else:
            code = _to_float8(tl.minimum(tl.maximum(h, -TOP), TOP), codes.dtype.element_ty)
        tl.store(codes + row * size + i, code, mask=i < size)


@triton.jit(do_not_specialize=["tokens"])
def row_linear_kernel(
    codes,
    row_scales,
    weight,
    scales,
    bias,
    out,
    tokens,
    n_out,
    n_in,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
):
    """ROWS tokens by COLS outputs; programs go through bands of BAND tiles of tokens, so that weights stay in L2."""
    down, across = tl.cdiv(tokens, ROWS), tl.cdiv(n_out, COLS)
    band = tl.program_id(0) // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    rest = tl.program_id(0) % (BAND * across)
    row = (band * BAND + rest % height) * ROWS + tl.arange(0, ROWS)
    column = rest // height * COLS + tl.arange(0, COLS)
    safe_row = tl.where(row < tokens, row, 0).to(tl.int64)
    safe_column = tl.where(column < n_out, column, 0).to(tl.int64)
    INTEGER: tl.constexpr = weight.dtype.element_ty == tl.int8
    acc = tl.zeros([ROWS, COLS], tl.int32 if INTEGER else tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        a = tl.load(codes + (safe_row * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        w = tl.load(weight + (safe_column * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        if EMULATE and not INTEGER:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, tl.trans(w), acc, out_dtype=tl.int32 if INTEGER else tl.float32)
    y = acc.to(tl.float32) * tl.load(row_scales + safe_row)[:, None] * tl.load(scales + safe_column)[None, :]
    if bias is not None:
        y += tl.load(bias + safe_column).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * n_out)[:, None] + column[None, :]
    tl.store(target, cast(y, out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < n_out)[None, :])


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes of ``dtype`` [T, in], float32 scales [T])."""
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = min(4096, power_of_2(x.shape[1]))
    launch(
        round_rows_kernel,
        (x.shape[0],),
        x,
        codes,
        scales,
        x.shape[1],
        x.stride(0),
        warps=max(1, block // 512),
        TOP=top,
        BLOCK=block,
    )
    return codes, scales


def _linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    codes, row_scales = round_rows(x, weight.dtype)
    (tokens, n_in), n_out = x.shape, weight.shape[0]
    rows = max(16, power_of_2(min(tokens, 128)))
    small = {"cols": 64 if rows == 16 else 128, "k": 128, "warps": 4}
    default = small if rows <= 64 else {"cols": 256, "k": 128, "warps": 8}
    found = tuned("row_linear_kernel", f"rows{rows}", default, x.device)
    if shared_limit(capability_of(x.device)) < 160 * 1024:
        found["cols"] = min(found["cols"], 128)
    stage = (rows + found["cols"]) * found["k"]
    found.setdefault("stages", max(2, min(5, shared_limit(capability_of(x.device)) // stage - 1)))
    out = torch.empty(tokens, n_out, dtype=x.dtype, device=x.device)
    launch(
        row_linear_kernel,
        (triton.cdiv(tokens, rows) * triton.cdiv(n_out, found["cols"]),),
        codes,
        row_scales,
        weight,
        scales,
        bias,
        out,
        tokens,
        n_out,
        n_in,
        warps=found["warps"],
        stages=found["stages"],
        ROWS=rows,
        COLS=found["cols"],
        K=found["k"],
        BAND=8,
    )
    return out


@reference.linear_int8.register("triton", devices=("cuda",), dtypes=FLOATS, unsupported=needs(80))
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two launches; the integer sums are exact."""
    return _linear(x, weight, scales, bias)


@reference.linear_fp8.register("triton", devices=("cuda",), dtypes=FLOATS, unsupported=needs(89))
def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two launches; needs tensor cores that multiply float8."""
    return _linear(x, weight, scales, bias)
