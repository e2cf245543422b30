"""From the qkv projection to attention in one launch: qk-norm, rope, Hadamard turn, quantization, cache write.

A program has some heads of one token, of queries, keys or values. The element that rope pairs with another is loaded a
second time (from the first-level cache) and normed with it, so that nothing moves between threads. Every step rounds to
the activations' dtype, as the composition of the single ops does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import rope_kv_write as reference
from ..codes import cast, hadamard
from ..launch import capability_of, launch, needs, power_of_2
from .cache_codes import form_of, stored
from .kv_store import head_dim_reason, store_heads


@triton.jit
def _read(
    x,
    weight,
    cos,
    sin,
    token,
    head,
    heads,
    stride_token,
    stride_head,
    half,
    eps,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Heads of a token as float32 [HEADS, WIDTH]: normed where there is a weight, turned where there is a rope."""
    i = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads)[:, None] & (i < HEAD_DIM)
    source = x + token * stride_token + head[:, None] * stride_head
    h = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
    rate = tl.sum(h * h, axis=1)[:, None]
    if weight is not None:
        rate = tl.rsqrt(rate / HEAD_DIM + eps)
        w = tl.load(weight + i, mask=i < HEAD_DIM, other=0.0).to(tl.float32)
        h = cast(h * rate * w, x.dtype.element_ty).to(tl.float32)
    if cos is not None:
        first, inside = i < half, i < 2 * half
        partner = tl.where(first, i + half, i - half)
        p = tl.load(source + partner, mask=mask & inside, other=0.0).to(tl.float32)
        if weight is not None:
            w = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
            p = cast(p * rate * w, x.dtype.element_ty).to(tl.float32)
        angle = token * half + tl.where(first, i, i - half)
        c = tl.load(cos + angle, mask=inside, other=1.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        turned = cast(h * c + tl.where(first, -p, p) * s, x.dtype.element_ty).to(tl.float32)
        h = tl.where(inside, turned, h)
    return h


@triton.jit
def rope_kv_write_kernel(
    q,
    k,
    v,
    out,
    k_cache,
    v_cache,
    k_params,
    v_params,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    q_heads,
    heads,
    half,
    eps,
    k_scale,
    v_scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    KV_BLOCKS: tl.constexpr,
):
    """Program (token, block of HEADS heads): first the blocks of queries, then of keys, then of values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = tl.arange(0, WIDTH)[None, :]
    if part < Q_BLOCKS:
        head = part * HEADS + tl.arange(0, HEADS)
        h = _read(
            q, q_weight, cos, sin, token, head, q_heads, q_stride_token, q_stride_head, half, eps, HEAD_DIM, WIDTH
        )
        if FORM == "int4":
            h = hadamard(h, HEADS, WIDTH, BLOCK)
        mask = (head < q_heads)[:, None] & (i < HEAD_DIM)
        target = out + (token * q_heads + head[:, None]) * HEAD_DIM + i
        tl.store(target, cast(h, out.dtype.element_ty), mask=mask)
    elif part < Q_BLOCKS + KV_BLOCKS:
        head = (part - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        h = _read(k, k_weight, cos, sin, token, head, heads, k_stride_token, k_stride_head, half, eps, HEAD_DIM, WIDTH)
        if FORM == "int4":
            h = cast(hadamard(h, HEADS, WIDTH, BLOCK), k.dtype.element_ty).to(tl.float32)
        row = tl.load(slots + token).to(tl.int64) * heads + head
        store_heads(h, k_cache, k_params, row, head < heads, k_scale, HEAD_DIM, WIDTH, HEADS, FORM, True)
    else:
        head = (part - Q_BLOCKS - KV_BLOCKS) * HEADS + tl.arange(0, HEADS)
        h = _read(v, None, None, None, token, head, heads, v_stride_token, v_stride_head, half, eps, HEAD_DIM, WIDTH)
        row = tl.load(slots + token).to(tl.int64) * heads + head
        store_heads(h, v_cache, v_params, row, head < heads, v_scale, HEAD_DIM, WIDTH, HEADS, FORM, False)


@reference.rope_kv_write.register("triton", devices=("cuda",), unsupported=needs(more=head_dim_reason), alike=True)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """One launch; reads strided views of a fused qkv as they are; caches and parameters are contiguous."""
    tokens, q_heads, dim = q.shape
    heads, width = k.shape[1], power_of_2(dim)
    q, k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block = min(power_of_2(heads), max(1, 1024 // width))
    q_blocks, kv_blocks = triton.cdiv(q_heads, block), triton.cdiv(heads, block)
    launch(
        rope_kv_write_kernel,
        (tokens, q_blocks + 2 * kv_blocks),
        q,
        k,
        v,
        out,
        stored(k_cache),
        stored(v_cache),
        k_params,
        v_params,
        slot_mapping,
        None if cos is None else cos.contiguous(),
        None if sin is None else sin.contiguous(),
        q_weight,
        k_weight,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_heads,
        heads,
        0 if cos is None else cos.shape[-1],
        eps,
        float(k_scale),
        float(v_scale),
        warps=4 if block * width >= 1024 else 2,
        registers=80 if capability_of(q.device) >= 100 else None,  # left alone, some spill
        HEAD_DIM=dim,
        WIDTH=width,
        HEADS=block,
        FORM=form_of(k_cache, bits),
        BLOCK=dim & -dim,
        Q_BLOCKS=q_blocks,
        KV_BLOCKS=kv_blocks,
    )
    return out
