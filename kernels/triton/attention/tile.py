"""One tile of keys folded into a running softmax (Dao et al., "FlashAttention", 2022).

Codes go into the products as they are: s = scale_k·(q·code - zero_k·sum(q)) and o = sum(p·scale_v·code) -
sum(p·scale_v·zero_v), so that scales and zeros cost once a key rather than once an element. Six-bit keys are read as
four quarters of the head, four-bit values as two halves, each with a product of its own. The factor of float8 is the
caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cache.cache_codes import float8, six_bits, unpacked_here
from ..codes import cast, exact_float, high_nibble, low_nibble, scale_and_zero, widen
from ..elementwise.activation import tanh

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_slots(pages, start, key, inside, KEYS: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr):
    """int64 slots of the KEYS keys from ``start``."""
    if PAGE % KEYS == 0:
        return tl.load(pages + start // PAGE).to(tl.int64) * PAGE + start % PAGE + tl.arange(0, KEYS)
    elif MASK:
        return tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
    else:
        return tl.load(pages + key // PAGE).to(tl.int64) * PAGE + key % PAGE


@triton.jit
def key_columns(at, inside, WIDTH: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr):
    """[KEYS, COLS] of the WIDTH elements from ``at``, a pointer a key; what is not there is 0."""
    column = tl.arange(0, COLS)
    if MASK:
        return tl.load(at[:, None] + column[None, :], mask=inside[:, None] & (column < WIDTH)[None, :], other=0)
    elif COLS != WIDTH:
        return tl.load(at[:, None] + column[None, :], mask=(column < WIDTH)[None, :], other=0)
    else:
        return tl.load(at[:, None] + column[None, :])


@triton.jit
def key_scale_and_zero(params, row, inside, MASK: tl.constexpr):
    """(scale, zero) of the rows, float32 [KEYS]; 0 where there are none."""
    if MASK:
        return scale_and_zero(tl.load(params + row, mask=inside, other=0))
    else:
        return scale_and_zero(tl.load(params + row))


@triton.jit
def _scores(
    q,
    q_sum,
    q_scale,
    cache,
    params,
    row,
    inside,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
    MASK: tl.constexpr,
    DOT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
):
    """q·k [ROWS, KEYS] in float32; ``q``: the tile of queries, in form int4 its four quarters."""
    if FORM == "int4":
        QUARTER: tl.constexpr = HEAD_DIM // 4
        at = cache + row * (3 * QUARTER)
        first = key_columns(at, inside, QUARTER, COLS, MASK)
        second = key_columns(at + QUARTER, inside, QUARTER, COLS, MASK)
        high = key_columns(at + 2 * QUARTER, inside, QUARTER, COLS, MASK)
        s = tl.dot(q[0], tl.trans(six_bits(first, high, 0, DOT, ASM)), input_precision="ieee")
        s = tl.dot(q[1], tl.trans(six_bits(second, high, 1, DOT, ASM)), s, input_precision="ieee")
        s = tl.dot(q[2], tl.trans(six_bits(first, high, 2, DOT, ASM)), s, input_precision="ieee")
        s = tl.dot(q[3], tl.trans(six_bits(second, high, 3, DOT, ASM)), s, input_precision="ieee")
    else:
        k = key_columns(cache + row * HEAD_DIM, inside, HEAD_DIM, COLS, MASK)
        if FORM == "int8":
            k = widen(k, DOT, ASM)
        elif FORM == "e4m3" or FORM == "e5m2":
            k = float8(k, FORM, DOT, ASM)
        s = tl.dot(q[0], tl.trans(k.to(DOT)), input_precision="ieee")
    if FORM == "int8" or FORM == "int4":
        scale, zero = key_scale_and_zero(params, row, inside, MASK)
        s = scale[None, :] * (s - zero[None, :] * q_sum[:, None])
    if SCALED:
        s = s * q_scale[:, None]
    return s


@triton.jit
def _add_values(
    acc,
    acc_high,
    zeros,
    p,
    shrink,
    cache,
    params,
    row,
    inside,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
    MASK: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    TURN: tl.constexpr,
):
    """(acc, acc_high, zeros) after the values of a tile, weighed by ``p`` [ROWS, KEYS]; see ``fold``."""
    if FORM == "int8" or FORM == "int4":
        scale, zero = key_scale_and_zero(params, row, inside, MASK)
        weighted = cast(p * scale[None, :], DOT)
        zeros = zeros * shrink + tl.sum(weighted.to(tl.float32) * zero[None, :], 1)
    else:
        weighted = cast(p, DOT)
    acc = acc * shrink[:, None]
    if FORM == "int4":
        HALF: tl.constexpr = HEAD_DIM // 2
        v = key_columns(cache + row * HALF, inside, HALF, COLS, MASK)
        low, high = unpacked_here(low_nibble(v, DOT, ASM), TURN), unpacked_here(high_nibble(v, DOT, ASM), TURN)
        acc = tl.dot(weighted, low, acc, input_precision="ieee")
        acc_high = tl.dot(weighted, high, acc_high * shrink[:, None], input_precision="ieee")
    else:
        v = key_columns(cache + row * HEAD_DIM, inside, HEAD_DIM, COLS, MASK)
        if FORM == "int8":
            v = unpacked_here(widen(v, DOT, ASM), TURN and HEAD_DIM > 64)  # short heads would spill registers
        elif FORM == "e4m3" or FORM == "e5m2":
            v = unpacked_here(float8(v, FORM, DOT, ASM), TURN)
        acc = tl.dot(weighted, v.to(DOT), acc, input_precision="ieee")
    return acc, acc_high, zeros


@triton.jit
def _raised(slope, scale, key, position, ALIBI: tl.constexpr):
    """What ALiBi adds to the scores [ROWS, KEYS], 0 near a row's position; see ``reference.attention.raised``."""
    at, behind = exact_float(position), exact_float(key)
    if ALIBI == "exact":
        return scale * slope[:, None] * (behind[None, :] - at[:, None])
    else:
        rounded = cast(slope[:, None] * cast(behind, tl.bfloat16).to(tl.float32)[None, :], tl.bfloat16)
        return scale * (rounded.to(tl.float32) - (slope * at)[:, None])


@triton.jit
def fold(
    acc,
    acc_high,
    m,
    denominator,
    zeros,
    q,
    q_sum,
    q_scale,
    position,
    oldest,
    newest,
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
    slope,
    slope_scale,
    window,
    HEAD_DIM: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    FORM: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    TURN: tl.constexpr,
):
    """Fold KEYS keys from ``start`` into the running sums. MASK: some of them may not be seen by every row.

    ``acc`` [ROWS, V_COLS]: weighted codes, in form int4 of the first half of the head, ``acc_high`` of the second;
    ``zeros`` [ROWS]: the weighted zeros to be subtracted from both; ``m``, ``denominator``: of weights in powers of 2.
    ``oldest``, ``newest`` [ROWS]: keys that a row sees, the former with CHUNK alone.
    """
    key = start + tl.arange(0, KEYS)
    inside = (key >= first_key) & (key < end_key)
    row = key_slots(pages, start, key, inside, KEYS, PAGE, MASK) * heads + head
    s = _scores(q, q_sum, q_scale, k_cache, k_params, row, inside, HEAD_DIM, K_COLS, FORM, MASK, K_DOT, SCALED, ASM)
    if SOFTCAP:
        s = softcap * tanh(s * (scale / softcap)) * LOG2E
    else:
        s = s * (scale * LOG2E)
    if ALIBI != "none":
        s += _raised(slope, slope_scale, key, position, ALIBI) * LOG2E
    if MASK:
        seen = inside[None, :] & (key[None, :] <= newest[:, None])
        if CHUNK > 0:
            seen = seen & (key[None, :] >= oldest[:, None])
        elif WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    denominator = denominator * shrink + tl.sum(p, 1)
    acc, acc_high, zeros = _add_values(
        acc, acc_high, zeros, p, shrink, v_cache, v_params, row, inside, HEAD_DIM, V_COLS, FORM, MASK, V_DOT, ASM, TURN
    )
    return acc, acc_high, top, denominator, zeros
