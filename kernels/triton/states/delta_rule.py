"""The gated delta rule (Yang et al., 2024), token by token in registers; prompts go in chunks (``delta_chunks``).

A program has some columns of one head's state, of one sequence: it reads them once, walks over the tokens and writes
them once. Columns do not depend on each other. A decode step is bound by that memory, a prompt would be by how long a
token takes after the one before it.
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
from .delta_chunks import WIDEST, delta_chunks
from .slots import HELD, SHORT, bounds, by_head, parts_of, read_state, slots, starts_of, write_state


@triton.jit(do_not_specialize=["table_stride"])
def delta_rule_kernel(
    q,
    k,
    v,
    fade,
    beta,
    states,
    table,
    starts,
    out,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Program (one of PARTS blocks of COLS columns of a head's state [K_DIM, V_DIM], sequence of up to MOST tokens).
    SHARE neighbouring heads have one q and k.
    """
    sequence = tl.program_id(1)
    begin, stop = bounds(starts, sequence)
    if stop - begin > MOST:
        return
    read, write = slots(table, sequence, table_stride)
    head = tl.program_id(0) // PARTS
    i = tl.arange(0, ROWS)
    j = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)
    rows, columns = i < K_DIM, j < V_DIM
    state = read_state(states, read, head, i, j, HEADS, K_DIM, V_DIM)
    shared = head // SHARE * K_DIM + i
    for t in range(stop - begin):
        token = begin.to(tl.int64) + t
        key = tl.load(k + token * k_stride + shared, mask=rows, other=0.0).to(tl.float32)
        query = tl.load(q + token * q_stride + shared, mask=rows, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_stride + head * V_DIM + j, mask=columns, other=0.0).to(tl.float32)
        state = state * tl.exp(tl.load(fade + token * HEADS + head))
        missing = tl.load(beta + token * HEADS + head) * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * missing[None, :]
        y = tl.sum(state * query[:, None], 0)
        tl.store(out + (token * HEADS + head) * V_DIM + j, cast(y, out.dtype.element_ty), mask=columns)
    write_state(state, states, write, head, i, j, HEADS, K_DIM, V_DIM)


@reference.delta_rule.register("triton", devices=("cuda",), unsupported=needs())
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fade: Tensor,
    beta: Tensor,
    states: Tensor,
    table: Tensor,
    cu_seqlens: np.ndarray,
    starts: Tensor | None = None,
) -> Tensor:
    """One launch for steps of one token a sequence; reads slices of the convolved projection as they are."""
    q, k, v = by_head(q), by_head(k), by_head(v)
    assert states.is_contiguous()
    (tokens, heads, v_dim), k_dim = v.shape, k.shape[2]
    fade, beta, starts = fade.contiguous(), beta.contiguous(), starts_of(cu_seqlens, starts, tokens, table)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    walked, chunks = parts_of(cu_seqlens, tokens, table, v.dtype) if k_dim <= WIDEST else (True, 0)
    if chunks and starts is not None:
        delta_chunks(q, k, v, fade, beta, states, table, starts, out, chunks)
    rows = power_of_2(k_dim)
    columns = min(power_of_2(v_dim), max(1, HELD // rows))
    parts = triton.cdiv(v_dim, columns)
    launch(
        delta_rule_kernel,
        (heads * parts, len(table) if walked else 0),
        *(q, k, v, fade, beta, states, table, starts, out),
        *(q.stride(0), k.stride(0), v.stride(0), table.stride(0)),
        warps=1,
        HEADS=heads,
        SHARE=heads // k.shape[1],
        K_DIM=k_dim,
        V_DIM=v_dim,
        ROWS=rows,
        COLS=columns,
        PARTS=parts,
        MOST=SHORT if chunks else 1 << 30,
    )
    return out
