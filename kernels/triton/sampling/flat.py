"""Rows whose cut may lie below what was listed: many nearly equal logits. Three launches, which other rows leave.

``draw_kernel`` left the mass at which top-p ends, and pivots: quantiles of a sample of the row. In the first launch
every chunk counts and weighs what lies above each, in the second it lists what lies between the two next to the cut, at
a place that the counts tell. In the third one program a row searches these and draws: it knows what every chunk keeps,
and reads one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .search import (
    BOTTOM,
    DEPTH,
    UNIT,
    base_of,
    choose_id,
    choose_part,
    read_block,
    row_best,
    row_filters,
    row_peak,
    scaled_below,
    search_listed,
    search_row,
    store_kept,
    to_steps,
    weight_of,
)


@triton.jit
def _sampled(row_start, t, base, vocab, j, SAMPLES: tl.constexpr):
    x = tl.load(row_start + j.to(tl.int64) * vocab // SAMPLES)
    return to_steps(scaled_below(x, base, t))


@triton.jit
def leave_pivots(row_start, t, base, vocab, pivots, SAMPLES: tl.constexpr, PIVOTS: tl.constexpr):
    """Write thresholds, in falling steps (whole float32): quantiles of a sample of the row, the lowest BOTTOM. One that
    repeats the one before it lies just below, so that a value which many share is told from all others.
    """
    j = tl.arange(0, SAMPLES)
    mine = _sampled(row_start, t, base, vocab, j, SAMPLES)
    rank = j * 0
    for start in tl.static_range(0, SAMPLES, 64):
        others = start + tl.arange(0, 64)
        other = _sampled(row_start, t, base, vocab, others, SAMPLES)[None, :]
        before = (other > mine[:, None]) | ((other == mine[:, None]) & (others[None, :] < j[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
    n = tl.arange(0, PIVOTS)
    want = n * (SAMPLES // PIVOTS) + SAMPLES // PIVOTS // 2
    found = tl.sum(tl.where(rank[:, None] == want[None, :], mine[:, None], 0), 0)
    last = tl.sum(tl.where(rank[:, None] == want[None, :] - SAMPLES // PIVOTS, mine[:, None], 0), 0)
    again, found = (n > 0) & (found == last), found.to(tl.float32)
    found = tl.where(again, tl.minimum(found - 1.0, found * (1.0 + 2.0**-23)), found)
    tl.store(pivots + n, tl.where(n == PIVOTS - 1, BOTTOM, tl.maximum(found, BOTTOM)))


@triton.jit
def _over(steps, weight, pivot):
    over = (steps > pivot).to(tl.float32)
    return tl.join(over, over * weight)


@triton.jit
def weigh_kernel(
    logits, temperature, peaks, out, pivots, parts, vocab, stride, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Some chunks of a row whose token is not drawn yet (``out`` -1). ``parts`` (float32) [rows, chunks, 2, PIVOTS]:
    how many of a chunk's logits lie above each pivot, and what they weigh.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    t = tl.load(temperature + row)
    _, peak = row_peak(peaks, row, chunks, WIDTH)
    base = base_of(peak)
    for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        below = scaled_below(tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf")), base, t)
        # not yet whole, but above a negative whole number exactly if rounding towards 0 leaves them so
        weight, steps = tl.exp(below), tl.maximum(below, -DEPTH - 1.0) * UNIT
        for j in tl.static_range(0, PIVOTS, 2):
            at = pivots + row * PIVOTS + j
            two = tl.join(_over(steps, weight, tl.load(at)), _over(steps, weight, tl.load(at + 1)))
            four = tl.sum(two, 0)  # [count or mass, pivot]
            to = tl.arange(0, 2)[:, None] * PIVOTS + j + tl.arange(0, 2)[None, :]
            tl.store(parts + (row * chunks + chunk) * 2 * PIVOTS + to, four)


@triton.jit
def _narrow(pivots, parts, row, k, limit, least, vocab, chunks, WIDTH: tl.constexpr, PIVOTS: tl.constexpr):
    """(low, high, above_low, above_high, heavier, whether everything above low is kept; for each chunk the place at
    which its list starts, its length, the mass above high): the pivots next to the cut, what lies above each, and the
    mass above ``high``.
    """
    n, chunk = tl.arange(0, PIVOTS)[None, :], tl.arange(0, WIDTH)[:, None]
    at = parts + (row * chunks + chunk) * 2 * PIVOTS + n
    counts = tl.load(at, mask=chunk < chunks, other=0.0).to(tl.int32)
    masses = tl.load(at + PIVOTS, mask=chunk < chunks, other=0.0)
    tries = tl.load(pivots + row * PIVOTS + tl.arange(0, PIVOTS)).to(tl.int32)
    count, mass, each = tl.sum(counts, 0), tl.sum(masses, 0), weight_of(tries)
    fits = (count < k) & (mass < limit)
    # min-p is decided value by value: a pivot too near to its border is neither above nor below
    high = tl.min(tl.where(fits & (each > least * 1.00001), tries, 0), 0)
    low = tl.max(tl.where((fits == 0) | (each < least * 0.99999), tries, BOTTOM), 0)
    low = tl.minimum(low, high)
    at_low, at_high = (tries == low)[None, :], (tries == high)[None, :]
    of_low, of_high = tl.max(tl.where(at_low, counts, 0), 1), tl.max(tl.where(at_high, counts, 0), 1)
    kept = tl.max(tl.where(at_high, masses, 0.0), 1)
    above_low, above_high, heavier = tl.sum(of_low, 0), tl.sum(of_high, 0), tl.sum(kept, 0)
    all_fit = tl.max(tl.where((tries == low) & fits, 1, 0), 0) > 0
    length = of_low - of_high
    return low, high, above_low, above_high, heavier, all_fit, tl.cumsum(length, 0) - length, length, kept


@triton.jit
def _borders(temperature, top_k, min_p, limits, peaks, row, vocab, chunks, WIDTH: tl.constexpr):
    """(temperature, k, the mass at which top-p ends, least, what logits are compared with)."""
    t, k, least = row_filters(temperature, top_k, min_p, row, vocab)
    _, peak = row_peak(peaks, row, chunks, WIDTH)
    return t, k, tl.load(limits + row), least, base_of(peak)


@triton.jit
def list_kernel(
    logits, temperature, top_k, min_p, limits, peaks, out, pivots, parts, between, vocab, stride, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PIVOTS: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """Some chunks of a row that has no token yet. ``between`` (int32) [rows, BETWEEN]: the steps in (low, high], in
    ascending order of ids, unless they are more.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    t, k, limit, least, base = _borders(temperature, top_k, min_p, limits, peaks, row, vocab, chunks, WIDTH)
    low, high, above_low, above_high, _heavier, _all_fit, start, _length, _mass = _narrow(
        pivots, parts, row, k, limit, least, vocab, chunks, WIDTH, PIVOTS
    )
    if above_low - above_high > BETWEEN:
        return
    for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
        _i, _weight, steps = read_block(logits + row * stride, chunk * CHUNK, t, base, vocab, CHUNK)
        kept = (steps > low) & (steps <= high)
        first = tl.sum(tl.where(tl.arange(0, WIDTH) == chunk, start, 0), 0)  # of this chunk
        store_kept(between + row * BETWEEN + first, kept.to(tl.int32), steps, None, CHUNK)


@triton.jit
def _kept_masses(row_start, t, base, threshold, ties, least, vocab, chunks, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """(what each chunk keeps, how many at the threshold lie before it), by a pass over the row."""
    chunk, used = tl.arange(0, WIDTH), ties * 0
    mass, before = chunk * 0.0, chunk * 0
    for n in range(chunks):
        _i, weight, steps = read_block(row_start, n * CHUNK, t, base, vocab, CHUNK)
        tie = steps == threshold
        kept = (steps > threshold) | (tie & (used + tl.cumsum(tie.to(tl.int32), 0) <= ties))
        mass = tl.where(chunk == n, tl.sum(tl.where(kept & (weight >= least), weight, 0.0), 0), mass)
        before = tl.where(chunk == n, used, before)
        used += tl.sum(tie.to(tl.int32), 0)
    return mass, before


@triton.jit
def flat_kernel(
    logits, temperature, top_k, min_p, limits, u, peaks, best, out, pivots, parts, between, running,
    vocab, stride, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PIVOTS: tl.constexpr, BETWEEN: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row that has none yet. ``running``: float32 [rows, BETWEEN + 1], scratch memory."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    row_start, uniform = logits + row * stride, tl.load(u + row).to(tl.float64)
    t, k, limit, least, base = _borders(temperature, top_k, min_p, limits, peaks, row, vocab, chunks, WIDTH)
    low, high, above_low, above_high, heavier, all_fit, start, length, mass = _narrow(
        pivots, parts, row, k, limit, least, vocab, chunks, WIDTH, PIVOTS
    )
    threshold, ties, count = low, vocab, above_low - above_high
    chunk, at, listed = tl.arange(0, WIDTH), tl.arange(0, BETWEEN), between + row * BETWEEN
    if all_fit == 0:
        if count <= BETWEEN:
            steps = tl.load(listed + at, mask=at < count, other=BOTTOM - 1)
            weight = weight_of(steps)
            threshold, ties = search_listed(steps, weight, k, limit, low, high, above_low, above_high, heavier, vocab)
        else:
            threshold, ties = search_row(
                row_start, t, base, vocab, k, limit, low, high, above_low, above_high, heavier, CHUNK
            )
    if count <= BETWEEN:
        steps = tl.load(listed + at, mask=at < count, other=BOTTOM - 1)  # read again: there are few registers
        kept = (steps > threshold) | ((steps == threshold) & (ties == vocab))
        if ties < vocab:
            tie = steps == threshold
            kept = kept | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties))
        weight, own = weight_of(steps), running + row * (BETWEEN + 1)
        tl.store(own, 0.0)
        tl.store(own + 1 + at, tl.cumsum(tl.where(kept & (weight >= least), weight, 0.0), 0))
        tl.debug_barrier()  # other threads wrote what each reads
        mass += tl.load(own + start + length) - tl.load(own + start)
        hit, target = choose_part(mass, uniform, WIDTH)
        if ties < vocab:
            first = tl.sum(tl.where(chunk == hit, start, 0), 0)
            earlier = tl.load(listed + at, mask=at < first, other=BOTTOM - 1)
            ties -= tl.sum((earlier == threshold).to(tl.int32), 0)
    elif high - low == 1:  # one value, however many share it
        each = tl.where(weight_of(high) >= least, weight_of(high), 0.0)
        mass += tl.minimum(tl.maximum(ties - start, 0), length) * each
        hit, target = choose_part(mass, uniform, WIDTH)
        ties -= tl.sum(tl.where(chunk == hit, start, 0), 0)
    else:
        mass, before = _kept_masses(row_start, t, base, threshold, ties, least, vocab, chunks, WIDTH, CHUNK)
        hit, target = choose_part(mass, uniform, WIDTH)
        ties -= tl.sum(tl.where(chunk == hit, before, 0), 0)
    i, weight, steps = read_block(row_start, hit * CHUNK, t, base, vocab, CHUNK)
    found = choose_id(i, steps, threshold, ties, least, target, vocab)
    chunk_peak, peak = row_peak(peaks, row, chunks, WIDTH)
    top = row_best(best, row, chunk_peak, peak, vocab, chunks, WIDTH)
    tl.store(out + row, tl.where(found == vocab, top, found).to(tl.int64))
