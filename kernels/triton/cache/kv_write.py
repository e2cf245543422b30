"""Keys and values of new tokens into the paged cache, quantized on the way. Memory-bound, one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...reference import attention as reference
from ..codes import cast, hadamard
from ..launch import launch, needs, power_of_2
from .cache_codes import form_of, stored
from .kv_store import head_dim_reason, store_heads


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
    scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    FORM: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads)[:, None] & (i < HEAD_DIM)
    h = tl.load(x + token * stride_token + head[:, None] * stride_head + i, mask=mask, other=0.0).to(tl.float32)
    if KEYS and FORM == "int4":
        h = cast(hadamard(h, HEADS, WIDTH, BLOCK), x.dtype.element_ty).to(tl.float32)
    row = slot * heads + head
    store_heads(h, cache, params, row, head < heads, scale, HEAD_DIM, WIDTH, HEADS, FORM, KEYS)


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
    k_scale,
    v_scale,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys (program axis 2 = 0) or values of HEADS heads of one token. BLOCK: size of a Hadamard block."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    if tl.program_id(2) == 0:
        _write(
            k, k_cache, k_params, token, slot, head, k_stride_token, k_stride_head, heads, k_scale,
            HEAD_DIM, WIDTH, HEADS, FORM, True, BLOCK,
        )  # fmt: skip
    else:
        _write(
            v, v_cache, v_params, token, slot, head, v_stride_token, v_stride_head, heads, v_scale,
            HEAD_DIM, WIDTH, HEADS, FORM, False, BLOCK,
        )  # fmt: skip


@reference.kv_write.register("triton", devices=("cuda",), unsupported=needs(more=head_dim_reason), alike=True)
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
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
        stored(k_cache),
        stored(v_cache),
        k_params,
        v_params,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        heads,
        float(k_scale),
        float(v_scale),
        warps=4 if block * width >= 1024 else 2,
        HEAD_DIM=dim,
        WIDTH=width,
        HEADS=block,
        FORM=form_of(k_cache, bits),
        BLOCK=dim & -dim,
    )
