"""Heads of keys or values, in registers, into the cache: shared by the kernels that write it."""

from __future__ import annotations

import triton
import triton.language as tl

from ...op import Target
from ..codes import cast, round_even
from .cache_codes import float8_bytes

LONGEST = 512  # numbers of a head


def head_dim_reason(target: Target) -> str | None:
    """Why the cache kernels cannot run with the target's head_dim and cache, or None."""
    dim, bits, cache = target.traits.get("head_dim"), target.traits.get("bits", 0), target.traits.get("cache")
    if dim is not None and (dim > LONGEST or dim % 8):
        return f"takes head_dim up to {LONGEST} in steps of 8, not {dim}"
    if bits not in (0, 4, 8):
        return f"takes a KV cache of 0 (not quantized), 4 or 8 bits, not {bits}"
    if cache not in (None, "float8_e4m3fn", "float8_e5m2"):
        return f"takes a KV cache in the activations' dtype, float8_e4m3fn or float8_e5m2, not {cache}"
    return None


@triton.jit
def store_heads(
    h,
    cache,
    params,
    row,
    present,
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    FORM: tl.constexpr,
    KEYS: tl.constexpr,
):
    """``h``: float32 [HEADS, WIDTH >= HEAD_DIM], in form int4 turned where they are keys; ``row``: slot·heads + head of
    each, ``present``: which to store; ``scale``: of float8.
    """
    i = tl.arange(0, WIDTH)[None, :]
    mask = present[:, None] & (i < HEAD_DIM)
    if FORM == "float":
        tl.store(cache + row[:, None] * HEAD_DIM + i, cast(h, cache.dtype.element_ty), mask=mask)
    elif FORM == "e4m3" or FORM == "e5m2":
        divided = tl.div_rn(h, tl.full([HEADS, WIDTH], 1.0, tl.float32) * scale)
        tl.store(cache + row[:, None] * HEAD_DIM + i, float8_bytes(divided, FORM), mask=mask)
    else:
        BITS: tl.constexpr = 8 if FORM == "int8" else 6 if KEYS else 4
        code, step, zero = _quantize(h, mask, i < HEAD_DIM, HEADS, WIDTH, BITS)
        if BITS == 8:
            tl.store(cache + row[:, None] * HEAD_DIM + i, code.to(tl.uint8), mask=mask)
        else:
            _store_packed(code, cache, row, present, HEAD_DIM, WIDTH, HEADS, BITS)
        tl.store(params + row * 2, step, mask=present)
        tl.store(params + row * 2 + 1, zero, mask=present)


@triton.jit
def _quantize(h, mask, inside, HEADS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """(codes int32, scale and zero float16), rounded as the reference rounds; a head with NaN has both NaN."""
    TOP: tl.constexpr = 2**BITS - 1
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
    return tl.where(unknown[:, None], 0.0, code).to(tl.int32), scale, zero


@triton.jit
def _store_packed(
    code,
    cache,
    row,
    present,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Codes of 4 or 6 bits as the reference lays them out."""
    i = tl.arange(0, WIDTH)[None, :]
    HALF: tl.constexpr = HEAD_DIM // 2
    QUARTER: tl.constexpr = HEAD_DIM // 4
    STORED: tl.constexpr = HALF + (QUARTER if BITS == 6 else 0)
    target = cache + row[:, None] * STORED + i
    low = code & 15
    at = tl.broadcast_to((i + HALF) % WIDTH, (HEADS, WIDTH))
    tl.store(target, (low | (tl.gather(low, at, 1) << 4)).to(tl.uint8), mask=present[:, None] & (i < HALF))
    if BITS == 6:
        high = code >> 4
        packed = high
        for j in tl.static_range(1, 4):
            at = tl.broadcast_to((i + j * QUARTER) % WIDTH, (HEADS, WIDTH))
            packed = packed | (tl.gather(high, at, 1) << (2 * j))
        tl.store(target + HALF, packed.to(tl.uint8), mask=present[:, None] & (i < QUARTER))
