"""The kernel of latent attention: some query heads of a tile of tokens walk over a range of rows, each key and value.

A row has the latent, then the key that turns with the position. Its latent is loaded once and goes into both products
(DeepSeek-V2, 2024, in the absorbed form). Heads beyond what the registers hold are other programs' (``GROUP`` each),
which find the rows in the second-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cache.cache_codes import float8
from ..cache.pairs import numbers
from ..codes import cast, widen
from .kernel import even_and_odd, in_order, tiles, write_part, write_result
from .tile import LOG2E, key_columns, key_scale_and_zero, key_slots, softmax_step, weighed


@triton.jit
def _queries(
    q,
    source,
    valid,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    R_COLS: tl.constexpr,
    T_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """(the absorbed part, what turns, sum [ROWS], scale [ROWS]) of the queries. The first two are a tile [ROWS, R_COLS]
    or [ROWS, T_COLS], with PAIRS their even columns, then their odd ones.

    SCALED: the largest of a row becomes 1, since DOT has less range than the queries, and ``scale`` gives it back.
    """
    TIMES: tl.constexpr = 2 if PAIRS else 1
    i, j = tl.arange(0, TIMES * R_COLS), tl.arange(0, TIMES * T_COLS)
    at = q + source[:, None]
    inner = tl.load(at + i[None, :], mask=valid[:, None] & (i < RANK)[None, :], other=0.0)
    turned = tl.load(at + RANK + j[None, :], mask=valid[:, None] & (j < ROPE)[None, :], other=0.0)
    scale = tl.zeros([ROWS], tl.float32)
    if SCALED:
        wide, narrow = inner.to(tl.float32), turned.to(tl.float32)
        scale = tl.maximum(tl.maximum(tl.max(tl.abs(wide), 1), tl.max(tl.abs(narrow), 1)), 1e-30)
        inner, turned = wide / scale[:, None], narrow / scale[:, None]
    inner, turned = inner.to(DOT), turned.to(DOT)
    total = tl.sum(inner.to(tl.float32), 1) + tl.sum(turned.to(tl.float32), 1)
    if PAIRS:
        return even_and_odd(inner, ROWS, R_COLS), even_and_odd(turned, ROWS, T_COLS), total, scale
    else:
        return (inner,), (turned,), total, scale


@triton.jit
def _numbers(x, FORM: tl.constexpr, ODD: tl.constexpr, PAIRS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):
    """What lies in the cache as DOT, numbers or codes; with PAIRS the even columns or the ODD ones of int16."""
    if PAIRS:
        return numbers(x, FORM, ODD, ASM)
    elif FORM == "int8":
        return widen(x, DOT, ASM)
    elif FORM != "float":
        return float8(x, FORM, DOT, ASM)
    else:
        return x.to(DOT)


@triton.jit
def _fold(
    acc,
    m,
    denominator,
    zeros,
    q,
    q_turned,
    q_sum,
    q_scale,
    position,
    start,
    first_key,
    end_key,
    cache,
    params,
    pages,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    R_COLS: tl.constexpr,
    T_COLS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    MASK: tl.constexpr,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    LAZY: tl.constexpr,
):
    """(acc, m, denominator, zeros) after the KEYS rows from ``start``; see ``tile.fold``."""
    key = start + tl.arange(0, KEYS)
    inside = (key >= first_key) & (key < end_key)
    first, row = key_slots(pages, start, key, inside, KEYS, PAGE, MASK)
    if not PAIRS:  # the registers would not do for two blocks
        first, row = 0, first + row
    WORDS: tl.constexpr = 2 if PAIRS else 1
    at = cache + first * ((RANK + ROPE) // WORDS) + row * ((RANK + ROPE) // WORDS)
    latent = key_columns(at, inside, RANK // WORDS, R_COLS, MASK)
    turned = key_columns(at + RANK // WORDS, inside, ROPE // WORDS, T_COLS, MASK)
    even = _numbers(latent, FORM, False, PAIRS, DOT, ASM)
    s = tl.dot(q[0], tl.trans(even), input_precision="ieee")
    s = tl.dot(q_turned[0], tl.trans(_numbers(turned, FORM, False, PAIRS, DOT, ASM)), s, input_precision="ieee")
    if PAIRS:
        s = tl.dot(q[1], tl.trans(_numbers(latent, FORM, True, PAIRS, DOT, ASM)), s, input_precision="ieee")
        s = tl.dot(q_turned[1], tl.trans(_numbers(turned, FORM, True, PAIRS, DOT, ASM)), s, input_precision="ieee")
    if FORM == "int8":
        unit, zero = key_scale_and_zero(params + first, row, inside, MASK)
        s = unit[None, :] * (s - zero[None, :] * q_sum[:, None])
    if SCALED:
        s = s * ((q_scale * scale) * LOG2E)[:, None]
    else:
        s = s * (scale * LOG2E)
    if MASK:
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
    m, shrink, p, denominator = softmax_step(s, m, denominator, LAZY)
    if FORM == "int8":
        weighted, zeros = weighed(p, shrink, zeros, unit, zero, DOT, LAZY)
    else:
        weighted = cast(p, DOT)
    by = shrink[:, None]
    a = tl.dot(weighted, even, acc[0] * by, input_precision="ieee")
    if PAIRS:
        b = tl.dot(weighted, _numbers(latent, FORM, True, PAIRS, DOT, ASM), acc[1] * by, input_precision="ieee")
        return (a, b), m, denominator, zeros
    else:
        return (a,), m, denominator, zeros


@triton.jit(do_not_specialize=["table_stride"])
def latent_kernel(
    q,
    cache,
    row_params,  # Triton has a name of its own for params
    table,
    items,
    out,
    part_sums,
    part_norms,
    stride_token,
    stride_head,
    table_stride,
    scale,
    unit,
    zero_unit,
    blocks: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    R_COLS: tl.constexpr,
    T_COLS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRS: tl.constexpr,
    LAZY: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
):
    """Program (item, one of ``blocks`` blocks of GROUP query heads); blocks of one item run together, so that all but
    the first find its rows in the second-level cache. R_COLS, T_COLS: powers of two that hold RANK and
    ROPE, with PAIRS half of them (see ``attend_kernel``). ``unit``: what the numbers of the cache are multiplied by in
    the result (in ``scale`` too); ``zero_unit``: see ``attend_kernel``.

    ``row_params``, ``part_sums`` [parts, blocks, ROWS, RANK], ``part_norms``: see ``attend_kernel``.
    """
    item = items + tl.program_id(0) // blocks * 8
    block = tl.program_id(0) % blocks
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_row, tokens, first_position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_key, end_key, part = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6).to(tl.int64)
    m_index = tl.arange(0, ROWS)
    token, head = m_index // GROUP, block * GROUP + m_index % GROUP
    valid = token < tokens
    position = first_position + token
    source = (first_row + token).to(tl.int64) * stride_token + head * stride_head
    inner, turned, q_sum, q_scale = _queries(q, source, valid, RANK, ROPE, R_COLS, T_COLS, ROWS, PAIRS, DOT, SCALED)
    q_sum *= zero_unit
    pages = table + sequence.to(tl.int64) * table_stride
    m = tl.full([ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([ROWS, KEYS // LAZY] if LAZY else [ROWS], tl.float32)
    zeros = denominator
    acc = tiles(tl.zeros([ROWS, R_COLS], tl.float32), 2 if PAIRS else 1)
    begin = first_key // KEYS * KEYS
    plain_end = tl.minimum(first_position + 1, end_key) // KEYS * KEYS
    for start in range(begin, plain_end, KEYS):
        acc, m, denominator, zeros = _fold(
            acc, m, denominator, zeros, inner, turned, q_sum, q_scale, position, start, first_key, end_key,
            cache, row_params, pages, scale, RANK, ROPE, R_COLS, T_COLS, FORM, PAIRS, KEYS, PAGE, False, DOT, SCALED,
            ASM, LAZY,
        )  # fmt: skip
    if plain_end < end_key:
        for start in range(plain_end, end_key, KEYS):
            acc, m, denominator, zeros = _fold(
                acc, m, denominator, zeros, inner, turned, q_sum, q_scale, position, start, first_key, end_key,
                cache, row_params, pages, scale, RANK, ROPE, R_COLS, T_COLS, FORM, PAIRS, KEYS, PAGE, True, DOT, SCALED,
                ASM, LAZY,
            )  # fmt: skip
    if LAZY:
        denominator, zeros = tl.sum(denominator, 1), tl.sum(zeros, 1)
    sums, _ = in_order(acc, zeros, unit, FORM, PAIRS)
    COLS: tl.constexpr = 2 * R_COLS if PAIRS else R_COLS
    if part < 0:
        out += first_row.to(tl.int64) * (blocks * GROUP * RANK)
        row = token * (blocks * GROUP) + head
        write_result(out, None, sums, denominator, m, denominator, row, head, valid, RANK, COLS, FORM, False)
    else:
        first = (part * blocks + block) * ROWS
        part_sums += first * RANK
        part_norms += first * 2
        write_part(part_sums, part_norms, sums, denominator, m, denominator, m_index, valid, RANK, COLS, FORM)
