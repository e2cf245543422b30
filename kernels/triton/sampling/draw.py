"""Drawing tokens without sorting, in two launches, and three more that few rows need.

The first reads the logits over all multiprocessors. It leaves of each chunk its maximum and its mass, with which greedy
rows and rows without a filter are as good as done, and a list of the candidates near its maximum. The second has one
program a row and searches the cut of top-k, top-p and min-p among the listed alone. A cut that may lie below what was
listed (many nearly equal logits) is searched in the whole row, by the same rules (``flat``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import sampling as reference
from ..launch import launch, needs, power_of_2
from .chunks import chunk_kernel
from .flat import flat_kernel, leave_pivots, list_kernel, weigh_kernel
from .search import (
    BOTTOM,
    NOTHING,
    base_of,
    best_mass,
    choose_id,
    choose_part,
    chunk_weights,
    kept_mass,
    mass_limit,
    read_block,
    row_best,
    row_filters,
    row_peak,
    scaled_below,
    search_listed,
    sums,
    to_steps,
    weight_of,
)

CHUNK = 2048
LISTED, PART = 4096, 64  # candidates of a row, all chunks together; of which so many are looked at in the end
FIRST = 8  # chunks that share half of them: ids are given out by falling frequency
BETWEEN = 16384  # logits of a row between two pivots that are searched
PROGRAMS = 2048  # of a launch that most rows leave; more rows share them
SURE = tl.constexpr(1e-4)  # more than rounding moves a scaled logit


@triton.jit
def _read_listed(
    counts, listed, row, at, peak, t, chunks, LISTED: tl.constexpr, FIRST: tl.constexpr, FIRST_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """(ids, steps below the maximum) of places ``at`` of a row's lists; as if banned where there is nothing."""
    early, later = at < FIRST * FIRST_ROOM, at - FIRST * FIRST_ROOM
    of_chunk = tl.where(early, at // FIRST_ROOM, later // ROOM)
    there = (of_chunk < chunks) & (early | (of_chunk >= FIRST))
    rank = tl.where(early, at % FIRST_ROOM, later % ROOM)
    present = rank < tl.load(counts + row * chunks + of_chunk, mask=there, other=0)
    entry = tl.load(listed + row * LISTED + at, mask=present, other=0)
    below = scaled_below((entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), peak, t)
    return entry.to(tl.int32), to_steps(tl.where(present, below, NOTHING))


@triton.jit
def _draw_listed(
    floors, counts, listed, row, chunk_below, peak, t, k, p, whole, least, uniform, vocab, chunks,
    WIDTH: tl.constexpr, LISTED: tl.constexpr, FIRST: tl.constexpr, FIRST_ROOM: tl.constexpr, ROOM: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """The token drawn among the listed candidates, or -1 where something that was not listed may have to be kept."""
    chunk = tl.arange(0, WIDTH)
    floor = tl.load(floors + row * chunks + chunk, mask=chunk < chunks, other=NOTHING) + chunk_below
    low = tl.maximum(to_steps(tl.max(floor, 0) + SURE), BOTTOM)
    at = tl.arange(0, LISTED)
    _, steps = _read_listed(counts, listed, row, at, peak, t, chunks, LISTED, FIRST, FIRST_ROOM, ROOM)
    weight = weight_of(steps)
    count, mass = sums(steps > low, weight)
    count = count.to(tl.int32)
    threshold, ties, found = low, vocab * 0, vocab * 0 - 1
    limit, none = mass_limit(p, whole), count * 0
    complete = (low == BOTTOM) | (weight_of(low) * 1.0001 < least)
    if (k <= vocab) & (p < 1.0):  # p is a share of what the k best weigh
        complete = low == BOTTOM
        if count >= k:
            last, some = search_listed(steps, weight, k, float("inf"), low, low * 0, count, none, mass * 0.0, vocab)
            limit = mass_limit(p, kept_mass(steps, weight, last, some))
        elif low > BOTTOM:
            limit = mass * 0.0 + float("inf")  # not known
    if (count >= k) | (mass >= limit):
        threshold, ties = search_listed(steps, weight, k, limit, low, low * 0, count, none, mass * 0.0, vocab)
        complete = k == k
    if complete:
        PARTS: tl.constexpr = LISTED // PART
        ties = tl.where(weight_of(threshold) >= least, ties, 0)
        surely = tl.where((steps > threshold) & (weight >= least), weight, 0.0)
        part_mass = tl.sum(tl.reshape(surely, [PARTS, PART]), 1)
        tied = tl.sum(tl.reshape((steps == threshold).to(tl.int32), [PARTS, PART]), 1)
        left = ties - (tl.cumsum(tied, 0) - tied)
        part_mass += tl.minimum(tl.maximum(left, 0), tied) * weight_of(threshold)
        hit, target = choose_part(part_mass, uniform, PARTS)
        ties = tl.sum(tl.where(tl.arange(0, PARTS) == hit, left, 0), 0)
        places = hit * PART + tl.arange(0, PART)
        i, some = _read_listed(counts, listed, row, places, peak, t, chunks, LISTED, FIRST, FIRST_ROOM, ROOM)
        # lists are in ascending order of ids
        found = choose_id(i, some, threshold, ties, least, target, vocab)
    return found


@triton.jit
def draw_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    u,
    peaks,
    best,
    masses,
    floors,
    counts,
    listed,
    out,
    limits,
    pivots,
    vocab,
    stride,
    chunks,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """One row; -1 where what is listed does not decide, and for the next launches pivots and the mass at which top-p
    ends (``limits`` [rows]). WIDTH: a power of two that holds the chunks; for the lists see ``chunk_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk_peak, peak = row_peak(peaks, row, chunks, WIDTH)
    top = row_best(best, row, chunk_peak, peak, vocab, chunks, WIDTH)
    t, k, least = row_filters(temperature, top_k, min_p, row, vocab)
    if t == 0.0:
        tl.store(out + row, top.to(tl.int64))
        return
    base, row_start, p = base_of(peak), logits + row * stride, tl.load(top_p + row)
    mass = chunk_weights(masses, row, chunk_peak, base, t, chunks, WIDTH)
    uniform = tl.load(u + row).to(tl.float64)
    if (k > vocab) & (p >= 1.0) & (least <= 0.0):
        hit, target = choose_part(mass, uniform, WIDTH)
        i, _weight, steps = read_block(row_start, hit * CHUNK, t, base, vocab, CHUNK)
        found = choose_id(i, steps, BOTTOM, 0, 0.0, target, vocab)
    else:
        whole = tl.sum(mass, 0)
        chunk_below = scaled_below(chunk_peak, base, t)
        found = _draw_listed(
            floors, counts, listed, row, chunk_below, base, t, k, p, whole, least, uniform, vocab, chunks,
            WIDTH, LISTED, FIRST, FIRST_ROOM, ROOM, PART,
        )  # fmt: skip
        if found < 0:
            if (k <= vocab) & (p < 1.0):
                whole = best_mass(row_start, t, base, vocab, k, CHUNK)
            tl.store(limits + row, mass_limit(p, whole))
            leave_pivots(row_start, t, base, vocab, pivots + row * PIVOTS, SAMPLES, PIVOTS)
    tl.store(out + row, tl.where(found == vocab, top, found).to(tl.int64))


@reference.sample.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """See the module."""
    rows, vocab = logits.shape
    chunks, device, stride = triton.cdiv(vocab, CHUNK), logits.device, logits.stride(0)
    width = power_of_2(chunks)
    lists = {"LISTED": LISTED, "FIRST": FIRST, "FIRST_ROOM": LISTED // 2 // FIRST, "ROOM": LISTED // 2 // width}
    if width <= FIRST:
        lists |= {"FIRST": width, "FIRST_ROOM": LISTED // width, "ROOM": 1}
    sizes = {"WIDTH": width, "CHUNK": CHUNK, "PIVOTS": 16 if vocab <= 12 * BETWEEN else 32}

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    peaks, masses, floors = (scratch(chunks) for _ in range(3))
    best, counts = (scratch(chunks, dtype=torch.int32) for _ in range(2))
    listed, out = scratch(LISTED, dtype=torch.int64), scratch(dtype=torch.int64)
    limits, pivots, parts = scratch(), scratch(sizes["PIVOTS"]), scratch(chunks, 2, sizes["PIVOTS"])
    most = min(BETWEEN, max(1024, power_of_2(triton.cdiv(vocab, 8))))  # twice what lies between two pivots
    between, running = scratch(most, dtype=torch.int32), scratch(most + 1)
    found, left = (peaks, best, masses, floors, counts, listed), (temperature, top_k, min_p, limits)
    launch(
        chunk_kernel, (rows, chunks), logits, temperature, top_k, top_p, min_p, *found, vocab, stride, chunks,
        warps=4, CHUNK=CHUNK, **lists,
    )  # fmt: skip
    launch(
        draw_kernel, (rows,), logits, temperature, top_k, top_p, min_p, u, *found, out, limits, pivots,
        vocab, stride, chunks, warps=8, PART=PART, **sizes, SAMPLES=256 if vocab <= 12 * BETWEEN else 512, **lists,
    )  # fmt: skip
    programs = min(chunks, max(1, PROGRAMS // max(rows, 1)))
    launch(
        weigh_kernel, (rows, programs), logits, temperature, peaks, out, pivots, parts, vocab, stride, chunks,
        warps=4, **sizes,
    )  # fmt: skip
    launch(
        list_kernel, (rows, programs), logits, *left, peaks, out, pivots, parts, between,
        vocab, stride, chunks, warps=8, **sizes, BETWEEN=most,
    )  # fmt: skip
    launch(
        flat_kernel, (rows,), logits, *left, u, peaks, best, out, pivots, parts, between, running,
        vocab, stride, chunks, warps=8, **sizes, BETWEEN=most,
    )  # fmt: skip
    return out
