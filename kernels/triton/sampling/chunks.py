"""The first launch of sampling: what a chunk of a row's logits comes to, and which of them may be drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from .search import base_of, scaled_below, store_kept

STEP = tl.constexpr(1 / 0.6)  # from one floor to the next deeper
SHALLOWEST = tl.constexpr(41.0 * 0.6**7)  # scaled logits below the chunk's maximum; seven steps on is below BOTTOM


@triton.jit
def _deeper(below, depth, floor, count, step, room):
    """(depth, floor, count) a step deeper, if that leaves at most ``room``."""
    found = tl.sum((below > -depth * step).to(tl.int32), 0)
    fits = found <= room
    return tl.where(fits, depth * step, depth), tl.where(fits, -depth * step, floor), tl.where(fits, found, count)


@triton.jit
def _list(row_start, i, below, at, to, room, floors, counts, vocab, CHUNK: tl.constexpr):
    """Keep what lies above a floor, in ascending order of ids: the deepest of seven that leaves at most ``room``."""
    depth, floor, count = SHALLOWEST, 0.0, 0  # none is listed where too many are nearly equal
    depth, floor, count = _deeper(below, depth, floor, count, STEP * STEP * STEP * STEP, room)
    depth, floor, count = _deeper(below, depth, floor, count, STEP * STEP, room)
    depth, floor, count = _deeper(below, depth, floor, count, STEP, room)
    x = tl.load(row_start + i, mask=i < vocab, other=0.0)  # again: fewer registers let more chunks be read at a time
    store_kept(to, (below > floor).to(tl.int32), x.to(tl.int32, bitcast=True), i, CHUNK)
    tl.store(floors + at, floor)
    tl.store(counts + at, count)


@triton.jit
def chunk_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    best,
    masses,
    floors,
    counts,
    listed,
    vocab,
    stride,
    chunks,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One chunk of a row. ``peaks``, ``best``, ``masses`` [rows, chunks]: its largest logit, the lowest id that has it,
    and, unless the row is greedy, sum(exp((logit - largest) / temperature)). Where the row has a filter, ``listed``
    [rows, LISTED] lists its ``counts`` logits more than ``floors`` (scaled, negative) above the largest, each as the
    float's bits above the id: FIRST_ROOM places each for the FIRST chunks, then ROOM for every chunk.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    t = tl.load(temperature + row)
    filtered = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    peak = tl.max(x, 0)
    at = row * chunks + chunk
    tl.store(peaks + at, peak)
    tl.store(best + at, tl.min(tl.where(x == peak, i, vocab - 1), 0))
    if t != 0.0:
        below = scaled_below(x, base_of(peak), t)
        tl.store(masses + at, tl.sum(tl.exp(below), 0))
        if filtered:
            early = chunk < FIRST
            start = tl.where(early, chunk * FIRST_ROOM, FIRST * FIRST_ROOM + chunk * ROOM)
            room = tl.where(early, FIRST_ROOM, ROOM)
            _list(
                logits + row * stride, i, below, at, listed + row * LISTED + start, room, floors, counts, vocab, CHUNK
            )
