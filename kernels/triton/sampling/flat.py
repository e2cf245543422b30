"""Rows whose cut may lie below what was listed: many nearly equal logits. Two launches, in which other rows do nothing.

In the first every chunk counts and weighs what lies above some of the row's own logits, all multiprocessors at once:
between the two that come next to the cut few are left. In the second one program a row lists and searches those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .search import BOTTOM, UNIT, read_block, row_peak, search_listed, search_row, steps_below


@triton.jit
def _pivots(row_start, t, peak, vocab, PIVOTS: tl.constexpr):
    """Thresholds, in steps: logits from all over the row, each once as it is and once just below; the lowest is BOTTOM.

    With just below, values that many share are told from all others.
    """
    j = tl.arange(0, PIVOTS)
    at = (j // 2).to(tl.int64) * vocab // (PIVOTS // 2)
    x = tl.load(row_start + at)
    x = tl.div_rn(x, tl.broadcast_to(t, [PIVOTS]))
    return tl.where(j == 0, BOTTOM, tl.maximum(steps_below(x, peak) - j % 2, BOTTOM))


@triton.jit
def weigh_kernel(
    logits, temperature, peaks, out, part_counts, part_masses, vocab, stride, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """One chunk of a row whose token is not drawn yet (``out`` -1). ``part_counts`` (int32), ``part_masses`` [rows,
    chunks, PIVOTS]: how many of its logits lie above each pivot, and what they weigh.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(out + row) >= 0:
        return
    row_start, t = logits + row * stride, tl.load(temperature + row)
    _, peak = row_peak(peaks, row, chunks, WIDTH)
    tries = _pivots(row_start, t, peak, vocab, PIVOTS)
    counts = tl.zeros([BLOCK, PIVOTS], tl.int32)
    masses = tl.zeros([BLOCK, PIVOTS], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        i, weight, steps = read_block(row_start, chunk * CHUNK + start, t, peak, vocab, BLOCK)
        over = (steps[:, None] > tries[None, :]) & (i < vocab)[:, None]
        counts += over.to(tl.int32)
        masses += tl.where(over, weight[:, None], 0.0)
    at = (row * chunks + chunk) * PIVOTS + tl.arange(0, PIVOTS)
    tl.store(part_counts + at, tl.sum(counts, 0))
    tl.store(part_masses + at, tl.sum(masses, 0))


@triton.jit
def _narrow(part_counts, part_masses, row, tries, k, limit, vocab, chunks, WIDTH: tl.constexpr, PIVOTS: tl.constexpr):
    """(low, high, above_low, above_high, heavier): the pivots next to the cut, what lies above each, and the mass above
    ``high``. Both are BOTTOM where everything is kept.
    """
    chunk = tl.arange(0, WIDTH)[:, None]
    at = (row * chunks + chunk) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    count = tl.sum(tl.load(part_counts + at, mask=chunk < chunks, other=0), 0)
    mass = tl.sum(tl.load(part_masses + at, mask=chunk < chunks, other=0.0), 0)
    fits = (count < k) & (mass < limit)
    high = tl.min(tl.where(fits, tries, 0), 0)
    low = tl.max(tl.where(fits, BOTTOM, tries), 0)
    at_high, at_low = fits & (tries == high), (fits == 0) & (tries == low)
    above_high = tl.max(tl.where(at_high, count, 0), 0)
    heavier = tl.max(tl.where(at_high, mass, 0.0), 0)
    above_low = tl.max(tl.where(at_low, count, 0), 0)
    above_low = tl.where(high == BOTTOM, above_high, above_low)
    return low, high, above_low, above_high, heavier


@triton.jit
def _list_between(row_start, t, peak, vocab, low, high, to, BLOCK: tl.constexpr):
    """Write the steps in (low, high] one after another to ``to``."""
    used = low * 0
    for start in range(0, vocab, BLOCK):
        i, _, steps = read_block(row_start, start, t, peak, vocab, BLOCK)
        kept = (steps > low) & (steps <= high) & (i < vocab)
        tl.store(to + used + tl.cumsum(kept.to(tl.int32), 0) - 1, steps, mask=kept)
        used += tl.sum(kept.to(tl.int32), 0)


@triton.jit
def _kept(row_start, start, t, peak, vocab, threshold, ties, used, least, BLOCK: tl.constexpr):
    """(ids, weights with 0 for what is not kept, ties used up so far) of a block of a row."""
    i, weight, steps = read_block(row_start, start, t, peak, vocab, BLOCK)
    tie = (steps == threshold) & (i < vocab)
    kept = (steps > threshold) | (tie & (used + tl.cumsum(tie.to(tl.int32), 0) <= ties))
    return i, tl.where(kept & (weight >= least), weight, 0.0), used + tl.sum(tie.to(tl.int32), 0)


@triton.jit
def draw(row_start, t, peak, threshold, ties, least, uniform, vocab, BLOCK: tl.constexpr):
    """The token drawn from a whole row, or ``vocab`` where nothing weighs anything."""
    total, used = uniform * 0.0, ties * 0
    for start in range(0, vocab, BLOCK):
        _, weight, used = _kept(row_start, start, t, peak, vocab, threshold, ties, used, least, BLOCK)
        total += tl.sum(weight, 0).to(tl.float64)
    target, running, used = uniform * total, total * 0.0, ties * 0
    found, start = vocab, vocab * 0
    while (found == vocab) & (start < vocab):
        i, weight, used = _kept(row_start, start, t, peak, vocab, threshold, ties, used, least, BLOCK)
        upto = running + tl.cumsum(weight.to(tl.float64), 0)
        found = tl.min(tl.where((upto > target) & (weight > 0.0), i, vocab), 0)
        running += tl.sum(weight, 0).to(tl.float64)
        start += BLOCK
    return found


@triton.jit
def flat_kernel(
    logits, temperature, top_k, top_p, min_p, u, peaks, best, masses, steps_of, out, part_counts, part_masses,
    vocab, stride, chunks,
    WIDTH: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, PASS_BLOCK: tl.constexpr,
    THRESHOLDS: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row that has none yet (``out`` -1). ``steps_of``: int32 [rows, LISTED], scratch memory."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out + row) >= 0:
        return
    row_start, t = logits + row * stride, tl.load(temperature + row)
    chunk = tl.arange(0, WIDTH)
    chunk_peak, peak = row_peak(peaks, row, chunks, WIDTH)
    whole = tl.sum(
        tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0.0) * tl.exp(chunk_peak - peak), 0
    )
    k, p, least = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row), tl.load(min_p + row)
    limit = tl.where(p >= 1.0, float("inf"), tl.maximum(p, 1e-30) * whole)
    k = tl.where(k == 0, vocab + 1, k)
    threshold, ties = k * 0 + BOTTOM, vocab
    if (k <= vocab) | (limit < float("inf")):
        tries = _pivots(row_start, t, peak, vocab, PIVOTS)
        low, high, above_low, above_high, heavier = _narrow(
            part_counts, part_masses, row, tries, k, limit, vocab, chunks, WIDTH, PIVOTS
        )
        if above_low - above_high <= LISTED:
            _list_between(row_start, t, peak, vocab, low, high, steps_of + row * LISTED, BLOCK)
            tl.debug_barrier()  # other threads wrote what each reads
            at = tl.arange(0, LISTED)
            steps = tl.load(steps_of + row * LISTED + at, mask=at < above_low - above_high, other=BOTTOM - 1)
            weight = tl.exp(steps.to(tl.float32) / UNIT)
            threshold, ties = search_listed(steps, weight, k, limit, low, high, above_low, above_high, heavier, vocab)
        else:
            threshold, ties = search_row(
                row_start, t, peak, vocab, k, limit, low, high, above_low, above_high, heavier, PASS_BLOCK, THRESHOLDS
            )
    found = draw(row_start, t, peak, threshold, ties, least, tl.load(u + row).to(tl.float64), vocab, BLOCK)
    of_chunk = tl.load(best + row * chunks + chunk, mask=chunk < chunks, other=0)
    top = tl.min(tl.where((chunk < chunks) & (chunk_peak == peak), of_chunk, vocab - 1), 0)
    tl.store(out + row, tl.where(found == vocab, top, found).to(tl.int64))
