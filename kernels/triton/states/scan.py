"""Mamba-2's recurrence (Dao and Gu, 2024), token by token in registers; prompts go in chunks (``scan_chunks``).

A program has some rows of one head's state, of one sequence: it reads them once, walks over the tokens and writes them
once. A decode step is bound by that memory, a prompt would be by how long a token takes after the one before it.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import recurrent as reference
from ..codes import cast
from ..launch import launch, needs, power_of_2
from .scan_chunks import WIDEST, scan_chunks
from .slots import HELD, SHORT, bounds, by_head, parts_of, read_state, slots, starts_of, write_state


@triton.jit(do_not_specialize=["table_stride"])
def state_scan_kernel(
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
    MOST: tl.constexpr,
):
    """Program (one of PARTS blocks of ROWS rows of a head's state [DIM, SIZE], sequence of up to MOST tokens). SHARE
    neighbouring heads have one b and c.
    """
    sequence = tl.program_id(1)
    begin, stop = bounds(starts, sequence)
    if stop - begin > MOST:
        return
    read, write = slots(table, sequence, table_stride)
    head = tl.program_id(0) // PARTS
    i = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLS)
    rows, columns = i < DIM, j < SIZE
    state = read_state(states, read, head, i, j, HEADS, DIM, SIZE)
    rate, through = tl.load(a + head), tl.load(skip + head)
    shared = head // SHARE * SIZE + j
    for t in range(stop - begin):
        token = begin.to(tl.int64) + t
        u = tl.load(x + token * x_stride + head * DIM + i, mask=rows, other=0.0).to(tl.float32)
        step = tl.load(dt + token * HEADS + head)
        key = tl.load(b + token * b_stride + shared, mask=columns, other=0.0).to(tl.float32)
        query = tl.load(c + token * c_stride + shared, mask=columns, other=0.0).to(tl.float32)
        state = state * tl.exp(rate * step) + (step * u)[:, None] * key[None, :]
        y = tl.sum(state * query[None, :], 1) + through * u
        tl.store(out + (token * HEADS + head) * DIM + i, cast(y, out.dtype.element_ty), mask=rows)
    write_state(state, states, write, head, i, j, HEADS, DIM, SIZE)


@reference.state_scan.register("triton", devices=("cuda",), unsupported=needs())
def state_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    table: Tensor,
    cu_seqlens: np.ndarray,
    starts: Tensor | None = None,
) -> Tensor:
    """One launch for steps of one token a sequence; reads slices of the convolved projection as they are."""
    x, b, c = by_head(x), by_head(b), by_head(c)
    assert states.is_contiguous()
    (tokens, heads, dim), size = x.shape, b.shape[2]
    dt, starts = dt.contiguous(), starts_of(cu_seqlens, starts, tokens, table)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    walked, chunks = parts_of(cu_seqlens, tokens, table, x.dtype) if size <= WIDEST else (True, 0)
    if chunks and starts is not None:
        scan_chunks(x, dt, a, b, c, skip, states, table, starts, out)
    columns = power_of_2(size)
    rows = min(power_of_2(dim), max(1, HELD // columns))
    parts = triton.cdiv(dim, rows)
    launch(
        state_scan_kernel,
        (heads * parts, len(table) if walked else 0),
        *(x, dt, a, b, c, skip, states, table, starts, out),
        *(x.stride(0), b.stride(0), c.stride(0), table.stride(0)),
        warps=1,
        HEADS=heads,
        SHARE=heads // b.shape[1],
        DIM=dim,
        SIZE=size,
        ROWS=rows,
        COLS=columns,
        PARTS=parts,
        MOST=SHORT if chunks else 1 << 30,
    )
    return out
