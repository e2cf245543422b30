"""Drawing tokens without sorting, in two launches, and two more that few rows need.

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
from .flat import flat_kernel, weigh_kernel
from .search import BOTTOM, UNIT, read_block, search_listed, steps_below

CHUNK, PASS_BLOCK, THRESHOLDS = 4096, 512, 8
PIVOTS, PIVOT_BLOCK = 128, 32
LISTED = 8192  # candidates of a row, all chunks together
FIRST = 4  # chunks that share half of them: ids are given out by falling frequency


@triton.jit
def _draw_unfiltered(
    row_start, t, peak, best, chunk_mass, uniform, vocab, chunks, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """The token at ``uniform`` of a row's mass: the chunk is known from the masses, so that one is read."""
    chunk = tl.arange(0, WIDTH)
    mass = chunk_mass.to(tl.float64)
    target = uniform * tl.sum(mass, 0)
    hit = tl.min(tl.where((tl.cumsum(mass, 0) > target) & (chunk < chunks), chunk, chunks - 1), 0)
    i, weight, _ = read_block(row_start, hit * CHUNK, t, peak, vocab, CHUNK)
    upto = tl.sum(tl.where(chunk < hit, mass, 0.0), 0) + tl.cumsum(weight.to(tl.float64), 0)
    found = tl.min(tl.where((upto > target) & (weight > 0.0), i, vocab), 0)
    return tl.where(found == vocab, best, found)


@triton.jit
def _draw_place(weight, uniform, LISTED: tl.constexpr):
    """The first place whose weight takes the running sum above ``uniform`` of all, or LISTED where there is none.

    A quarter is found by its sum and searched alone: float64 sums of all would not fit the registers.
    """
    part = tl.arange(0, 4)
    quarters = tl.reshape(weight, [4, LISTED // 4])
    mass = tl.sum(quarters.to(tl.float64), 1)
    target = uniform * tl.sum(mass, 0)
    hit = tl.min(tl.where(tl.cumsum(mass, 0) > target, part, 3), 0)
    quarter = tl.sum(tl.where((part == hit)[:, None], quarters, 0.0), 0)
    upto = tl.sum(tl.where(part < hit, mass, 0.0), 0) + tl.cumsum(quarter.to(tl.float64), 0)
    at = hit * (LISTED // 4) + tl.arange(0, LISTED // 4)
    return tl.min(tl.where((upto > target) & (quarter > 0.0), at, LISTED), 0)


@triton.jit
def _draw_listed(
    floors, counts, values, ids, row, peak, k, limit, least, uniform, vocab, chunks,
    WIDTH: tl.constexpr, LISTED: tl.constexpr, FIRST: tl.constexpr, FIRST_ROOM: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The token drawn among the listed candidates, or -1 where something that was not listed may have to be kept."""
    chunk = tl.arange(0, WIDTH)
    floor = tl.max(tl.load(floors + row * chunks + chunk, mask=chunk < chunks, other=float("-inf")), 0)
    at = tl.arange(0, LISTED)
    early, later = at < FIRST * FIRST_ROOM, at - FIRST * FIRST_ROOM
    of_chunk = tl.where(early, at // FIRST_ROOM, later // ROOM)
    there = (of_chunk < chunks) & (early | (of_chunk >= FIRST))
    rank = tl.where(early, at % FIRST_ROOM, later % ROOM)
    present = rank < tl.load(counts + row * chunks + of_chunk, mask=there, other=0)
    x = tl.load(values + row * LISTED + at, mask=present, other=float("-inf"))
    steps, weight = steps_below(x, peak), tl.exp(x - peak)
    low = tl.maximum(steps_below(floor, peak), BOTTOM)
    over = steps > low
    count, mass = tl.sum(over.to(tl.int32), 0), tl.sum(tl.where(over, weight, 0.0), 0)
    threshold, ties = low, vocab * 0
    complete = (low == BOTTOM) | (tl.exp(low.to(tl.float32) / UNIT) * 1.0001 < least)
    if (count >= k) | (mass >= limit):
        none = count * 0
        threshold, ties = search_listed(steps, weight, k, limit, low, low * 0, count, none, mass * 0.0, vocab)
        complete = k == k
    tie = steps == threshold
    kept = steps > threshold
    if ties > 0:
        kept = kept | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= ties))
    kept = kept & (weight >= least)  # what is absent lies below every threshold
    place = _draw_place(tl.where(kept, weight, 0.0), uniform, LISTED)
    # lists are in ascending order of ids: the first place is the lowest id, and one id is read, not all of them
    found = tl.load(ids + row * LISTED + place, mask=place < LISTED, other=0)
    return tl.where(complete, tl.where(place < LISTED, found, vocab), -1)


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
    values,
    ids,
    out,
    vocab,
    stride,
    chunks,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_ROOM: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row; -1 where what is listed does not decide. WIDTH: a power of two that holds the chunks; for the lists see
    ``chunk_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDTH)
    there = chunk < chunks
    chunk_peak = tl.load(peaks + row * chunks + chunk, mask=there, other=float("-inf"))
    peak = tl.max(chunk_peak, 0)
    of_chunk = tl.load(best + row * chunks + chunk, mask=there, other=0)
    top = tl.min(tl.where(there & (chunk_peak == peak), of_chunk, vocab - 1), 0)
    t = tl.load(temperature + row)
    if t == 0.0:
        tl.store(out + row, top.to(tl.int64))
        return
    base = tl.where(peak == float("-inf"), 0.0, peak)
    chunk_mass = tl.load(masses + row * chunks + chunk, mask=there, other=0.0) * tl.exp(chunk_peak - base)
    whole = tl.sum(chunk_mass, 0)
    row_start = logits + row * stride
    uniform = tl.load(u + row).to(tl.float64)
    k, p, least = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row), tl.load(min_p + row)
    limit = tl.where(p >= 1.0, float("inf"), tl.maximum(p, 1e-30) * whole)
    k = tl.where(k == 0, vocab + 1, k)
    if (k > vocab) & (p >= 1.0) & (least <= 0.0):
        found = _draw_unfiltered(row_start, t, peak, top, chunk_mass, uniform, vocab, chunks, WIDTH, CHUNK)
    else:
        found = _draw_listed(
            floors, counts, values, ids, row, base, k, limit, least, uniform, vocab, chunks,
            WIDTH, LISTED, FIRST, FIRST_ROOM, ROOM,
        )  # fmt: skip
    tl.store(out + row, tl.where(found == vocab, top, found).to(tl.int64))


@reference.sample.register("triton", devices=("cuda",), dtypes=("float32",), unsupported=needs())
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """See the module."""
    rows, vocab = logits.shape
    chunks, device, stride = triton.cdiv(vocab, CHUNK), logits.device, logits.stride(0)
    width = power_of_2(chunks)
    lists = {"LISTED": LISTED, "FIRST": FIRST, "FIRST_ROOM": LISTED // 2 // FIRST, "ROOM": LISTED // 2 // width}
    if width <= FIRST:
        lists |= {"FIRST": width, "FIRST_ROOM": LISTED // width, "ROOM": 1}
    peaks, masses, floors = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(3))
    best, counts = (torch.empty(rows, chunks, dtype=torch.int32, device=device) for _ in range(2))
    values = torch.empty(rows, LISTED, dtype=torch.float32, device=device)
    ids = torch.empty(rows, LISTED, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    filters, found = (temperature, top_k, top_p, min_p), (peaks, best, masses, floors, counts, values, ids)
    launch(
        chunk_kernel, (rows, chunks), logits, *filters, *found, vocab, stride, chunks,
        warps=8, CHUNK=CHUNK, **lists,
    )  # fmt: skip
    launch(
        draw_kernel, (rows,), logits, *filters, u, *found, out, vocab, stride, chunks,
        warps=16, WIDTH=width, CHUNK=CHUNK, **lists,
    )  # fmt: skip
    part_counts = torch.empty(rows, chunks, PIVOTS, dtype=torch.int32, device=device)
    part_masses = torch.empty(rows, chunks, PIVOTS, dtype=torch.float32, device=device)
    launch(
        weigh_kernel, (rows, chunks), logits, temperature, peaks, out, part_counts, part_masses, vocab, stride, chunks,
        warps=8, WIDTH=width, CHUNK=CHUNK, BLOCK=PIVOT_BLOCK, PIVOTS=PIVOTS,
    )  # fmt: skip
    launch(
        flat_kernel, (rows,), logits, *filters, u, peaks, best, masses, ids, out, part_counts, part_masses,
        vocab, stride, chunks, warps=16, WIDTH=width, LISTED=LISTED, BLOCK=CHUNK, PASS_BLOCK=PASS_BLOCK,
        THRESHOLDS=THRESHOLDS, PIVOTS=PIVOTS,
    )  # fmt: skip
    return out
