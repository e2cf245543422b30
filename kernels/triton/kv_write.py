"""Keys and values of new tokens into the paged cache, quantized on the way. Memory-bound, one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..reference import attention as reference
from ..registry import Target
from .codes import cast, hadamard, round_even
from .launch import FLOATS, launch, needs, power_of_2


def head_dim_reason(target: Target) -> str | None:
    """Why the cache kernels cannot run with the target's head_dim and bits, or None."""
    dim, bits = target.traits.get("head_dim"), target.traits.get("bits", 0)
    if dim is not None and (dim > 256 or dim % 8):
        return f"takes head_dim up to 256 in steps of 8, not {dim}"
    if bits not in (0, 4, 8):
        return f"takes a KV cache of 0 (not quantized), 4 or 8 bits, not {bits}"
    return None


@triton.jit
def _write(
    x,
    cache,
    params,
    token,
    slot,
    head,
    stride_token,
    stride_head,
    heads,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads)[:, None] & (i < HEAD_DIM)
    h = tl.load(x + token * stride_token + head[:, None] * stride_head + i, mask=mask, other=0.0).to(tl.float32)
    row = slot * heads + head
    if BITS == 0:
        tl.store(cache + row[:, None] * HEAD_DIM + i, cast(h, cache.dtype.element_ty), mask=mask)
    else:
        if TURN:
            h = cast(hadamard(h, HEADS, WIDTH, BLOCK), x.dtype.element_ty).to(tl.float32)
        TOP: tl.constexpr = 2**BITS - 1
        inside = i < HEAD_DIM
        low = tl.min(tl.where(inside, h, float("inf")), axis=1)
        high = tl.max(tl.where(inside, h, float("-inf")), axis=1)
        floor = tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)), tl.full([HEADS], 60000.0, tl.float32))
        scale = tl.maximum(tl.div_rn(high - low, tl.full([HEADS], TOP, tl.float32)), floor)
        scale = tl.minimum(tl.maximum(scale, 0.00006103515625), 65504.0)
        unknown = tl.sum(tl.where(mask & (h != h), 1, 0), axis=1) > 0
        scale = tl.where(unknown, float("nan"), scale).to(tl.float16)
        zero = tl.div_rn(-low, scale.to(tl.float32))
        zero = tl.minimum(tl.maximum(zero, -65504.0), 65504.0)
        zero = tl.where(unknown, float("nan"), zero).to(tl.float16)
        wide = tl.broadcast_to(scale.to(tl.float32)[:, None], (HEADS, WIDTH))
        code = tl.div_rn(h, wide) + zero.to(tl.float32)[:, None]
        code = tl.minimum(tl.maximum(code, -1.0), TOP + 1.0)
        code = tl.minimum(tl.maximum(round_even(code), 0.0), TOP * 1.0)
        code = tl.where(unknown[:, None], 0.0, code).to(tl.int32)
        if BITS == 4:
            HALF: tl.constexpr = HEAD_DIM // 2
            at = tl.broadcast_to((i + HALF) % WIDTH, (HEADS, WIDTH))
            packed = code | (tl.gather(code, at, 1) << 4)
            inside = (head < heads)[:, None] & (i < HALF)
            tl.store(cache + row[:, None] * HALF + i, packed.to(tl.uint8), mask=inside)
        else:
            tl.store(cache + row[:, None] * HEAD_DIM + i, code.to(tl.uint8), mask=mask)
        tl.store(params + row * 2, scale, mask=head < heads)
        tl.store(params + row * 2 + 1, zero, mask=head < heads)


@triton.jit
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    k_params,
    v_params,
    slots,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    heads,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys (program axis 2 = 0) or values of HEADS heads of one token. BLOCK: size of a Hadamard block."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    if tl.program_id(2) == 0:
        _write(
            k,
            k_cache,
            k_params,
            token,
            slot,
            head,
            k_stride_token,
            k_stride_head,
            heads,
            HEAD_DIM,
            WIDTH,
            HEADS,
            BITS,
            BITS == 4,
            BLOCK,
        )
    else:
        _write(
            v,
            v_cache,
            v_params,
            token,
            slot,
            head,
            v_stride_token,
            v_stride_head,
            heads,
            HEAD_DIM,
            WIDTH,
            HEADS,
            BITS,
            False,
            BLOCK,
        )


@reference.kv_write.register("triton", devices=("cuda",), dtypes=FLOATS, unsupported=needs(80, head_dim_reason))
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
) -> None:
    """Reads strided views of a fused qkv as they are; caches and parameters are contiguous."""
    tokens, heads, dim = k.shape
    k, v = (t if t.stride(2) == 1 else t.contiguous() for t in (k, v))
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    width = power_of_2(dim)
    block = min(power_of_2(heads), max(1, 1024 // width))
    launch(
        kv_write_kernel,
        (tokens, triton.cdiv(heads, block), 2),
        k,
        v,
        k_cache,
        v_cache,
        k_params,
        v_params,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads,
        warps=4 if block * width >= 1024 else 2,
        HEAD_DIM=dim,
        WIDTH=width,
        HEADS=block,
        BITS=bits,
        BLOCK=dim & -dim,
    )
