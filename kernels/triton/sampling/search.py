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
BOTTOM = tl.constexpr(-40 * 16777216 - 1)  # keeps everything that weighs anything


@triton.jit
def scale(x, t):
    """Logits by their temperature: what is finite stays so, and -inf, which bans, stays apart from it."""
    scaled = tl.div_rn(x, tl.broadcast_to(t, x.shape))
    return tl.where(x == float("-inf"), x, tl.maximum(tl.minimum(scaled, 3.0e38), -3.0e38))


@triton.jit
def steps_below(x, peak):
    """How far scaled logits lie below the maximum, as a negative int32."""
    return (tl.maximum(x - peak, -DEPTH - 1.0) * UNIT).to(tl.int32)


@triton.jit
def _ties(low, high, above_high, heavier, k, limit, vocab):
    """(threshold, how many of those at it are kept, lowest ids first) once nothing is left to decide between two.

    At ``high`` lie values whose predecessors (``above_high``, which weigh ``heavier``) leave room, at ``low`` others.
    """
    threshold = tl.where(high > low, low + 1, high)
    each = tl.exp(threshold.to(tl.float32) / UNIT)
    room = tl.minimum((limit - heavier) / each, vocab * 1.0)
    some = tl.maximum(tl.minimum(k - above_high, tl.ceil(room).to(tl.int32)), 1)
    return threshold, tl.where(high - low == 1, some, vocab)


@triton.jit
def search_listed(steps, weight, k, limit, low, high, above_low, above_high, heavier, vocab):
    """(threshold, ties) by bisection among ``steps`` in (low, high]; what is absent lies below. Above ``low`` there are
    too many (``above_low``) or too much, above ``high`` are ``above_high``, which weigh ``heavier`` and are none of
    ``steps``. Ends when one candidate is left between two thresholds.
    """
    before, mass_before = above_high, heavier
    while (high - low > 1) & (above_low - above_high > 1):
        middle = low + (high - low) // 2
        over = steps > middle
        count = before + tl.sum(over.to(tl.int32), 0)
        mass = mass_before + tl.sum(tl.where(over, weight, 0.0), 0)
        fits = (count < k) & (mass < limit)
        above_high, heavier = tl.where(fits, count, above_high), tl.where(fits, mass, heavier)
        above_low = tl.where(fits, above_low, count)
        low, high = tl.where(fits, low, middle), tl.where(fits, middle, high)
    return _ties(low, high, above_high, heavier, k, limit, vocab)


@triton.jit
def search_row(
    row_start, t, peak, vocab, k, limit, low, high, above_low, above_high, heavier,
    BLOCK: tl.constexpr, THRESHOLDS: tl.constexpr,
):  # fmt: skip
    """(threshold, ties) by passes over the row that count and weigh what lies above several thresholds at once; the
    others as ``search_listed`` has them.
    """
    while (high - low > 1) & (above_low - above_high > 1):
        wide = (high - low).to(tl.int64)
        steps_up = (wide * tl.arange(0, THRESHOLDS) // THRESHOLDS).to(tl.int32)
        tries = low + tl.where(tl.arange(0, THRESHOLDS) == 0, 0, tl.maximum(steps_up, 1))
        counts = tl.zeros([BLOCK, THRESHOLDS], tl.int32)
        weights = tl.zeros([BLOCK, THRESHOLDS], tl.float32)
        for start in range(0, vocab, BLOCK):
            i, weight, steps = read_block(row_start, start, t, peak, vocab, BLOCK)
            over = (steps[:, None] > tries[None, :]) & (i < vocab)[:, None]
            counts += over.to(tl.int32)
            weights += tl.where(over, weight[:, None], 0.0)
        count, mass = tl.sum(counts, 0), tl.sum(weights, 0)
        fits = (count < k) & (mass < limit)
        # the tries rise: the first that fits is the new upper end, the one before it the new lower end
        next_high = tl.min(tl.where(fits, tries, high), 0)
        next_low = tl.max(tl.where(fits, low, tries), 0)
        if next_high == low:  # even the lowest threshold fits
            next_low = low
        at_high = (tries == next_high) & fits
        above_high = tl.where(next_high == high, above_high, tl.max(tl.where(at_high, count, 0), 0))
        heavier = tl.where(next_high == high, heavier, tl.max(tl.where(at_high, mass, 0.0), 0))
        above_low = tl.max(tl.where((tries == next_low) & (fits == 0), count, 0), 0)
        low, high = next_low, next_high
        if next_high == next_low:
            above_low = above_high
    return _ties(low, high, above_high, heavier, k, limit, vocab)


@triton.jit
def row_peak(peaks, row, chunks, WIDTH: tl.constexpr):
    """(the largest scaled logit of each of WIDTH chunks, that of the row; 0 where all of it is -inf)."""
    chunk = tl.arange(0, WIDTH)
    found = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    peak = tl.max(found, 0)
    return found, tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def read_block(row_start, start, t, peak, vocab, BLOCK: tl.constexpr):
    """(ids, exp(scaled - peak), steps below the peak) of a block of a row; past the end the weight is 0."""
    i = start + tl.arange(0, BLOCK)
    x = tl.load(row_start + i, mask=i < vocab, other=float("-inf"))
    x = scale(x, t)
    return i, tl.exp(x - peak), steps_below(x, peak)
