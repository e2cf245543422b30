"""Activations of feed-forward layers, gated and plain. Memory-bound."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import activation as reference
from ..codes import cast, divide, encode, row_scale
from ..launch import launch, let_next_begin, needs, power_of_2
from ..linear.row import ROW, needs_codes, top_of


@triton.jit
def tanh(x):
    """By exp of -2|x|, which cannot overflow; keeps NaN."""
    t = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """float32 in and out."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu" or KIND == "relu2")
        x = tl.where(x > 0, x, tl.where(x == x, 0.0, x))
        return x * x if KIND == "relu2" else x


@triton.jit
def glu(gate, up, KIND: tl.constexpr):
    """``KIND(gate) * up`` in float32, or swigluoai of both; NaN stays."""
    if KIND == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return activate(gate, KIND) * up


@triton.jit
def act_kernel(x, out, stride, size, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """BLOCK elements of a row; with GATED the second factor lies ``size`` further on."""
    let_next_begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    h = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        h = glu(h, tl.load(x + row * stride + size + column, mask=mask, other=0.0).to(tl.float32), KIND)
    else:
        h = activate(h, KIND)
    tl.store(out + row * size + column, cast(h, out.dtype.element_ty), mask=mask)


@triton.jit
def gated(x, size, column, KIND: tl.constexpr):
    """``KIND(gate) * up`` at ``column`` of a row whose gate starts at ``x``, rounded to x's dtype, as float32."""
    mask = column < size
    h = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    h = glu(h, tl.load(x + size + column, mask=mask, other=0.0).to(tl.float32), KIND)
    return cast(h, x.dtype.element_ty).to(tl.float32)


@triton.jit
def act_quant_kernel(
    x, codes, scales, stride, size, KIND: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr
):
    """One token: the greatest magnitude first, then the codes. ONCE: the row fits in BLOCK and stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    h = gated(x + row * stride, size, i, KIND)
    peak = tl.abs(h)
    if not ONCE:
        for start in range(BLOCK, size, BLOCK):
            peak = tl.maximum(peak, tl.abs(gated(x + row * stride, size, start + i, KIND)))
    scale = row_scale(tl.zeros([1], tl.float32) + tl.max(peak, 0), TOP)
    tl.store(scales + row + tl.arange(0, 1), scale)
    tl.store(codes + row * size + i, encode(divide(h, scale), codes.dtype.element_ty, TOP), mask=i < size)
    if not ONCE:
        for start in range(BLOCK, size, BLOCK):
            h = gated(x + row * stride, size, start + i, KIND)
            code = encode(divide(h, scale), codes.dtype.element_ty, TOP)
            tl.store(codes + row * size + start + i, code, mask=start + i < size)


def _act(x: Tensor, kind: str, gated: bool) -> Tensor:
    size = x.shape[-1] // (2 if gated else 1)
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    grid = (flat.shape[0], triton.cdiv(size, 1024))
    launch(act_kernel, grid, flat, out, flat.stride(0), size, warps=4, KIND=kind, GATED=gated, BLOCK=1024)
    return out


@reference.act.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def act(x: Tensor, activation: str) -> Tensor:
    """One launch, float32 inside."""
    return _act(x, activation, gated=False)


@reference.act_and_mul.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """One launch, float32 inside."""
    return _act(x, activation, gated=True)


@reference.act_and_mul_quant.register("triton", devices=("cuda",), unsupported=needs_codes, alike=True)
def act_and_mul_quant(x: Tensor, activation: str, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """One launch, a program a token."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=codes, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(ROW, power_of_2(size))
    launch(
        act_quant_kernel,
        (rows,),
        x,
        out,
        scales,
        x.stride(0),
        size,
        warps=max(1, block // 512),
        KIND=activation,
        TOP=top_of(codes),
        BLOCK=block,
        ONCE=size <= block,
    )
    return out, scales
