"""Where the sequences of a step and their chunks begin, and the slots of what they keep; shared by the kernels of
states."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

HELD = 2048  # numbers of a state that a warp holds: 64 registers of a thread
CHUNK = 64  # tokens whose sums are products of matrices
SHORT = 16  # tokens up to which a sequence is walked token by token, whatever else is in the step
GONE = tl.constexpr(-100.0)  # exp of this is nothing in float32; sums of larger ones would lose what comes after
CHUNKED = (torch.bfloat16, torch.float16)  # activations that tensor cores take; float32 is for parity


@triton.jit
def bounds(starts, sequence):
    """(first, stop) of the sequence's tokens; without ``starts`` each has one."""
    if starts is None:
        return sequence, sequence + 1
    else:
        return tl.load(starts + sequence), tl.load(starts + sequence + 1)


@triton.jit
def slots(table, sequence, table_stride):
    """int64 (slot that a sequence's state is read from or -1, slot that takes the new one)."""
    at = table + sequence * table_stride
    return tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)


@triton.jit
def chunk_at(starts, sequences, number, SHORT: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    """(first token, stop of its sequence) of chunk ``number``, counted over the sequences of more than SHORT tokens,
    which are looked through SPAN at a time.
    """
    first, stop, before = 0, 0, 0
    for at in range(0, sequences, SPAN):
        s = at + tl.arange(0, SPAN)
        begins = tl.load(starts + s, mask=s < sequences, other=0)
        ends = tl.load(starts + s + 1, mask=s < sequences, other=0)
        chunks = tl.where(ends - begins > SHORT, tl.cdiv(ends - begins, CHUNK), 0)
        behind = before + tl.cumsum(chunks, 0)
        mine = (number >= behind - chunks) & (number < behind)
        first += tl.sum(tl.where(mine, begins + (number - behind + chunks) * CHUNK, 0), 0)
        stop += tl.sum(tl.where(mine, ends, 0), 0)
        before += tl.sum(chunks, 0)
    return first, stop


@triton.jit
def tile(x, first, stop, stride, i, j, WIDTH: tl.constexpr):
    """Rows ``first + i`` below ``stop`` of ``x``, columns ``j`` below WIDTH; 0 elsewhere."""
    row = first + i
    at = x + row.to(tl.int64)[:, None] * stride + j[None, :]  # not first * stride: what stays the same fills registers
    return tl.load(at, mask=(row < stop)[:, None] & (j < WIDTH)[None, :], other=0.0)


@triton.jit
def falling(total, i):
    """exp(total[i] - total[j]) for j up to i, else 0, of the running sums ``total`` of tokens ``i`` of a chunk."""
    return tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))


@triton.jit
def state_at(states, slot, head, i, j, HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers to rows ``i`` and columns ``j`` of a head's state; ``states``: [slots, HEADS, ROWS, COLS]."""
    return states + (slot * HEADS + head) * (ROWS * COLS) + i[:, None] * COLS + j[None, :]


@triton.jit
def read_state(states, slot, head, i, j, HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows ``i`` and columns ``j`` of a head's state, see ``state_at``; 0 beyond it, and all of it where slot is -1."""
    rows = i < tl.where(slot >= 0, ROWS, 0)
    at = state_at(states, slot, head, i, j, HEADS, ROWS, COLS)
    return tl.load(at, mask=rows[:, None] & (j < COLS)[None, :], other=0.0)


@triton.jit
def write_state(state, states, slot, head, i, j, HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Put what ``read_state`` reads."""
    at = state_at(states, slot, head, i, j, HEADS, ROWS, COLS)
    tl.store(at, state, mask=(i < ROWS)[:, None] & (j < COLS)[None, :])


def starts_of(cu_seqlens: np.ndarray, starts: Tensor | None, tokens: int, table: Tensor) -> Tensor | None:
    """What ``bounds`` takes: None where each of the sequences of ``table`` has one of the ``tokens``."""
    if tokens == len(table):
        return None
    return starts if starts is not None else torch.from_numpy(np.asarray(cu_seqlens, np.int32)).to(table.device)


def parts_of(cu_seqlens: np.ndarray, tokens: int, table: Tensor, dtype: torch.dtype) -> tuple[bool, int]:
    """(whether any sequence is walked token by token, how many chunks the others have)."""
    if tokens == len(table) or dtype not in CHUNKED:
        return True, 0
    new = np.diff(cu_seqlens)
    return bool((new <= SHORT).any()), int((-(-new[new > SHORT] // CHUNK)).sum())


def by_head(x: Tensor) -> Tensor:
    """``x`` [T, heads, size] where a token's numbers lie together, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
