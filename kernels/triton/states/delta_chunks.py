"""The gated delta rule in chunks of 64 tokens, by products of matrices (Yang et al., "Gated Delta Networks", 2024).

Of a chunk that begins with state S, let γ be the running sum of ``fade``, F[i, j] = exp(γ[i] − γ[j]) for j ≤ i, else 0.
What its tokens add to the state solves (I + A) D = R with R = beta (v − exp(γ) k S) and A = beta (k kᵀ) F below the
diagonal. With T = (I + A)⁻¹, which no state is needed for,

    y = exp(γ) q S + [(q kᵀ ∘ F) T] R        S ← exp(γ_last) S + [Tᵀ exp(γ_last − γ) k]ᵀ R

One kernel makes what stands in brackets, of all chunks at once. Another walks over the chunks of a sequence with some
columns of a head's state in registers. R is what T is usually applied to (the WY form's W and U): applied to queries
and keys instead it needs no second copy of the values, and what is rounded for the tensor cores is no larger than v,
however alike keys are. Differences of γ are taken before the exponential, so that nothing overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import cast
from ..launch import dot_dtype, launch, power_of_2
from .slots import CHUNK, GONE, SHORT, bounds, chunk_at, falling, read_state, slots, tile, write_state

WIDEST = 128  # rows of a state, which a program holds all of
MOST_COLUMNS = 64  # of a state
SPAN = 256  # sequences that are looked through at once


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """``a`` @ ``b`` in a precision of ``tl.dot`` or as "halves": float32 as fp16 and what that leaves, as exact as tf32
    in three parts and in half of the registers. For numbers of about 1.
    """
    if PRECISION == "halves":
        high_a, high_b = a.to(tl.float16), b.to(tl.float16)
        y = tl.dot((a - high_a.to(tl.float32)).to(tl.float16), high_b, input_precision="ieee")
        if b.dtype == tl.float32:
            y = tl.dot(high_a, (b - high_b.to(tl.float32)).to(tl.float16), y, input_precision="ieee")
        return tl.dot(high_a, high_b, y, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def widened(t, a, i, j, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """``t``: the inverses of the blocks of SIZE on the diagonal of I + ``a``; returns those of blocks twice as large.
    ``i``, ``j``: row and column.
    """
    below = (i // SIZE == j // SIZE + 1) & (j // SIZE % 2 == 0)
    return t - product(t, product(tl.where(below, a, 0.0), t, PRECISION), PRECISION)


@triton.jit
def inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + ``a``)⁻¹ of ``a`` [CHUNK, CHUNK], 0 on and above the diagonal: first all blocks of 16 at once, then larger
    ones in PRECISION.
    """
    n, r = tl.arange(0, CHUNK // 16), tl.arange(0, 16)
    own = n[:, None, None, None] == n[None, None, :, None]
    small = tl.sum(tl.where(own, tl.reshape(a, [CHUNK // 16, 16, CHUNK // 16, 16]), 0.0), 2)
    i, j = r[None, :, None], r[None, None, :]
    t = tl.where(i == j, 1.0, 0.0) - tl.where((i == j + 1) & (j % 2 == 0), small, 0.0)
    t = widened(t, small, i, j, 2, "tf32x3")
    t = widened(t, small, i, j, 4, "tf32x3")
    t = widened(t, small, i, j, 8, "tf32x3")
    t = tl.reshape(tl.where(own, t[:, :, None, :], 0.0), [CHUNK, CHUNK])
    c = tl.arange(0, CHUNK)
    t = widened(t, a, c[:, None], c[None, :], 16, PRECISION)
    return widened(t, a, c[:, None], c[None, :], 32, PRECISION)


@triton.jit(do_not_specialize=["sequences"])
def delta_prepare_kernel(
    q,
    k,
    fade,
    beta,
    starts,
    gone,
    inside,
    into,
    q_stride,
    k_stride,
    sequences,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (head, chunk). Writes γ to ``gone`` [T, HEADS], and the brackets to ``inside`` [T, HEADS, CHUNK] and
    ``into`` [T, HEADS, K_DIM].
    """
    head = tl.program_id(0)
    first, stop = chunk_at(starts, sequences, tl.program_id(1), SHORT, CHUNK, SPAN)
    i, d = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    live = first + i < stop
    at = (first.to(tl.int64) + i) * HEADS + head
    total = tl.cumsum(tl.maximum(tl.load(fade + at, mask=live, other=0.0), GONE), 0)
    tl.store(gone + at, total, mask=live)
    rate = tl.load(beta + at, mask=live, other=0.0)
    shared = head // SHARE * K_DIM
    keys = tile(k + shared, first, stop, k_stride, i, d, K_DIM).to(DOT)
    queries = tile(q + shared, first, stop, q_stride, i, d, K_DIM).to(DOT)
    left = falling(total, i)
    alike = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    t = inverse(tl.where(i[:, None] > i[None, :], alike * left * rate[:, None], 0.0), CHUNK, PRECISION)
    seen = tl.dot(queries, tl.trans(keys), input_precision="ieee") * left
    made = cast(product(seen, t, PRECISION), inside.dtype.element_ty)
    tl.store(inside + at[:, None] * CHUNK + i[None, :], made, mask=live[:, None])
    turned = tl.trans(t * tl.exp(tl.sum(tl.where(i == CHUNK - 1, total, 0.0), 0) - total)[:, None])
    exact = keys if PRECISION == "halves" else keys.to(tl.float32)
    made = cast(product(turned, exact, PRECISION), into.dtype.element_ty)
    tl.store(into + at[:, None] * K_DIM + d[None, :], made, mask=live[:, None] & (d < K_DIM)[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def delta_walk_kernel(
    q,
    k,
    v,
    beta,
    gone,
    inside,
    into,
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
    SHORT: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (one of PARTS blocks of COLS columns of a head's state [K_DIM, V_DIM], sequence of more than SHORT
    tokens).
    """
    sequence = tl.program_id(1)
    begin, stop = bounds(starts, sequence)
    if stop - begin <= SHORT:
        return
    read, write = slots(table, sequence, table_stride)
    head = tl.program_id(0) // PARTS
    i, d = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    j = tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)
    state = read_state(states, read, head, d, j, HEADS, K_DIM, V_DIM)
    shared = head // SHARE * K_DIM
    for number in range(tl.cdiv(stop - begin, CHUNK)):
        first = begin + number * CHUNK
        live = first + i < stop
        at = (first.to(tl.int64) + i) * HEADS + head
        last = tl.load(gone + (tl.minimum(first + CHUNK, stop).to(tl.int64) - 1) * HEADS + head)
        fallen = tl.exp(tl.load(gone + at, mask=live, other=0.0))
        rate = tl.load(beta + at, mask=live, other=0.0)
        keys = tile(k + shared, first, stop, k_stride, i, d, K_DIM).to(DOT)
        queries = tile(q + shared, first, stop, q_stride, i, d, K_DIM).to(DOT)
        values = tile(v + head * V_DIM, first, stop, v_stride, i, j, V_DIM).to(tl.float32)
        seen = tile(inside + head * CHUNK, first, stop, HEADS * CHUNK, i, i, CHUNK).to(DOT)
        add = tile(into + head * K_DIM, first, stop, HEADS * K_DIM, i, d, K_DIM).to(DOT)
        kept = state.to(DOT)
        known = tl.dot(keys, kept, input_precision="ieee") * fallen[:, None]
        missing = (rate[:, None] * (values - known)).to(DOT)
        y = tl.dot(queries, kept, input_precision="ieee") * fallen[:, None]
        y = tl.dot(seen, missing, y, input_precision="ieee")
        state = tl.dot(tl.trans(add), missing, state * tl.exp(last), input_precision="ieee")
        target = out + at[:, None] * V_DIM + j[None, :]
        tl.store(target, cast(y, out.dtype.element_ty), mask=live[:, None] & (j < V_DIM)[None, :])
    write_state(state, states, write, head, d, j, HEADS, K_DIM, V_DIM)


def delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fade: Tensor,
    beta: Tensor,
    states: Tensor,
    table: Tensor,
    starts: Tensor,
    out: Tensor,
    chunks: int,
) -> None:
    """``delta_rule`` of the sequences of more than SHORT tokens, which have ``chunks`` chunks in all; two launches."""
    (tokens, heads, v_dim), k_dim, device = v.shape, k.shape[2], v.device
    rows, dot = max(16, power_of_2(k_dim)), dot_dtype(v.dtype)
    columns = min(MOST_COLUMNS, max(16, power_of_2(v_dim)))
    gone = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    inside = torch.empty(tokens, heads, CHUNK, dtype=v.dtype, device=device)
    into = torch.empty(tokens, heads, k_dim, dtype=v.dtype, device=device)
    sizes = {"HEADS": heads, "SHARE": heads // k.shape[1], "K_DIM": k_dim, "ROWS": rows, "SHORT": SHORT}
    sizes |= {"CHUNK": CHUNK, "DOT": dot}
    strides, many = (q.stride(0), k.stride(0)), len(table)
    narrow = v.dtype == torch.float16  # what tf32 loses adds up to more than its tolerance where keys are alike
    launch(
        delta_prepare_kernel,
        (heads, chunks),
        *(q, k, fade, beta, starts, gone, inside, into),
        *(*strides, many),
        warps=8 if narrow else 4,
        SPAN=SPAN,
        PRECISION="halves" if narrow else "tf32",
        **sizes,
    )
    parts = triton.cdiv(v_dim, columns)
    launch(
        delta_walk_kernel,
        (heads * parts, many),
        *(q, k, v, beta, gone, inside, into, states, table, starts, out),
        *(*strides, v.stride(0), table.stride(0)),
        warps=8,
        V_DIM=v_dim,
        COLS=columns,
        PARTS=parts,
        **sizes,
    )
