"""From the projections of latent attention to the absorbed product in one launch: norm, rope, rounding, cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import latent_write as reference
from ..cache.cache_codes import form_of, stored
from ..cache.kv_store import store_heads
from ..codes import cast
from ..launch import launch, needs, power_of_2
from .latent import latent_reason


@triton.jit
def _turned(at, i, inside, cos, sin, HALF: tl.constexpr):
    """Numbers ``i`` of the heads at ``at`` [HEADS, 1], turned; float32 [HEADS, COLS]."""
    first = i < HALF
    partner = tl.where(first, i + HALF, i - HALF)
    h = tl.load(at + i, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(at + partner, mask=inside, other=0.0).to(tl.float32)
    angle = tl.where(first, i, i - HALF)
    c = tl.load(cos + angle, mask=inside, other=1.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    return h * c + tl.where(first, -p, p) * s


@triton.jit
def latent_write_kernel(
    q,
    latent,
    shared,
    cache,
    row_params,  # Triton has a name of its own for params
    slots,
    cos,
    sin,
    weight,
    out,
    q_stride_token,
    q_stride_head,
    latent_stride,
    shared_stride,
    heads,
    eps,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    T_COLS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    FORM: tl.constexpr,
):
    """Program (token, part): the row first, then each HEADS query heads. HALF: of what turns, whose power of two is
    T_COLS; WIDTH: the power of two that holds a row.
    """
    token = tl.program_id(0).to(tl.int64)
    ROPE: tl.constexpr = 2 * HALF
    cos += token * HALF
    sin += token * HALF
    if tl.program_id(1) == 0:
        i = tl.arange(0, WIDTH)[None, :]
        h = tl.load(latent + token * latent_stride + i, mask=i < RANK, other=0.0).to(tl.float32)
        if weight is not None:
            w = tl.load(weight + i, mask=i < RANK, other=0.0).to(tl.float32)
            h = h * tl.rsqrt(tl.sum(h * h, axis=1)[:, None] / RANK + eps) * w
        behind = (i >= RANK) & (i < RANK + ROPE)
        key = _turned(shared + token * shared_stride, i - RANK, behind, cos, sin, HALF)
        row = cast(tl.where(i < RANK, h, key), q.dtype.element_ty).to(tl.float32)
        slot = tl.load(slots + token).to(tl.int64) + tl.arange(0, 1)
        store_heads(row, cache, row_params, slot, slot >= 0, 1.0, RANK + ROPE, WIDTH, 1, FORM, True)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        j = tl.arange(0, T_COLS)[None, :]
        inside = (head < heads) & (j < ROPE)
        turned = _turned(q + token * q_stride_token + head * q_stride_head, j, inside, cos, sin, HALF)
        tl.store(out + (token * heads + head) * ROPE + j, cast(turned, out.dtype.element_ty), mask=inside)


@reference.latent_write.register("triton", devices=("cuda",), unsupported=needs(more=latent_reason))
def latent_write(
    q: Tensor,
    latent: Tensor,
    shared: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    bits: int = 0,
    params: Tensor | None = None,
) -> Tensor:
    """Reads strided views of the projections as they are; cache and parameters are contiguous."""
    tokens, heads, turned = q.shape
    q, latent, shared = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, latent, shared))
    assert cache.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    columns = power_of_2(turned)
    block = min(power_of_2(heads), max(1, 1024 // columns))
    launch(
        latent_write_kernel,
        (tokens, 1 + triton.cdiv(heads, block)),
        q,
        latent,
        shared,
        stored(cache),
        params,
        slot_mapping,
        cos,
        sin,
        weight,
        out,
        q.stride(0),
        q.stride(1),
        latent.stride(0),
        shared.stride(0),
        heads,
        eps,
        warps=4,
        RANK=latent.shape[1],
        HALF=turned // 2,
        T_COLS=columns,
        WIDTH=power_of_2(latent.shape[1] + turned),
        HEADS=block,
        FORM=form_of(cache, bits),
    )
    return out
