"""Drawing tokens without sorting.

What top-k, top-p and min-p keep is each time a beginning of the order by falling probability. So one threshold decides:
the least value whose predecessors are fewer than k and weigh less than p. It is found by passes over the row that count
and weigh what lies above several thresholds at once, and stop as soon as one candidate is left between two of them.
Values are compared as multiples of 2^-24 of a logit below the maximum; what lies more than 40 below weighs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import sampling as reference
from .launch import launch, needs

CHUNK, PASS_BLOCK, THRESHOLDS = 4096, 512, 8
UNIT = tl.constexpr(16777216.0)  # steps a logit
DEPTH = tl.constexpr(40)


@triton.jit
def chunk_kernel(logits, temperature, peaks, ids, masses, vocab, stride, chunks, CHUNK: tl.constexpr):
    """One chunk of a row: its largest scaled logit, the lowest id that has it, and sum(exp(scaled - largest))."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    t = tl.load(temperature + row)
    t = tl.where(t == 0.0, 1.0, t)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    x = tl.div_rn(x, tl.broadcast_to(t, [CHUNK]))
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    at = row * chunks + chunk
    tl.store(peaks + at, peak)
    tl.store(ids + at, tl.min(tl.where(x == peak, i, vocab - 1), 0))
    tl.store(masses + at, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _below(row_start, start, t, peak, vocab, BLOCK: tl.constexpr):
    """(ids, exp(scaled - peak), steps below the peak as a negative int32) of a block; past the end weight 0."""
    i = start + tl.arange(0, BLOCK)
    x = tl.load(row_start + i, mask=i < vocab, other=float("-inf"))
    x = tl.div_rn(x, tl.broadcast_to(t, [BLOCK])) - peak
    steps = (tl.maximum(x, -DEPTH - 1.0) * UNIT).to(tl.int32)
    return i, tl.exp(x), steps


@triton.jit
def _kept(row_start, start, t, peak, vocab, threshold, ties, used, min_p, BLOCK: tl.constexpr):
    """(ids, weights with 0 for what is not kept, ties used up so far)."""
    i, weight, steps = _below(row_start, start, t, peak, vocab, BLOCK)
    tie = (steps == threshold) & (i < vocab)
    count = tl.sum(tie.to(tl.int32), 0)
    kept = steps > threshold
    if used + count <= ties:
        kept = kept | tie
    elif used < ties:
        kept = kept | (tie & (used + tl.cumsum(tie.to(tl.int32), 0) <= ties))
    kept = kept & (weight >= min_p)
    return i, tl.where(kept, weight, 0.0), used + count


@triton.jit
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    u,
    peaks,
    ids,
    masses,
    out,
    vocab,
    stride,
    chunks,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    """One row. WIDTH: a power of two that holds the chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDTH)
    chunk_peak = tl.load(peaks + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    best = tl.load(ids + row * chunks + chunk, mask=chunk < chunks, other=0)
    peak = tl.max(chunk_peak, 0)
    best = tl.min(tl.where(chunk_peak == peak, best, vocab - 1), 0)
    t = tl.load(temperature + row)
    if t == 0.0:
        tl.store(out + row, best.to(tl.int64))
        return
    base = tl.where(peak == float("-inf"), 0.0, peak)
    chunk_mass = tl.load(masses + row * chunks + chunk, mask=chunk < chunks, other=0.0) * tl.exp(chunk_peak - base)
    whole = tl.sum(chunk_mass, 0)
    row_start = logits + row * stride
    k, p, least = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row), tl.load(min_p + row)
    limit = tl.where(p >= 1.0, float("inf"), tl.maximum(p, 1e-30) * whole)
    k = tl.where(k == 0, vocab + 1, k)
    low = -DEPTH * 16777216 - 1  # keeps everything that weighs anything
    high = low
    ties = vocab
    if (k <= vocab) | (p < 1.0):
        high = low * 0
        above_low, above_high, heavier = vocab, low * 0, whole * 0.0
        while (high - low > 1) & (above_low - above_high > 1):
            wide = (high - low).to(tl.int64)
            steps_up = (wide * tl.arange(0, THRESHOLDS) // THRESHOLDS).to(tl.int32)
            tries = low + tl.where(tl.arange(0, THRESHOLDS) == 0, 0, tl.maximum(steps_up, 1))
            counts = tl.zeros([BLOCK, THRESHOLDS], tl.int32)
            weights = tl.zeros([BLOCK, THRESHOLDS], tl.float32)
            for start in range(0, vocab, BLOCK):
                i, weight, steps = _below(row_start, start, t, peak, vocab, BLOCK)
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
        if high - low == 1:
            each = tl.exp(high.to(tl.float32) / UNIT)
            room = tl.minimum((limit - heavier) / each, vocab * 1.0)
            ties = tl.maximum(tl.minimum(k - above_high, tl.ceil(room).to(tl.int32)), 1)
        elif high > low:
            high = low + 1
    threshold = high
    plain = (threshold < -DEPTH * 16777216) & (least <= 0.0)
    start, running, used = vocab * 0, whole.to(tl.float64) * 0.0, ties * 0
    if plain:
        total = tl.sum(chunk_mass.to(tl.float64), 0)
        target = tl.load(u + row).to(tl.float64) * total
        upto = tl.cumsum(chunk_mass.to(tl.float64), 0)
        hit = tl.min(tl.where((upto > target) & (chunk < chunks), chunk, chunks - 1), 0)
        running = tl.sum(tl.where(chunk < hit, chunk_mass.to(tl.float64), 0.0), 0)
        start = hit * CHUNK
        i, weight, used = _kept(row_start, start, t, peak, vocab, threshold, ties, used, least, CHUNK)
    else:
        total = running
        for first in range(0, vocab, CHUNK):
            i, weight, used = _kept(row_start, first, t, peak, vocab, threshold, ties, used, least, CHUNK)
            total += tl.sum(weight, 0).to(tl.float64)
        target = tl.load(u + row).to(tl.float64) * total
        used = ties * 0
        i, weight, used = _kept(row_start, start, t, peak, vocab, threshold, ties, used, least, CHUNK)
        mass = tl.sum(weight, 0).to(tl.float64)
        while (running + mass <= target) & (start + CHUNK < vocab):
            running += mass
            start += CHUNK
            i, weight, used = _kept(row_start, start, t, peak, vocab, threshold, ties, used, least, CHUNK)
            mass = tl.sum(weight, 0).to(tl.float64)
    upto = running + tl.cumsum(weight.to(tl.float64), 0)
    found = tl.min(tl.where((upto > target) & (weight > 0.0), i, vocab), 0)
    tl.store(out + row, tl.where(found == vocab, best, found).to(tl.int64))


@reference.sample.register("triton", devices=("cuda",), dtypes=("float32",), unsupported=needs())
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Two launches: chunks over all multiprocessors, then one program a row, which is done at once for greedy rows and
    reads one chunk for rows without a filter.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    device = logits.device
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    ids, masses = torch.empty(rows, chunks, dtype=torch.int32, device=device), torch.empty_like(peaks)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    stride = logits.stride(0)
    launch(
        chunk_kernel, (rows, chunks), logits, temperature, peaks, ids, masses, vocab, stride, chunks,
        warps=8, CHUNK=CHUNK,
    )  # fmt: skip
    launch(
        sample_kernel, (rows,), logits, temperature, top_k, top_p, min_p, u, peaks, ids, masses, out, vocab, stride,
        chunks, warps=8, WIDTH=triton.next_power_of_2(chunks), CHUNK=CHUNK, BLOCK=PASS_BLOCK, THRESHOLDS=THRESHOLDS,
    )  # fmt: skip
    return out
