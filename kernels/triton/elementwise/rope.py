"""Rotary position embedding, half-split, of a part of each head or all of it. Memory-bound."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import rope as reference
from ..codes import cast
from ..launch import launch, needs, power_of_2


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    out,
    stride_token,
    stride_head,
    heads,
    head_dim,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """HEADS heads of one token a program. HALF, REST: powers of two that hold half the turned part, and the rest."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    c = tl.load(cos + token * half + i, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + i, mask=i < half, other=0.0)[None, :]
    source = x + token * stride_token + head[:, None] * stride_head
    target = out + (token * heads + head[:, None]) * head_dim
    mask = (head < heads)[:, None] & (i < half)[None, :]
    a = tl.load(source + i[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + half + i[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target + i[None, :], cast(a * c - b * s, out.dtype.element_ty), mask=mask)
    tl.store(target + half + i[None, :], cast(b * c + a * s, out.dtype.element_ty), mask=mask)
    if REST > 0:
        j = 2 * half + tl.arange(0, REST)[None, :]
        mask = (head < heads)[:, None] & (j < head_dim)
        tl.store(target + j, tl.load(source + j, mask=mask), mask=mask)


@reference.rope.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One launch; reads strided views (a slice of a fused qkv) as they are."""
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out, half = torch.empty(x.shape, dtype=x.dtype, device=x.device), cos.shape[-1]
    rest = dim - 2 * half
    block = max(1, min(power_of_2(heads), 2048 // power_of_2(dim)))
    launch(
        rope_kernel,
        (tokens, triton.cdiv(heads, block)),
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        x.stride(0),
        x.stride(1),
        heads,
        dim,
        half,
        warps=4 if block * dim >= 1024 else 1,
        HEADS=block,
        HALF=power_of_2(half),
        REST=power_of_2(rest) if rest else 0,
    )
    return out
