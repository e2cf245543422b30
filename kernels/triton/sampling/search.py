"""Where the filters of a row cut: the search for a threshold among listed candidates, and in a whole row.

What top-k, top-p and min-p keep is each time a beginning of the order by falling probability. So one threshold decides:
the least value whose predecessors are fewer than k and weigh less than p. Values are compared as steps of 2^-24 of a
logit below the maximum; what lies more than 40 below weighs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16777216.0)  # steps a logit
DEPTH = tl.constexpr(40)
BOTTOM = tl.constexpr(-40 * 16777216 - 64)  # keeps everything that weighs anything; exact in float32
NOTHING = tl.constexpr(-200.0)  # its exp is 0 in float32


@triton.jit
def scaled_below(x, peak, t):
    """(x - peak) / t as a division rounds it, in five multiplications and additions; at least NOTHING, which is also
    what banned logits (-inf) and NaN come to.

    Markstein (1990): from the rounded reciprocal two corrections by the exact remainder lead to the rounded quotient.
    """
    t = tl.minimum(tl.maximum(t, 1e-30), 1e30)
    inverse = tl.div_rn(1.0, t)
    below = tl.maximum(x - peak, NOTHING * t)
    found = below * inverse
    found = tl.fma(tl.fma(found, -t, below), inverse, found)
    return tl.fma(tl.fma(found, -t, below), inverse, found)


@triton.jit
def to_steps(below):
    """Scaled logits below the maximum as a negative int32."""
    return (tl.maximum(below, -DEPTH - 1.0) * UNIT).to(tl.int32)


@triton.jit
def weight_of(steps):
    """What a logit weighs relative to the maximum; of banned ones, which lie at or below BOTTOM, it means nothing."""
    return tl.exp(steps.to(tl.float32) / UNIT)


@triton.jit
def sums(over, weight):
    """(how many are ``over``, what they weigh), in one reduction."""
    over = over.to(tl.float32)
    return tl.split(tl.sum(tl.join(over, over * weight), 0))


@triton.jit
def _ties(low, high, above_high, heavier, k, limit, vocab):
    """(threshold, how many of those at it are kept, lowest ids first) once nothing is left to decide between two.

    At ``high`` lie values whose predecessors (``above_high``, which weigh ``heavier``) leave room, at ``low`` others.
    """
    threshold = tl.where(high > low, low + 1, high)
    room = tl.minimum((limit - heavier) / weight_of(threshold), vocab * 1.0)
    some = tl.maximum(tl.minimum(k - above_high, tl.ceil(room).to(tl.int32)), 1)
    return threshold, tl.where(high - low == 1, some, vocab)


@triton.jit
def _halved(middle, count, mass, k, limit, low, high, above_low, above_high, heavier):
    """(low, high, above_low, above_high, heavier) once ``count`` values are known above ``middle``, of ``mass``."""
    fits = (count < k) & (mass < limit)
    above_high, heavier = tl.where(fits, count, above_high), tl.where(fits, mass, heavier)
    above_low = tl.where(fits, above_low, count)
    return tl.where(fits, low, middle), tl.where(fits, middle, high), above_low, above_high, heavier


@triton.jit
def kept_mass(steps, weight, threshold, ties):
    """What is kept of candidates weighs, ``ties`` at most of those at the threshold."""
    tied = tl.sum((steps == threshold).to(tl.int32), 0)
    over = tl.sum(tl.where(steps > threshold, weight, 0.0), 0)
    return over + tl.minimum(ties, tied).to(tl.float32) * weight_of(threshold)


@triton.jit
def search_listed(steps, weight, k, limit, low, high, above_low, above_high, heavier, vocab):
    """(threshold, ties) by bisection among ``steps`` in (low, high]; what is absent lies below. Above ``low`` there are
    too many (``above_low``) or too much, above ``high`` are ``above_high``, which weigh ``heavier`` and are none of
    ``steps``. Ends when one candidate is left between two thresholds.
    """
    before, mass_before = above_high, heavier
    while (high - low > 1) & (above_low - above_high > 1):
        middle = low + (high - low) // 2
        count, mass = sums(steps > middle, weight)
        count, mass = before + count.to(tl.int32), mass_before + mass
        low, high, above_low, above_high, heavier = _halved(
            middle, count, mass, k, limit, low, high, above_low, above_high, heavier
        )
    return _ties(low, high, above_high, heavier, k, limit, vocab)


@triton.jit
def search_row(
    row_start, t, peak, vocab, k, limit, low, high, above_low, above_high, heavier, BLOCK: tl.constexpr,
):  # fmt: skip
    """(threshold, ties) by bisection in passes over the row; the others as ``search_listed`` has them."""
    while (high - low > 1) & (above_low - above_high > 1):
        middle = low + (high - low) // 2
        count, mass = above_high * 0, heavier * 0.0
        for start in range(0, vocab, BLOCK):
            _, weight, steps = read_block(row_start, start, t, peak, vocab, BLOCK)
            some, more = sums(steps > middle, weight)
            count, mass = count + some.to(tl.int32), mass + more
        low, high, above_low, above_high, heavier = _halved(
            middle, count, mass, k, limit, low, high, above_low, above_high, heavier
        )
    return _ties(low, high, above_high, heavier, k, limit, vocab)


@triton.jit
def best_mass(row_start, t, peak, vocab, k, BLOCK: tl.constexpr):
    """What the ``k`` most probable of a row weigh, in passes over it."""
    zero = k * 0
    threshold, ties = search_row(
        row_start, t, peak, vocab, k, float("inf"), zero + BOTTOM, zero, zero + vocab, zero, zero * 0.0, BLOCK
    )
    mass, tied = zero * 0.0, zero
    for start in range(0, vocab, BLOCK):
        _, weight, steps = read_block(row_start, start, t, peak, vocab, BLOCK)
        mass += tl.sum(tl.where(steps > threshold, weight, 0.0), 0)
        tied += tl.sum((steps == threshold).to(tl.int32), 0)
    return mass + tl.minimum(ties, tied).to(tl.float32) * weight_of(threshold)


@triton.jit
def row_peak(peaks, row, chunks, WIDTH: tl.constexpr):
    """(the largest logit of each of WIDTH chunks, that of the row)."""
    chunk = tl.arange(0, WIDTH)
    found = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    return found, tl.max(found, 0)


@triton.jit
def row_best(best, row, chunk_peak, peak, vocab, chunks, WIDTH: tl.constexpr):
    """The lowest id that has the row's largest logit."""
    chunk = tl.arange(0, WIDTH)
    of_chunk = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=0)
    return tl.min(tl.where((chunk < chunks) & (chunk_peak == peak), of_chunk, vocab - 1), 0)


@triton.jit
def row_filters(temperature, top_k, min_p, row, vocab):
    """(temperature, k, least) of a row; k is vocab + 1 where it cuts nothing."""
    k = tl.load(top_k + row).to(tl.int32)
    return tl.load(temperature + row), tl.where((k == 0) | (k >= vocab), vocab + 1, k), tl.load(min_p + row)


@triton.jit
def base_of(peak):
    """What logits are compared with; 0 where all of them are -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def mass_limit(p, whole):
    """The mass at which top-p ends, of ``whole``."""
    return tl.where(p >= 1.0, float("inf"), tl.maximum(p, 1e-30) * whole)


@triton.jit
def chunk_weights(masses, row, chunk_peak, base, t, chunks, WIDTH: tl.constexpr):
    """What each chunk weighs, relative to the row's maximum."""
    chunk = tl.arange(0, WIDTH)
    mass = tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    return mass * tl.exp(scaled_below(chunk_peak, base, t))


@triton.jit
def read_block(row_start, start, t, peak, vocab, BLOCK: tl.constexpr):
    """(ids, weights, steps below the maximum) of a block of a row; past the end as if banned."""
    i = start + tl.arange(0, BLOCK)
    below = scaled_below(tl.load(row_start + i, mask=i < vocab, other=float("-inf")), peak, t)
    return i, tl.exp(below), to_steps(below)


@triton.jit
def store_kept(to, kept, first, second, SIZE: tl.constexpr):
    """Store the values of which ``kept`` is 1 one after another; an int64 of both where there is a ``second``.

    Four neighbours lie in one thread, which so takes part in a quarter of the running sums.
    """
    n0, n1, n2, n3 = _fours(kept, SIZE)
    a0, a1, a2, a3 = _fours(first, SIZE)
    b0, b1, b2, b3 = (a0, a1, a2, a3) if second is None else _fours(second, SIZE)
    at = tl.cumsum(n0 + n1 + n2 + n3, 0) - n0 - n1 - n2 - n3
    tl.store(to + at, a0 if second is None else _joined(a0, b0), mask=n0 > 0)
    at += n0
    tl.store(to + at, a1 if second is None else _joined(a1, b1), mask=n1 > 0)
    at += n1
    tl.store(to + at, a2 if second is None else _joined(a2, b2), mask=n2 > 0)
    at += n2
    tl.store(to + at, a3 if second is None else _joined(a3, b3), mask=n3 > 0)


@triton.jit
def _fours(x, SIZE: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, [SIZE // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _joined(high, low):
    return (high.to(tl.int64) << 32) | low


@triton.jit
def choose_part(mass, uniform, PARTS: tl.constexpr):
    """(the part in which the running sum of ``mass`` passes ``uniform`` of all, the target less what lies before)."""
    part, mass = tl.arange(0, PARTS), mass.to(tl.float64)
    target = uniform * tl.sum(mass, 0)
    last = tl.max(tl.where(mass > 0.0, part, 0), 0)  # rounding may leave nothing above the target
    hit = tl.minimum(tl.min(tl.where(tl.cumsum(mass, 0) > target, part, PARTS - 1), 0), last)
    return hit, target - tl.sum(tl.where(part < hit, mass, 0.0), 0)


@triton.jit
def choose_id(i, steps, threshold, ties, least, target, vocab):
    """The id at which the running sum of what is kept passes ``target``, the last one kept where it does not; ``vocab``
    where nothing is kept. ``ties``: how many at the threshold are kept from the first of these on.
    """
    tie, weight = steps == threshold, weight_of(steps)
    kept = ((steps > threshold) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties))) & (weight >= least)
    upto = tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
    found = tl.min(tl.where((upto > target) & kept, i, vocab), 0)
    last = tl.max(tl.where(kept, i, -1), 0)
    return tl.where(found < vocab, found, tl.where(last >= 0, last, vocab))
