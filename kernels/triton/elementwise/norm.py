"""Root mean square norm, alone and after an addition. Memory-bound: every element is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import norm as reference
from ..codes import cast, divide, encode, row_scale
from ..launch import launch, let_next_begin, needs, power_of_2
from ..linear.row import needs_codes, top_of


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    total,
    rows,
    size,
    inner,
    stride_outer,
    stride_inner,
    eps,
    weight_offset,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows of COLS >= size elements a program; row r of ``x`` starts at (r // inner, r % inner).

    With ``scales`` the normed row, in x's dtype, is rounded to the codes of ``out``, of at most TOP.
    """
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (column < size)[None, :]
    source = (row // inner * stride_outer + row % inner * stride_inner)[:, None] + column[None, :]
    flat = (row * size)[:, None] + column[None, :]
    w = tl.load(weight + column, mask=column < size, other=0.0)  # asked for before the sum is waited for
    h = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        h = h + tl.load(residual + flat, mask=mask, other=0.0).to(tl.float32)
        rounded = cast(h, total.dtype.element_ty)
        tl.store(total + flat, rounded, mask=mask)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) / size + eps)
    y = h * scale[:, None] * (w.to(tl.float32) + weight_offset)[None, :]
    if scales is None:
        tl.store(out + flat, cast(y, out.dtype.element_ty), mask=mask)
    else:
        y = cast(y, x.dtype.element_ty).to(tl.float32)
        unit = row_scale(tl.max(tl.abs(y), 1), TOP)
        tl.store(scales + row, unit, mask=row < rows)
        tl.store(out + flat, encode(divide(y, unit[:, None]), out.dtype.element_ty, TOP), mask=mask)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    codes: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(normed, or its codes; scales of the codes; the sum)."""
    size = x.shape[-1]
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    inner = x.shape[1] if x.dim() == 3 else 1
    strides = (x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0) if x.dim() == 2 else size, 0)
    if x.dim() > 3:
        strides = (size, 0)
    out = torch.empty(x.shape, dtype=codes or x.dtype, device=x.device)
    scales = None if codes is None else torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rows, columns = x.numel() // size, power_of_2(size)
    block = max(1, 1024 // columns)
    warps = min(16, max(1, block * columns // 512))
    launch(
        rms_norm_kernel,
        (triton.cdiv(rows, block),),
        x,
        None if residual is None else residual.contiguous(),
        weight,
        out,
        scales,
        total,
        rows,
        size,
        inner,
        *strides,
        eps,
        weight_offset,
        warps=warps,
        registers=72 if codes is not None and columns <= 8192 else None,  # 16 elements a thread: left alone, some spill
        TOP=0.0 if codes is None else top_of(codes),
        ROWS=block,
        COLS=columns,
    )
    return out, scales, total


@reference.rms_norm.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """One launch; several short rows (norms over heads) share a program."""
    return _norm(x, None, weight, eps, weight_offset)[0]


@reference.add_rms_norm.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """One launch: the sum is written and normed without being read again."""
    out, _, total = _norm(x.contiguous(), residual, weight, eps, weight_offset)
    assert total is not None
    return out, total


@reference.rms_norm_quant.register("triton", devices=("cuda",), unsupported=needs_codes, alike=True)
def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, codes: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """One launch: the normed row never leaves the registers."""
    out, scales, _ = _norm(x, None, weight, eps, weight_offset, codes)
    assert scales is not None
    return out, scales


@reference.add_rms_norm_quant.register("triton", devices=("cuda",), unsupported=needs_codes, alike=True)
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch: the normed row never leaves the registers."""
    out, scales, total = _norm(x.contiguous(), residual, weight, eps, weight_offset, codes)
    assert scales is not None and total is not None
    return out, scales, total
