"""Mamba-2's recurrence in chunks of 64 tokens, by products of matrices (Dao and Gu, "Transformers are SSMs", 2024).

Of a chunk that begins with state H, let γ be the running sum of a · dt, F[i, j] = exp(γ[i] − γ[j]) dt[j] for j ≤ i,
else 0:

    y = exp(γ) c Hᵀ + (c bᵀ ∘ F) x + skip · x        H ← exp(γ_last) H + (exp(γ_last − γ) dt x)ᵀ b

A program walks over the chunks of a sequence with some rows of a head's state in registers. From chunk to chunk only
the state waits, for one product; so what lies inside a chunk needs no kernel of its own. The state is rounded for the
tensor cores twice, as a number and what that leaves: once would be more than a sum over c may differ by.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import cast
from ..launch import dot_dtype, launch, power_of_2
from .slots import CHUNK, GONE, SHORT, bounds, falling, read_state, slots, tile, write_state

WIDEST = 128  # columns of a state, which a program holds all of
MOST_COLUMNS = 32  # of a state held as columns: with 64 the loop would spill


@triton.jit(do_not_specialize=["table_stride"])
def scan_walk_kernel(
    x,
    dt,
    a,
    b,
    c,
    skip,
    states,
    table,
    starts,
    out,
    x_stride,
    b_stride,
    c_stride,
    table_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
    UNIT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (one of PARTS blocks of COLS rows of a head's state [DIM, SIZE], held as columns; sequence of more than
    SHORT tokens).
    """
    sequence = tl.program_id(1)
    begin, stop = bounds(starts, sequence)
    if stop - begin <= SHORT:
        return
    read, write = slots(table, sequence, table_stride)
    head = tl.program_id(0) // PARTS
    i, n = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    p = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)
    state = tl.trans(read_state(states, read, head, p, n, HEADS, DIM, SIZE))
    rate, through = tl.load(a + head), tl.load(skip + head)
    shared = head // SHARE * SIZE
    for number in range(tl.cdiv(stop - begin, CHUNK)):
        first = begin + number * CHUNK
        live = first + i < stop
        at = (first.to(tl.int64) + i) * HEADS + head
        step = tl.load(dt + at, mask=live, other=0.0)
        total = tl.cumsum(tl.maximum(rate * step, GONE), 0)
        last = tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0)
        keys = tile(b + shared, first, stop, b_stride, i, n, SIZE).to(DOT)
        queries = tile(c + shared, first, stop, c_stride, i, n, SIZE).to(DOT)
        u = tile(x + head * DIM, first, stop, x_stride, i, p, DIM)
        seen = tl.dot(queries, tl.trans(keys), input_precision="ieee") * falling(total, i) * step[None, :]
        kept = (state * (1.0 / UNIT)).to(DOT)
        y = tl.dot(queries, (state - kept.to(tl.float32) * UNIT).to(DOT), input_precision="ieee") * (1.0 / UNIT)
        y = tl.dot(queries, kept, y, input_precision="ieee")
        y = tl.dot(seen.to(DOT), u.to(DOT), y * (tl.exp(total) * UNIT)[:, None], input_precision="ieee")
        added = (u.to(tl.float32) * (step * tl.exp(last - total))[:, None]).to(DOT)
        state = tl.dot(tl.trans(keys), added, state * tl.exp(last), input_precision="ieee")
        y = cast(y + through * u.to(tl.float32), out.dtype.element_ty)
        tl.store(out + at[:, None] * DIM + p[None, :], y, mask=live[:, None] & (p < DIM)[None, :])
    write_state(tl.trans(state), states, write, head, p, n, HEADS, DIM, SIZE)


def scan_chunks(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    table: Tensor,
    starts: Tensor,
    out: Tensor,
) -> None:
    """``state_scan`` of the sequences of more than SHORT tokens, in one launch."""
    (_, heads, dim), size = x.shape, b.shape[2]
    rows = max(16, power_of_2(size))
    columns = min(MOST_COLUMNS, max(16, power_of_2(dim)))
    parts = triton.cdiv(dim, columns)
    launch(
        scan_walk_kernel,
        (heads * parts, len(table)),
        *(x, dt, a, b, c, skip, states, table, starts, out),
        *(x.stride(0), b.stride(0), c.stride(0), table.stride(0)),
        warps=8,
        HEADS=heads,
        SHARE=heads // b.shape[1],
        DIM=dim,
        SIZE=size,
        ROWS=rows,
        COLS=columns,
        PARTS=parts,
        SHORT=SHORT,
        CHUNK=CHUNK,
        UNIT=256.0 if x.dtype == torch.float16 else 1.0,  # sums over many tokens may be beyond fp16's 65504
        DOT=dot_dtype(x.dtype),
    )
