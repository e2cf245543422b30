"""The kernel of paged attention: a tile of queries walks over a range of keys; prompts and decoding alike."""

from __future__ import annotations

import triton
import triton.language as tl

from ..codes import cast
from .tile import LOG2E, fold


@triton.jit
def _queries(
    q,
    source,
    valid,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """(tiles [ROWS, COLS], sum [ROWS], scale [ROWS]) of the queries: four tiles in form int4, else one.

    SCALED: the largest of a row becomes 1, since DOT has less range than the queries, and ``scale`` gives it back.
    """
    column = tl.arange(0, COLS)
    at = q + source[:, None] + column[None, :]
    filled = valid[:, None] & (column < WIDTH)[None, :]
    first = tl.load(at, mask=filled, other=0.0)
    scale = tl.zeros([ROWS], tl.float32)
    if SCALED:
        h = first.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(h), 1), 1e-30)
        first = h / scale[:, None]
    first = first.to(DOT)
    total = tl.zeros([ROWS], tl.float32)
    if FORM == "int8" or FORM == "int4":
        total = tl.sum(first.to(tl.float32), 1)
    if FORM == "int4":
        second = tl.load(at + WIDTH, mask=filled, other=0.0).to(DOT)
        third = tl.load(at + 2 * WIDTH, mask=filled, other=0.0).to(DOT)
        fourth = tl.load(at + 3 * WIDTH, mask=filled, other=0.0).to(DOT)
        total += tl.sum(second.to(tl.float32), 1) + tl.sum(third.to(tl.float32), 1)
        total += tl.sum(fourth.to(tl.float32), 1)
        return (first, second, third, fourth), total, scale
    else:
        return (first,), total, scale


@triton.jit
def _store(out, row, x, x_high, valid, HEAD_DIM: tl.constexpr, COLS: tl.constexpr, FORM: tl.constexpr):
    """Rows of HEAD_DIM elements, in form int4 given as two halves."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if FORM == "int4" else HEAD_DIM
    column = tl.arange(0, COLS)
    filled = valid[:, None] & (column < WIDTH)[None, :]
    at = out + row[:, None] * HEAD_DIM + column[None, :]
    tl.store(at, cast(x, out.dtype.element_ty), mask=filled)
    if FORM == "int4":
        tl.store(at + WIDTH, cast(x_high, out.dtype.element_ty), mask=filled)


@triton.jit
def write_result(
    out,
    sinks,
    acc,
    acc_high,
    m,
    denominator,
    row,
    query_head,
    valid,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The result of rows whose keys are all folded in; their sinks join the denominator."""
    shrink = denominator * 0.0 + 1.0
    if SINKS:
        sink = tl.load(sinks + query_head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        denominator = denominator * shrink + tl.exp2(sink - top)
    share = (shrink / tl.where(denominator == 0.0, 1.0, denominator))[:, None]
    high = acc_high
    if FORM == "int4":
        high = acc_high * share
    _store(out, row, acc * share, high, valid, HEAD_DIM, COLS, FORM)


@triton.jit
def write_part(
    sums,
    norms,
    acc,
    acc_high,
    m,
    denominator,
    row,
    valid,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
):
    """A range's partial result."""
    _store(sums, row, acc, acc_high, valid, HEAD_DIM, COLS, FORM)
    tl.store(norms + row * 2, m, mask=valid)
    tl.store(norms + row * 2 + 1, denominator, mask=valid)


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
    slopes,
    out,
    part_sums,
    part_norms,
    stride_token,
    stride_head,
    table_stride,
    scale,
    v_scale,
    softcap,
    slope_scale,
    window,
    heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    TURN: tl.constexpr,
):
    """Program (item, key head). K_COLS, V_COLS: powers of two that hold a quarter and half of the head in form int4,
    else all of it. ``v_scale``: what the values of a float8 cache are multiplied by (that of the keys is in ``scale``).

    ``k_params``, ``v_params``: int32 views of (scale, zero); ``part_sums`` [parts, heads, ROWS, HEAD_DIM],
    ``part_norms`` [parts, heads, ROWS, 2] float32: sums, then maximum (of log2 weights) and denominator.
    """
    item = items + tl.program_id(0) * 8
    head = tl.program_id(1)
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_row, tokens, first_position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_key, end_key, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6).to(tl.int64)
    m_index = tl.arange(0, ROWS)
    token, query_head = m_index // GROUP, head * GROUP + m_index % GROUP
    valid = token < tokens
    position = first_position + token
    K_WIDTH: tl.constexpr = HEAD_DIM // 4 if FORM == "int4" else HEAD_DIM
    source = (first_row + token).to(tl.int64) * stride_token + query_head * stride_head
    q_tiles, q_sum, q_scale = _queries(q, source, valid, ROWS, K_WIDTH, K_COLS, FORM, K_DOT, SCALED)
    pages = table + sequence.to(tl.int64) * table_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    zeros = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V_COLS], tl.float32)
    acc_high = denominator
    if FORM == "int4":
        acc_high = tl.zeros([ROWS, V_COLS], tl.float32)
    newest = position // BLOCK * BLOCK + BLOCK - 1
    oldest = position
    if CHUNK > 0:
        oldest = position // CHUNK * CHUNK
    slope = zeros
    if ALIBI != "none":
        slope = tl.load(slopes + query_head)
    begin = first_key // KEYS * KEYS
    plain_end = begin
    if not WINDOW:
        plain_end = tl.minimum(first_position // BLOCK * BLOCK + BLOCK, end_key) // KEYS * KEYS
        for start in range(begin, plain_end, KEYS):
            acc, acc_high, m, denominator, zeros = fold(
                acc, acc_high, m, denominator, zeros, q_tiles, q_sum, q_scale, position, oldest, newest, start,
                first_key, end_key, k_cache, v_cache, k_params, v_params, pages, heads, head, scale, softcap, slope,
                slope_scale, window, HEAD_DIM, K_COLS, V_COLS, FORM, KEYS, PAGE, False, WINDOW, CHUNK, ALIBI, SOFTCAP,
                K_DOT, V_DOT, SCALED, ASM, TURN,
            )  # fmt: skip
    for start in range(plain_end, end_key, KEYS):
        acc, acc_high, m, denominator, zeros = fold(
            acc, acc_high, m, denominator, zeros, q_tiles, q_sum, q_scale, position, oldest, newest, start,
            first_key, end_key, k_cache, v_cache, k_params, v_params, pages, heads, head, scale, softcap, slope,
            slope_scale, window, HEAD_DIM, K_COLS, V_COLS, FORM, KEYS, PAGE, True, WINDOW, CHUNK, ALIBI, SOFTCAP,
            K_DOT, V_DOT, SCALED, ASM, TURN,
        )  # fmt: skip
    if FORM == "int8" or FORM == "int4":
        acc -= zeros[:, None]
    elif FORM != "float":
        acc *= v_scale
    if FORM == "int4":
        acc_high -= zeros[:, None]
    if part < 0:
        first = (first_row + token).to(tl.int64) * (heads * GROUP) + query_head
        write_result(out, sinks, acc, acc_high, m, denominator, first, query_head, valid, HEAD_DIM, V_COLS, FORM, SINKS)
    else:
        first = (part * heads + head) * ROWS + m_index
        write_part(part_sums, part_norms, acc, acc_high, m, denominator, first, valid, HEAD_DIM, V_COLS, FORM)
