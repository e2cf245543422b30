"""Linear layers whose activations are rounded at run time, one scale a token: int8 and float8 (W8A8).

A first launch rounds the activations (or the norm or activation function before has done so: ``matmul_int8`` and
``matmul_fp8`` take codes), a second multiplies: integer sums are exact, and both scales and the bias are applied to the
finished sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target, on_request
from ...reference import linear as reference
from ..codes import EMULATE, cast, divide, encode, row_scale
from ..float_codes import float8_as_fp16
from ..launch import (
    ALIKE_ROWS,
    INTERPRETED,
    NATIVE_FLOAT8,
    capability_of,
    launch,
    needs,
    power_of_2,
    shared_limit,
    tensor_memory,
)
from ..tuning import tuned
from .bands import rows_and_columns

ROW = 16384  # elements of a row that the registers of 1024 threads hold while they are rounded


@triton.jit
def round_rows_kernel(x, codes, scales, size, stride, TOP: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr):
    """One token: scale = max|x| / TOP, codes = x / scale rounded to the codes' type; a row of zeros has scale 1.

    ONCE: the row fits in BLOCK and stays in registers; else it is read twice, the second time from the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    h = tl.load(x + row * stride + i, mask=i < size, other=0.0).to(tl.float32)
    peak = tl.abs(h)
    if not ONCE:
        for start in range(BLOCK, size, BLOCK):
            more = tl.load(x + row * stride + start + i, mask=start + i < size, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.abs(more))
    scale = row_scale(tl.zeros([1], tl.float32) + tl.max(peak, 0), TOP)
    tl.store(scales + row + tl.arange(0, 1), scale)
    tl.store(codes + row * size + i, encode(divide(h, scale), codes.dtype.element_ty, TOP), mask=i < size)
    if not ONCE:
        for start in range(BLOCK, size, BLOCK):
            h = tl.load(x + row * stride + start + i, mask=start + i < size, other=0.0).to(tl.float32)
            code = encode(divide(h, scale), codes.dtype.element_ty, TOP)
            tl.store(codes + row * size + start + i, code, mask=start + i < size)


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
    E4M3: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS tokens by COLS outputs; for BAND see ``rows_and_columns``.

    Float8 as uint8 (e4m3 if E4M3, else e5m2) is multiplied in fp16; ``codes`` may then be fp16 already.
    """
    row, column = rows_and_columns(tokens, n_out, ROWS, COLS, BAND)
    safe_row = tl.where(row < tokens, row, 0).to(tl.int64)
    safe_column = tl.where(column < n_out, column, 0).to(tl.int64)
    INTEGER: tl.constexpr = weight.dtype.element_ty == tl.int8
    acc = tl.zeros([ROWS, COLS], tl.int32 if INTEGER else tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        a = tl.load(codes + (safe_row * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        w = tl.load(weight + (safe_column * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0)
        if w.dtype == tl.uint8:
            w = float8_as_fp16(w, E4M3, ASM)
        if a.dtype == tl.uint8:
            a = float8_as_fp16(a, E4M3, ASM)
        if EMULATE and not INTEGER:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, tl.trans(w), acc, out_dtype=tl.int32 if INTEGER else tl.float32)
    y = acc.to(tl.float32) * tl.load(row_scales + safe_row)[:, None] * tl.load(scales + safe_column)[None, :]
    if E4M3 and weight.dtype.element_ty == tl.uint8:
        y *= 65536.0 if codes.dtype.element_ty == tl.uint8 else 256.0
    if bias is not None:
        y += tl.load(bias + safe_column).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * n_out)[:, None] + column[None, :]
    tl.store(target, cast(y, out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < n_out)[None, :])


def needs_codes(target: Target) -> str | None:
    """``unsupported`` of kernels that write codes: float8 ones (trait ``codes``: "fp8") need compute capability 8.9."""
    return needs(89 if target.traits.get("codes") == "fp8" else 80)(target)


def top_of(dtype: torch.dtype) -> float:
    """What the greatest magnitude of a row becomes: 127, or the largest number of a float8 type."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes of ``dtype`` [T, in], float32 scales [T]); on GPUs without float8 its numbers are held in float16."""
    if x.stride(1) != 1:
        x = x.contiguous()
    native = dtype == torch.int8 or capability_of(x.device) >= NATIVE_FLOAT8
    codes = torch.empty(x.shape, dtype=dtype if native else torch.float16, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = min(ROW, power_of_2(x.shape[1]))
    launch(
        round_rows_kernel,
        (x.shape[0],),
        x,
        codes,
        scales,
        x.shape[1],
        x.stride(0),
        warps=max(1, block // 512),
        TOP=top_of(dtype),
        BLOCK=block,
        ONCE=x.shape[1] <= block,
    )
    return codes, scales


def product(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
    alike: bool = False,
) -> Tensor:
    """codes [T, in] · weight [out, in], both scales and the bias applied, in ``dtype``. One launch."""
    codes, (tokens, n_in), n_out, device = codes.contiguous(), codes.shape, weight.shape[0], codes.device
    native = weight.dtype == torch.int8 or capability_of(device) >= NATIVE_FLOAT8
    e4m3 = weight.dtype == torch.float8_e4m3fn
    if not native:
        weight, codes = weight.view(torch.uint8), codes if codes.itemsize == 2 else codes.view(torch.uint8)
    rows = ALIKE_ROWS if alike else max(16, power_of_2(min(tokens, 128 if native else 64)))
    small = {"cols": 64 if rows == 16 or not native else 128, "k": 128, "warps": 4}
    default = small if rows <= 64 else {"cols": 256, "k": 128, "warps": 8}
    found = tuned("row_linear_kernel", f"rows{rows}", default, device)
    if shared_limit(capability_of(device)) < 160 * 1024 or tensor_memory(capability_of(device)):
        found["cols"] = min(found["cols"], 128)
    stage = (rows * codes.itemsize + found["cols"]) * found["k"]
    found.setdefault("stages", max(2, min(5, shared_limit(capability_of(device)) // stage - 1)))
    out = torch.empty(tokens, n_out, dtype=dtype, device=device)
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
        E4M3=e4m3,
        ASM=not INTERPRETED,
    )
    return out


@reference.matmul_int8.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def matmul_int8(
    codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """One launch; the integer sums are exact."""
    return product(codes, row_scales, weight, scales, dtype, bias)


@reference.matmul_fp8.register("triton", devices=("cuda",), unsupported=needs(), alike=on_request)
def matmul_fp8(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """One launch; GPUs without float8 multiply the same numbers in fp16."""
    return product(codes, row_scales, weight, scales, dtype, bias, alike)


@reference.linear_int8.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two launches, rounding and product; the integer sums are exact."""
    return product(*round_rows(x, weight.dtype), weight, scales, x.dtype, bias)


@reference.linear_fp8.register("triton", devices=("cuda",), unsupported=needs(), alike=on_request)
def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None, alike: bool = False) -> Tensor:
    """Two launches, rounding and product; GPUs without float8 multiply the same numbers in fp16."""
    return product(*round_rows(x, weight.dtype), weight, scales, x.dtype, bias, alike)
