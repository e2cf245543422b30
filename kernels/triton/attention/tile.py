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
from ..cache.pairs import nibbles, numbers, six_bit_pairs
from ..codes import cast, exact_float, high_nibble, low_nibble, scale_and_zero, widen
from ..elementwise.activation import tanh

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_slots(pages, start, key, inside, KEYS: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr):
    """(int64 first slot, slots counted from it) of the KEYS keys from ``start``. Keys of one page count in int32, by
    numbers that no tile changes: addresses then cost an addition each.
    """
    if PAGE % KEYS == 0:
        return tl.load(pages + start // PAGE).to(tl.int64) * PAGE + start % PAGE, tl.arange(0, KEYS)
    elif MASK:
        return 0, tl.load(pages + key // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + key % PAGE
    else:
        return 0, tl.load(pages + key // PAGE).to(tl.int64) * PAGE + key % PAGE


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
    cache,
    params,
    first,
    row,
    inside,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRS: tl.constexpr,
    MASK: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """q·k [ROWS, KEYS] in float32; ``q``: the tiles of queries."""
    WIDTH: tl.constexpr = HEAD_DIM // (4 if FORM == "int4" else 1) // (2 if PAIRS else 1)
    if FORM == "int4":
        at = cache + first * (3 * WIDTH) + row * (3 * WIDTH)
        low = key_columns(at, inside, WIDTH, COLS, MASK)
        low_2 = key_columns(at + WIDTH, inside, WIDTH, COLS, MASK)
        high = key_columns(at + 2 * WIDTH, inside, WIDTH, COLS, MASK)
        s = None
        for quarter in tl.static_range(4):
            nibbled = low if quarter % 2 == 0 else low_2
            if PAIRS:
                even = six_bit_pairs(nibbled, high, quarter, False, ASM)
                s = tl.dot(q[2 * quarter], tl.trans(even), s, input_precision="ieee")
                odd = six_bit_pairs(nibbled, high, quarter, True, ASM)
                s = tl.dot(q[2 * quarter + 1], tl.trans(odd), s, input_precision="ieee")
            else:
                k = six_bits(nibbled, high, quarter, DOT, ASM)
                s = tl.dot(q[quarter], tl.trans(k), s, input_precision="ieee")
    else:
        k = key_columns(cache + first * WIDTH + row * WIDTH, inside, WIDTH, COLS, MASK)
        if PAIRS:
            s = tl.dot(q[0], tl.trans(numbers(k, FORM, False, ASM)), input_precision="ieee")
            s = tl.dot(q[1], tl.trans(numbers(k, FORM, True, ASM)), s, input_precision="ieee")
        else:
            if FORM == "int8":
                k = widen(k, DOT, ASM)
            elif FORM == "e4m3" or FORM == "e5m2":
                k = float8(k, FORM, DOT, ASM)
            s = tl.dot(q[0], tl.trans(k.to(DOT)), input_precision="ieee")
    if FORM == "int8" or FORM == "int4":
        scale, zero = key_scale_and_zero(params + first, row, inside, MASK)
        s = scale[None, :] * (s - zero[None, :] * q_sum[:, None])
    return s


@triton.jit
def _add_values(
    acc,
    zeros,
    p,
    shrink,
    cache,
    params,
    first,
    row,
    inside,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    FORM: tl.constexpr,
    PAIRS: tl.constexpr,
    MASK: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    TURN: tl.constexpr,
    LAZY: tl.constexpr,
):
    """(acc, zeros) after the values of a tile, weighed by ``p`` [ROWS, KEYS]; see ``fold``."""
    if FORM == "int8" or FORM == "int4":
        scale, zero = key_scale_and_zero(params + first, row, inside, MASK)
        weighted, zeros = weighed(p, shrink, zeros, scale, zero, DOT, LAZY)
    else:
        weighted = cast(p, DOT)
    WIDTH: tl.constexpr = HEAD_DIM // (2 if FORM == "int4" else 1) // (2 if PAIRS else 1)
    v = key_columns(cache + first * WIDTH + row * WIDTH, inside, WIDTH, COLS, MASK)
    by = shrink[:, None]
    if FORM == "int4" and PAIRS:
        a = tl.dot(weighted, nibbles(v, False, False, ASM), acc[0] * by, input_precision="ieee")
        b = tl.dot(weighted, nibbles(v, False, True, ASM), acc[1] * by, input_precision="ieee")
        c = tl.dot(weighted, nibbles(v, True, False, ASM), acc[2] * by, input_precision="ieee")
        d = tl.dot(weighted, nibbles(v, True, True, ASM), acc[3] * by, input_precision="ieee")
        return (a, b, c, d), zeros
    elif FORM == "int4":
        low, high = unpacked_here(low_nibble(v, DOT, ASM), TURN), unpacked_here(high_nibble(v, DOT, ASM), TURN)
        a = tl.dot(weighted, low, acc[0] * by, input_precision="ieee")
        b = tl.dot(weighted, high, acc[1] * by, input_precision="ieee")
        return (a, b), zeros
    elif PAIRS:
        a = tl.dot(weighted, numbers(v, FORM, False, ASM), acc[0] * by, input_precision="ieee")
        b = tl.dot(weighted, numbers(v, FORM, True, ASM), acc[1] * by, input_precision="ieee")
        return (a, b), zeros
    else:
        if FORM == "int8":
            v = unpacked_here(widen(v, DOT, ASM), TURN and HEAD_DIM > 64)  # short heads would spill registers
        elif FORM == "e4m3" or FORM == "e5m2":
            v = unpacked_here(float8(v, FORM, DOT, ASM), TURN)
        return (tl.dot(weighted, v.to(DOT), acc[0] * by, input_precision="ieee"),), zeros


@triton.jit
def softmax_step(s, m, denominator, LAZY: tl.constexpr):
    """(maximum, factor for all that was summed before, weights [ROWS, KEYS], denominator) after the scores ``s`` of a
    tile, in powers of 2; see ``joined``.
    """
    top = tl.maximum(m, tl.max(s, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    return top, shrink, p, joined(denominator, shrink, p, LAZY)


@triton.jit
def weighed(p, shrink, zeros, scale, zero, DOT: tl.constexpr, LAZY: tl.constexpr):
    """(weights ``p`` times each key's ``scale`` in DOT, what the zeros weigh so far); see ``joined``."""
    weighted = cast(p * scale[None, :], DOT)
    return weighted, joined(zeros, shrink, weighted.to(tl.float32) * zero[None, :], LAZY)


@triton.jit
def joined(total, shrink, terms, LAZY: tl.constexpr):
    """A running sum of ``terms`` [ROWS, KEYS] over keys, [ROWS]. LAZY 2 or 4: that many keys at a time, [ROWS, KEYS /
    LAZY], to be summed when all tiles are done, which spares warps from waiting for one another in every tile.

    Those keys are in one lane: neighbours, and with 4 those half a tile further, where warps have two tiles each of 8
    keys. So is their factor, if it goes the same way as they.
    """
    if LAZY == 0:
        return total * shrink + tl.sum(terms, 1)
    else:
        HALVES: tl.constexpr = LAZY // 2
        SHAPE: tl.constexpr = [terms.shape[0], HALVES, terms.shape[1] // LAZY, 2]
        factor = tl.max(tl.max(tl.reshape(tl.broadcast_to(shrink[:, None], terms.shape), SHAPE), 3), 1)
        return total * factor + tl.sum(tl.sum(tl.reshape(terms, SHAPE), 3), 1)


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
    PAIRS: tl.constexpr,
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
    LAZY: tl.constexpr,
):
    """Fold KEYS keys from ``start`` into the running sums. MASK: some of them may not be seen by every row.

    ``acc``: weighted codes [ROWS, V_COLS], one tile or in form int4 two, each with PAIRS its even columns, then its odd
    ones; ``zeros``: the weighted zeros to be subtracted from all; ``m``, ``denominator``: of weights in powers of 2.
    ``zeros``, ``denominator``: see ``joined``.
    ``oldest``, ``newest`` [ROWS]: keys that a row sees, the former with CHUNK alone.
    """
    key = start + tl.arange(0, KEYS)
    inside = (key >= first_key) & (key < end_key)
    first, row = key_slots(pages, start, key, inside, KEYS, PAGE, MASK)
    if not PAIRS:  # the registers would not do
        first, row = 0, first + row
    first, row = first * heads + head, row * heads
    s = _scores(q, q_sum, k_cache, k_params, first, row, inside, HEAD_DIM, K_COLS, FORM, PAIRS, MASK, K_DOT, ASM)
    factor = scale
    if SCALED:
        factor = (q_scale * scale)[:, None]
    if SOFTCAP:
        s = softcap * tanh(s * (factor / softcap)) * LOG2E
    else:
        s = s * (factor * LOG2E)
    if ALIBI != "none":
        s += _raised(slope, slope_scale, key, position, ALIBI) * LOG2E
    if MASK:
        seen = inside[None, :] & (key[None, :] <= newest[:, None])
        if CHUNK > 0:
            seen = seen & (key[None, :] >= oldest[:, None])
        elif WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
    m, shrink, p, denominator = softmax_step(s, m, denominator, LAZY)
    acc, zeros = _add_values(
        acc, zeros, p, shrink, v_cache, v_params, first, row, inside, HEAD_DIM, V_COLS, FORM, PAIRS, MASK,
        V_DOT, ASM, TURN, LAZY,
    )  # fmt: skip
    return acc, m, denominator, zeros
