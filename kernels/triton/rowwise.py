"""Norms, rope and gated activations in Triton: one program a row, computed in float32.

bfloat16 is upcast right after every load: Triton's interpreter computes on its raw bits otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import activation as activation_ops
from ..reference import norm, rope
from ..registry import Target

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: on the CPU, for tests
LARGEST_ROW = 65536


def unsupported(target: Target) -> str | None:
    """Needs a GPU of compute capability 7.0, or the interpreter."""
    if INTERPRETED:
        return None if target.dtype != "bfloat16" else "Triton's interpreter rounds bfloat16 wrongly"
    if target.device != "cuda":
        return f"runs on cuda, not on {target.device} (but for tests, with TRITON_INTERPRET=1)"
    if target.capability is not None and target.capability < 70:
        return f"needs compute capability 7.0, this GPU has {target.capability / 10}"
    return None


@triton.jit
def rms_norm_kernel(x, weight, out, size, eps, offset, BLOCK: tl.constexpr):
    """out[row] = x[row] / rms(x[row]) * (weight + offset)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    h = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    h = h * tl.rsqrt(tl.sum(h * h, axis=0) / size + eps)
    tl.store(out + row * size + at, (h * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, total, size, eps, offset, BLOCK: tl.constexpr):
    """total[row] = x[row] + residual[row], rounded to its dtype; out[row] = its norm."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    h = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    rounded = h.to(total.dtype.element_ty)
    tl.store(total + row * size + at, rounded, mask=inside)
    h = rounded.to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    h = h * tl.rsqrt(tl.sum(h * h, axis=0) / size + eps)
    tl.store(out + row * size + at, (h * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(x, cos, sin, out, heads, token_stride, head_stride, dim, half, BLOCK: tl.constexpr):
    """One head of one token: the halves of its first 2·half elements turned, the rest copied."""
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    source = x + token * token_stride + head * head_stride
    target = out + (token * heads + head) * dim
    at = tl.arange(0, BLOCK)
    turned = at < half
    c = tl.load(cos + token * half + at, mask=turned, other=0.0)
    s = tl.load(sin + token * half + at, mask=turned, other=0.0)
    a = tl.load(source + at, mask=turned, other=0.0).to(tl.float32)
    b = tl.load(source + half + at, mask=turned, other=0.0).to(tl.float32)
    tl.store(target + at, (a * c - b * s).to(out.dtype.element_ty), mask=turned)
    tl.store(target + half + at, (b * c + a * s).to(out.dtype.element_ty), mask=turned)
    rest = 2 * half + at
    tl.store(target + rest, tl.load(source + rest, mask=rest < dim), mask=rest < dim)


@triton.jit
def act_and_mul_kernel(x, out, inner, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = activation(x[row, :inner]) * x[row, inner:], a block of columns a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(x + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inside_tanh = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inside_tanh)  # (1 + tanh(y)) / 2 = sigmoid(2y)
    else:
        gate = tl.maximum(gate, 0.0)
    tl.store(out + row * inner + at, (gate * up).to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


def _row_limit(size: int) -> int:
    assert size <= LARGEST_ROW, size
    return triton.next_power_of_2(size)


@norm.rms_norm.register("triton", devices=("cuda", "cpu"), unsupported=unsupported)
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """One program a row of up to 65536 elements."""
    h = x.contiguous()
    out, size = torch.empty_like(h), h.shape[-1]
    block = _row_limit(size)
    grid = (h.numel() // size,)
    rms_norm_kernel[grid](h, weight, out, size, eps, weight_offset, BLOCK=block, num_warps=_warps(block))
    return out


@norm.add_rms_norm.register("triton", devices=("cuda", "cpu"), unsupported=unsupported)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum and norm in one pass."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    block = _row_limit(size)
    grid = (x.numel() // size,)
    add_rms_norm_kernel[grid](
        x, residual, weight, out, total, size, eps, weight_offset, BLOCK=block, num_warps=_warps(block)
    )
    return out, total


@rope.rope.register("triton", devices=("cuda", "cpu"), unsupported=unsupported)
def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One program a head of a token; ``x`` may be a slice of a wider tensor."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1]
    block = triton.next_power_of_2(max(half, dim - 2 * half))
    rope_kernel[(tokens * heads,)](
        x, cos.contiguous(), sin.contiguous(), out, heads, x.stride(0), x.stride(1), dim, half, BLOCK=block, num_warps=1
    )
    return out


@activation_ops.act_and_mul.register("triton", devices=("cuda", "cpu"), unsupported=unsupported)
def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """A program for every 1024 columns of a row."""
    x = x.contiguous()
    inner = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], inner), dtype=x.dtype, device=x.device)
    grid = (x.numel() // (2 * inner), triton.cdiv(inner, 1024))
    act_and_mul_kernel[grid](x, out, inner, KIND=activation, BLOCK=1024)
    return out
