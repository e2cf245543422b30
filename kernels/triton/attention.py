"""Paged attention, flash style: prefill chunks and decode tokens of a ragged batch in one launch.

One program has a tile of new tokens with all query heads of one key head as its rows (Ainslie et al., "GQA", 2023), and
walks over a range of keys (Dao et al., "FlashAttention", 2022; Dao, "Flash-Decoding", 2023). Where a tile has several
ranges, a second launch merges their partial results in order. With a quantized cache, codes go into the products as
they are: s = scale_k·(q·code - zero_k·sum(q)) and o = sum(p·scale_v·code) - sum(p·scale_v·zero_v), so that scales and
zeros cost once a key rather than once an element. Four-bit codes are read as two half heads. Eight-bit codes fit the
mantissa of fp16, not of bf16: keys are multiplied in fp16 by queries scaled to 1 (head_dim up to 128), values in bf16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import attention as reference
from .activation import tanh
from .attention_plan import Plan, Tiles, make_plan
from .codes import cast, hadamard, high_nibble, low_nibble, scale_and_zero, widen
from .kv_write import head_dim_reason
from .launch import FLOATS, INTERPRETED, capability_of, dot_dtype, launch, needs, power_of_2, shared_limit
from .tuning import tuned

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(
    acc,
    acc_high,
    m,
    denominator,
    zeros,
    q,
    q_high,
    q_sum,
    q_scale,
    position,
    start,
    first_key,
    end_key,
    k_cache,
    v_cache,
    k_params,
    v_params,
    pages,
    heads,
    head,
    scale,
    softcap,
    window,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    BITS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
    K_DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Fold KEYS keys from ``start`` into the running sums. MASK: some of them may not be seen by every row."""
    key = start + tl.arange(0, KEYS)
    inside = (key >= first_key) & (key < end_key)
    if PAGE % KEYS == 0:
        slot = tl.load(pages + start // PAGE).to(tl.int64) * PAGE + start % PAGE + tl.arange(0, KEYS)
    elif MASK:
        slot = tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
    else:
        slot = tl.load(pages + key // PAGE).to(tl.int64) * PAGE + key % PAGE
    row = slot * heads + head
    column = tl.arange(0, COLS)
    at = row[:, None] * WIDTH + column[None, :]
    if MASK:
        filled = inside[:, None] & (column < WIDTH)[None, :]
        k = tl.load(k_cache + at, mask=filled, other=0)
        v = tl.load(v_cache + at, mask=filled, other=0)
    elif COLS != WIDTH:
        k = tl.load(k_cache + at, mask=(column < WIDTH)[None, :], other=0)
        v = tl.load(v_cache + at, mask=(column < WIDTH)[None, :], other=0)
    else:
        k = tl.load(k_cache + at)
        v = tl.load(v_cache + at)
    if BITS == 0:
        s = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
    else:
        if MASK:
            k_scale, k_zero = scale_and_zero(tl.load(k_params + row, mask=inside, other=0))
            v_scale, v_zero = scale_and_zero(tl.load(v_params + row, mask=inside, other=0))
        else:
            k_scale, k_zero = scale_and_zero(tl.load(k_params + row))
            v_scale, v_zero = scale_and_zero(tl.load(v_params + row))
        if BITS == 8:
            s = tl.dot(q, tl.trans(widen(k, K_DOT, ASM)), input_precision="ieee")
        else:
            s = tl.dot(q, tl.trans(low_nibble(k, DOT, ASM)), input_precision="ieee")
            s = tl.dot(q_high, tl.trans(high_nibble(k, DOT, ASM)), s, input_precision="ieee")
        s = k_scale[None, :] * (s - k_zero[None, :] * q_sum[:, None])
        if K_DOT != DOT:
            s = s * q_scale[:, None]
    if SOFTCAP:
        s = softcap * tanh(s * (scale / softcap)) * LOG2E
    else:
        s = s * (scale * LOG2E)
    if MASK:
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    denominator = denominator * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    if BITS == 0:
        acc = tl.dot(cast(p, DOT), v.to(DOT), acc, input_precision="ieee")
    else:
        weighted = cast(p * v_scale[None, :], DOT)
        zeros = zeros * shrink + tl.sum(weighted.to(tl.float32) * v_zero[None, :], 1)
        if BITS == 8:
            acc = tl.dot(weighted, widen(v, DOT, ASM), acc, input_precision="ieee")
        else:
            acc = tl.dot(weighted, low_nibble(v, DOT, ASM), acc, input_precision="ieee")
            acc_high = tl.dot(weighted, high_nibble(v, DOT, ASM), acc_high * shrink[:, None], input_precision="ieee")
    return acc, acc_high, top, denominator, zeros


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    q,
    k_cache,
    v_cache,
    k_params,
    v_params,
    table,
    items,
    sinks,
    out,
    part_sums,
    part_norms,
    stride_token,
    stride_head,
    table_stride,
    scale,
    softcap,
    window,
    heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DOT: tl.constexpr,
    K_DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Program (item, key head). WIDTH: stored elements of a head (half of them with four bits), COLS >= WIDTH.

    ``k_params``, ``v_params``: int32 views of (scale, zero); ``part_sums`` [parts, heads, ROWS, HEAD_DIM],
    ``part_norms`` [parts, heads, ROWS, 2] float32: sums, then maximum (of log2 weights) and denominator.
    """
    item = items + tl.program_id(0) * 8
    head = tl.program_id(1)
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_row, tokens, first_position = tl.load(item + 1).to(tl.int64), tl.load(item + 2), tl.load(item + 3)
    first_key, end_key, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6).to(tl.int64)
    m_index = tl.arange(0, ROWS)
    token, query_head = m_index // GROUP, head * GROUP + m_index % GROUP
    valid = token < tokens
    position = first_position + token
    column = tl.arange(0, COLS)
    filled = valid[:, None] & (column < WIDTH)[None, :]
    source = ((first_row + token) * stride_token + query_head * stride_head)[:, None] + column[None, :]
    q_tile = tl.load(q + source, mask=filled, other=0.0)
    q_scale = tl.zeros([ROWS], tl.float32)
    if K_DOT != DOT:
        h = q_tile.to(tl.float32)
        q_scale = tl.maximum(tl.max(tl.abs(h), 1), 1e-30)
        q_tile = h / q_scale[:, None]
    q_tile = q_tile.to(K_DOT)
    q_high = q_tile
    if BITS == 4:
        q_high = tl.load(q + source + WIDTH, mask=filled, other=0.0).to(DOT)
    q_sum = tl.zeros([ROWS], tl.float32)
    if BITS != 0:
        q_sum = tl.sum(q_tile.to(tl.float32), 1)
    if BITS == 4:
        q_sum += tl.sum(q_high.to(tl.float32), 1)
    pages = table + sequence.to(tl.int64) * table_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    zeros = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    acc_high = denominator
    if BITS == 4:
        acc_high = tl.zeros([ROWS, COLS], tl.float32)
    begin = first_key // KEYS * KEYS
    plain_end = begin
    if not WINDOW:
        plain_end = tl.minimum(first_position + 1, end_key) // KEYS * KEYS
        for start in range(begin, plain_end, KEYS):
            acc, acc_high, m, denominator, zeros = _tile(
                acc, acc_high, m, denominator, zeros, q_tile, q_high, q_sum, q_scale, position, start, first_key,
                end_key, k_cache, v_cache, k_params, v_params, pages, heads, head, scale, softcap, window,
                WIDTH, COLS, BITS, KEYS, PAGE, False, WINDOW, SOFTCAP, DOT, K_DOT, ASM,
            )  # fmt: skip
    for start in range(plain_end, end_key, KEYS):
        acc, acc_high, m, denominator, zeros = _tile(
            acc, acc_high, m, denominator, zeros, q_tile, q_high, q_sum, q_scale, position, start, first_key, end_key,
            k_cache, v_cache, k_params, v_params, pages, heads, head, scale, softcap, window,
            WIDTH, COLS, BITS, KEYS, PAGE, True, WINDOW, SOFTCAP, DOT, K_DOT, ASM,
        )  # fmt: skip
    if BITS != 0:
        acc -= zeros[:, None]
    if BITS == 4:
        acc_high -= zeros[:, None]
    if part < 0:
        if SINKS:
            sink = tl.load(sinks + query_head, mask=valid, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(m, sink)
            acc *= tl.exp2(m - top)[:, None]
            if BITS == 4:
                acc_high *= tl.exp2(m - top)[:, None]
            denominator = denominator * tl.exp2(m - top) + tl.exp2(sink - top)
        share = 1.0 / tl.where(denominator == 0.0, 1.0, denominator)
        target = ((first_row + token) * (heads * GROUP) + query_head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(out + target, cast(acc * share[:, None], out.dtype.element_ty), mask=filled)
        if BITS == 4:
            tl.store(out + target + WIDTH, cast(acc_high * share[:, None], out.dtype.element_ty), mask=filled)
    else:
        slot = (part * heads + head) * ROWS + m_index
        tl.store(part_sums + slot[:, None] * HEAD_DIM + column[None, :], acc, mask=filled)
        if BITS == 4:
            tl.store(part_sums + slot[:, None] * HEAD_DIM + WIDTH + column[None, :], acc_high, mask=filled)
        tl.store(part_norms + slot * 2, m, mask=valid)
        tl.store(part_norms + slot * 2 + 1, denominator, mask=valid)


@triton.jit
def merge_kernel(
    merges,
    part_sums,
    part_norms,
    sinks,
    out,
    heads,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (token whose keys were cut into ranges, query head): the weighted mean of its partial results."""
    merge = merges + tl.program_id(0) * 4
    query_head = tl.program_id(1)
    row, token = tl.load(merge).to(tl.int64), tl.load(merge + 1)
    first, count = tl.load(merge + 2).to(tl.int64), tl.load(merge + 3)
    column = tl.arange(0, COLS)
    m = tl.full([1], float("-inf"), tl.float32)
    denominator = tl.zeros([1], tl.float32)
    if SINKS:
        m = tl.full([1], 1.0, tl.float32) * tl.load(sinks + query_head).to(tl.float32) * LOG2E
        denominator = tl.full([1], 1.0, tl.float32)
    acc = tl.zeros([COLS], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = part < count
        slot = ((first + part) * heads + query_head // GROUP) * ROWS + token * GROUP + query_head % GROUP
        peaks = tl.load(part_norms + slot * 2, mask=inside, other=float("-inf"))
        weights = tl.load(part_norms + slot * 2 + 1, mask=inside, other=0.0)
        filled = inside[:, None] & (column < HEAD_DIM)[None, :]
        sums = tl.load(part_sums + slot[:, None] * HEAD_DIM + column[None, :], mask=filled, other=0.0)
        top = tl.maximum(m, tl.max(peaks, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        shrink, factor = tl.exp2(m - base), tl.exp2(peaks - base)
        acc = acc * shrink + tl.sum(sums * factor[:, None], 0)
        denominator = denominator * shrink + tl.sum(weights * factor, 0)
        m = top
    result = acc / tl.where(denominator == 0.0, 1.0, denominator)
    target = (row * (heads * GROUP) + query_head) * HEAD_DIM + column
    tl.store(
        out + target,
        cast(result, out.dtype.element_ty),
        mask=(column < HEAD_DIM) & (tl.full([COLS], 0, tl.int32) < count),
    )


@triton.jit
def turn_kernel(
    q, out, stride_token, stride_head, heads, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS query heads of one token, turned by the Hadamard matrix that four-bit keys were stored with."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (i < HEAD_DIM)
    h = tl.load(q + token * stride_token + head * stride_head + i, mask=mask, other=0.0).to(tl.float32)
    turned = hadamard(h, HEADS, WIDTH, BLOCK)
    tl.store(out + (token * heads + head) * HEAD_DIM + i, cast(turned, out.dtype.element_ty), mask=mask)


def _turn(q: Tensor) -> Tensor:
    tokens, heads, dim = q.shape
    out, width = torch.empty(q.shape, dtype=q.dtype, device=q.device), power_of_2(dim)
    block = min(power_of_2(heads), max(1, 1024 // width))
    launch(
        turn_kernel,
        (tokens, triton.cdiv(heads, block)),
        q,
        out,
        q.stride(0),
        q.stride(1),
        heads,
        warps=4,
        HEAD_DIM=dim,
        WIDTH=width,
        HEADS=block,
        BLOCK=dim & -dim,
    )
    return out


def _rows(kind: str, group: int, dim: int, bits: int, q: Tensor) -> int:
    """Rows of a tile."""
    if q.dtype == torch.float32:  # no tensor cores: for parity alone
        return max(16, power_of_2(group))
    large = 64 if dim > 128 or (bits == 8 and capability_of(q.device) < 90) else 128
    return max({"decode": 16, "mixed": min(64, large), "prefill": large}[kind], power_of_2(group))


def _choice(kind: str, rows: int, dim: int, bits: int, q: Tensor) -> dict[str, int]:
    """Keys a tile, warps and stages.

    The block table's entry and the products take stages of the pipeline too: with three stages more than tiles, n tiles
    of keys are on their way at once, as many as leave room for a second block on the multiprocessor, at most 3.
    """
    hopper = capability_of(q.device) >= 90
    wide = dim > 128 or q.dtype == torch.float32
    short = not hopper and (kind != "decode" or (bits and dim == 64))  # 64 keys would not fit the registers
    padded = bits == 8 and dim < power_of_2(dim)
    keys = 32 if wide or short or padded else 64
    large = rows >= 128 or rows * power_of_2(dim) >= 1 << 14 or (bits == 8 and rows == 64 and not hopper)
    default = {"keys": keys, "warps": 8 if large else 4}
    found = tuned("attend_kernel", f"{kind}-{dim}-{bits}", default, q.device)
    element = q.element_size() if bits == 0 else bits / 8
    stage = int(2 * found["keys"] * power_of_2(dim) * element)
    room = shared_limit(capability_of(q.device)) // (2 if kind == "decode" else 1) - rows * power_of_2(dim) * 4
    found.setdefault(
        "stages", 3 + max(1, min(3, room // stage)) if kind == "decode" else 2 + max(1, min(2, room // stage))
    )
    return found


@reference.paged_attention.register(
    "triton", devices=("cuda",), dtypes=FLOATS, unsupported=needs(80, head_dim_reason), plan=make_plan
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: np.ndarray,
    cu_seqlens: np.ndarray,
    seq_lens: np.ndarray,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """See the module. One launch, one more where ranges are merged, one more to turn queries for a four-bit cache."""
    if plan is None:
        plan = make_plan(block_table, cu_seqlens, seq_lens, k_cache.shape[1], k_cache.shape[0], window, q.device)
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    q = _turn(q) if bits == 4 else q if q.stride(2) == 1 else q.contiguous()
    heads, dim, kv_heads, page = q.shape[1], q.shape[2], k_cache.shape[2], k_cache.shape[1]
    group = heads // kv_heads
    tiles = plan.tiles(group, bits, lambda kind: _rows(kind, group, dim, bits, q))
    choice = _choice(tiles.kind, tiles.block_rows, dim, bits, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = (tiles.parts, kv_heads, tiles.block_rows)
    sums = torch.empty(*shape, dim, dtype=torch.float32, device=q.device) if tiles.parts else None
    norms = torch.empty(*shape, 2, dtype=torch.float32, device=q.device) if tiles.parts else None
    width, dot = dim // 2 if bits == 4 else dim, dot_dtype(q.dtype)
    launch(
        attend_kernel,
        (tiles.items.shape[0], kv_heads),
        q,
        k_cache,
        v_cache,
        _as_int32(k_params),
        _as_int32(v_params),
        plan.table,
        tiles.items,
        sinks,
        out,
        sums if sums is not None else torch.empty(0, dtype=torch.float32, device=q.device),
        norms if norms is not None else torch.empty(0, dtype=torch.float32, device=q.device),
        q.stride(0),
        q.stride(1),
        plan.table.shape[1],
        scale,
        0.0 if softcap is None else softcap,
        0 if window is None else window,
        warps=choice["warps"],
        stages=choice["stages"],
        heads=kv_heads,
        HEAD_DIM=dim,
        GROUP=group,
        WIDTH=width,
        COLS=max(16, power_of_2(width)),
        BITS=bits,
        ROWS=tiles.block_rows,
        KEYS=choice["keys"],
        PAGE=page,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        DOT=dot,
        K_DOT=tl.float16 if bits == 8 and q.dtype == torch.bfloat16 and dim <= 128 else dot,
        ASM=not INTERPRETED,
    )
    _merge(out, tiles, sums, norms, sinks, kv_heads)
    return out


def _as_int32(params: Tensor | None) -> Tensor | None:
    return None if params is None else params.view(torch.int32)


def _merge(out: Tensor, tiles: Tiles, sums: Any, norms: Any, sinks: Tensor | None, kv_heads: int) -> None:
    heads, dim = out.shape[1:]
    launch(
        merge_kernel,
        (tiles.merges.shape[0], heads),
        tiles.merges,
        sums,
        norms,
        sinks,
        out,
        kv_heads,
        warps=4,
        HEAD_DIM=dim,
        GROUP=heads // kv_heads,
        COLS=power_of_2(dim),
        ROWS=tiles.block_rows,
        PARTS=16,
        SINKS=sinks is not None,
    )
