"""The first launch of sampling: what a chunk of a row's logits comes to, and which of them may be drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from .search import scale

DEEPEST, SHRINK, SHALLOWEST = tl.constexpr(41.0), tl.constexpr(0.6), tl.constexpr(0.5)  # logits below the maximum


@triton.jit
def _list(x, i, peak, at, start, room, floors, counts, values, ids):
    """Keep what lies above a floor, in ascending order of ids: the deepest floor that leaves at most ``room``."""
    depth = peak * 0.0 + DEEPEST
    floor = peak - DEEPEST
    count = tl.sum((x > floor).to(tl.int32), 0)
    while (count > room) & (depth > SHALLOWEST):
        depth = depth * SHRINK
        floor = peak - depth
        count = tl.sum((x > floor).to(tl.int32), 0)
    if count > room:  # too many that are nearly equal: none is listed, and the floor says so
        floor = peak
        count = count * 0
    kept = x > floor
    to = start + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(values + to, x, mask=kept)
    tl.store(ids + to, i, mask=kept)
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
    values,
    ids,
    vocab,
    stride,
    chunks,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One chunk of a row. ``peaks``, ``best``, ``masses`` [rows, chunks]: its largest scaled logit, the lowest id that
    has it, and sum(exp(scaled - largest)). Where the row has a filter, ``values`` and ``ids`` [rows, LISTED] list its
    ``counts`` scaled logits above ``floors``: FIRST_ROOM places each for the FIRST chunks, then ROOM for every chunk.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    t = tl.load(temperature + row)
    filtered = (t != 0.0) & ((tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0))
    t = tl.where(t == 0.0, 1.0, t)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    x = scale(x, t)
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    at = row * chunks + chunk
    tl.store(peaks + at, peak)
    tl.store(best + at, tl.min(tl.where(x == peak, i, vocab - 1), 0))
    tl.store(masses + at, tl.sum(tl.exp(x - base), 0))
    if filtered:
        early = chunk < FIRST
        start = tl.where(early, chunk * FIRST_ROOM, FIRST * FIRST_ROOM + chunk * ROOM)
        room = tl.where(early, FIRST_ROOM, ROOM)
        _list(x, i, base, at, row * LISTED + start, room, floors, counts, values, ids)
