"""The kernel of paged attention: a tile of queries walks over a range of keys; prompts and decoding alike."""

from __future__ import annotations

import triton
import triton.language as tl

from ..cache.pairs import HIGH_NIBBLES
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
    PAIRS: tl.constexpr,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """(tiles, sum [ROWS], scale [ROWS]) of the queries. Tiles [ROWS, COLS]: four in form int4, else one; with PAIRS of
    each the even columns, then the odd ones.

    SCALED: the largest of a row becomes 1, since DOT has less range than the queries, and ``scale`` gives it back.
    """
    column = tl.arange(0, COLS * 2 if PAIRS else COLS)
    at = q + source[:, None] + column[None, :]
    filled = valid[:, None] & (column < WIDTH)[None, :]
    first = tl.load(at, mask=filled, other=0.0)
    second, third, fourth = first, first, first
    if FORM == "int4":
        second = tl.load(at + WIDTH, mask=filled, other=0.0)
        third = tl.load(at + 2 * WIDTH, mask=filled, other=0.0)
        fourth = tl.load(at + 3 * WIDTH, mask=filled, other=0.0)
    scale = tl.zeros([ROWS], tl.float32)
    if SCALED:
        top = tl.abs(first.to(tl.float32))
        if FORM == "int4":
            others = tl.maximum(tl.abs(third.to(tl.float32)), tl.abs(fourth.to(tl.float32)))
            top = tl.maximum(tl.maximum(top, tl.abs(second.to(tl.float32))), others)
        scale = tl.maximum(tl.max(top, 1), 1e-30)
        inverse = (1.0 / scale)[:, None]  # rounds some queries otherwise than a quotient would, by 2^-24 of them
        first, second = first.to(tl.float32) * inverse, second.to(tl.float32) * inverse
        third, fourth = third.to(tl.float32) * inverse, fourth.to(tl.float32) * inverse
    first, second, third, fourth = first.to(DOT), second.to(DOT), third.to(DOT), fourth.to(DOT)
    total = scale
    if FORM == "int8":
        total = tl.sum(first.to(tl.float32), 1)
    elif FORM == "int4":
        one, two = first.to(tl.float32) + second.to(tl.float32), third.to(tl.float32) + fourth.to(tl.float32)
        total = tl.sum(one + two, 1)
    if FORM == "int4" and PAIRS:
        a, b = even_and_odd(first, ROWS, COLS)
        c, d = even_and_odd(second, ROWS, COLS)
        e, f = even_and_odd(third, ROWS, COLS)
        g, h = even_and_odd(fourth, ROWS, COLS)
        return (a, b, c, d, e, f, g, h), total, scale
    elif FORM == "int4":
        return (first, second, third, fourth), total, scale
    elif PAIRS:
        return even_and_odd(first, ROWS, COLS), total, scale
    else:
        return (first,), total, scale


@triton.jit
def tiles(x, COUNT: tl.constexpr):
    """A tuple of ``x``, COUNT times: 1, 2 or 4."""
    if COUNT == 1:
        return (x,)
    elif COUNT == 2:
        return x, x
    else:
        return x, x, x, x


@triton.jit
def even_and_odd(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The even columns and the odd ones of ``x`` [ROWS, 2·COLS]."""
    return tl.split(tl.reshape(x, [ROWS, COLS, 2]))


@triton.jit
def in_order(acc, zeros, v_scale, FORM: tl.constexpr, PAIRS: tl.constexpr):
    """What ``fold`` leaves in ``acc``, as sums of values with their columns in order: in form int4 the low and the high
    half of the head, else all of it (the second of the two means nothing). ``zeros`` [ROWS] is to be subtracted;
    ``v_scale``: see ``attend_kernel``.
    """
    low, high = acc[0], acc[0]
    if FORM == "int4" and PAIRS:
        low, high = tl.interleave(acc[0], acc[1]), tl.interleave(acc[2], acc[3])
    elif FORM == "int4":
        high = acc[1]
    elif PAIRS:
        low = tl.interleave(acc[0], acc[1])
    if FORM == "int8" or FORM == "int4":
        low = low * v_scale - zeros[:, None]
        high = high * (v_scale / HIGH_NIBBLES if PAIRS else v_scale) - zeros[:, None]
    elif FORM != "float":
        low *= v_scale
    return low, high


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
    zero_unit,
    softcap,
    slope_scale,
    window,
    heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRS: tl.constexpr,
    LAZY: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    TURN: tl.constexpr,
):
    """Program (item, key head); heads of one item run together, since they share the cache lines of ``k_params``.
    K_COLS, V_COLS: powers of two that hold a quarter and half of the head in form int4, else all of it; with PAIRS
    (caches of codes seen as int16, see ``pairs``) half of that. LAZY: see ``joined``.
    ``zero_unit``: what codes of keys are too small by in the product, 1 but with PAIRS. ``v_scale``: what values are
    multiplied by (that of the keys is in ``scale``). TOGETHER: tokens of a tile that begins at a multiple of them,
    though the first may be there already; 1 for others.

    ``k_params``, ``v_params``: int32 views of (scale, zero); ``part_sums`` [parts, heads, ROWS, HEAD_DIM],
    ``part_norms`` [parts, heads, ROWS, 2] float32: sums, then maximum (of log2 weights) and denominator.
    """
    item = items + tl.program_id(0) // heads * 8
    head = tl.program_id(0) % heads
    sequence = tl.load(item)
    first_row, tokens, first_position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_key, end_key = tl.load(item + 4), tl.load(item + 5)
    if ROWS < 64:
        part = tl.load(item + 6).to(tl.int64)
    if sequence < 0:
        return
    m_index = tl.arange(0, ROWS)
    token, query_head = m_index // GROUP, head * GROUP + m_index % GROUP
    valid = token < tokens
    position = first_position + token
    K_WIDTH: tl.constexpr = HEAD_DIM // 4 if FORM == "int4" else HEAD_DIM
    source = (first_row + token).to(tl.int64) * stride_token + query_head * stride_head
    q_tiles, q_sum, q_scale = _queries(q, source, valid, ROWS, K_WIDTH, K_COLS, FORM, PAIRS, K_DOT, SCALED)
    q_sum *= zero_unit
    pages = table + sequence.to(tl.int64) * table_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS, KEYS // LAZY] if LAZY else [ROWS], tl.float32)
    zeros = denominator
    acc = tiles(tl.zeros([ROWS, V_COLS], tl.float32), (2 if FORM == "int4" else 1) * (2 if PAIRS else 1))
    newest = position // BLOCK * BLOCK + BLOCK - 1
    oldest = position
    if CHUNK > 0:
        oldest = position // CHUNK * CHUNK
    slope = q_sum
    if ALIBI != "none":
        slope = tl.load(slopes + query_head)
    begin = first_key // KEYS * KEYS
    plain_end = begin
    if not WINDOW:
        # of fused multiplications and additions the compiler makes others in a loop with a mask: which keys it has may
        # not depend on which of a tile's tokens come together
        border = first_position // TOGETHER * TOGETHER
        plain_end = tl.minimum(border // BLOCK * BLOCK + BLOCK, end_key) // KEYS * KEYS
        for start in range(begin, plain_end, KEYS):
            acc, m, denominator, zeros = fold(
                acc, m, denominator, zeros, q_tiles, q_sum, q_scale, position, oldest, newest, start,
                first_key, end_key, k_cache, v_cache, k_params, v_params, pages, heads, head, scale, softcap, slope,
                slope_scale, window, HEAD_DIM, K_COLS, V_COLS, FORM, PAIRS, KEYS, PAGE, False, WINDOW, CHUNK, ALIBI,
                SOFTCAP, K_DOT, V_DOT, SCALED, ASM, TURN, LAZY,
            )  # fmt: skip
    if plain_end < end_key:  # spares decoding the loads that begin a loop
        for start in range(plain_end, end_key, KEYS):
            acc, m, denominator, zeros = fold(
                acc, m, denominator, zeros, q_tiles, q_sum, q_scale, position, oldest, newest, start,
                first_key, end_key, k_cache, v_cache, k_params, v_params, pages, heads, head, scale, softcap, slope,
                slope_scale, window, HEAD_DIM, K_COLS, V_COLS, FORM, PAIRS, KEYS, PAGE, True, WINDOW, CHUNK, ALIBI,
                SOFTCAP, K_DOT, V_DOT, SCALED, ASM, TURN, LAZY,
            )  # fmt: skip
    if LAZY:
        denominator, zeros = tl.sum(denominator, 1), tl.sum(zeros, 1)
    low, high = in_order(acc, zeros, v_scale, FORM, PAIRS)
    COLS: tl.constexpr = V_COLS * 2 if PAIRS else V_COLS
    if ROWS >= 64:  # not before: loops of many rows want the registers
        part = tl.load(item + 6).to(tl.int64)
    if part < 0:
        first = (first_row + token).to(tl.int64) * (heads * GROUP) + query_head
        write_result(out, sinks, low, high, m, denominator, first, query_head, valid, HEAD_DIM, COLS, FORM, SINKS)
    else:
        first = (part * heads + head) * ROWS + m_index
        write_part(part_sums, part_norms, low, high, m, denominator, first, valid, HEAD_DIM, COLS, FORM)
