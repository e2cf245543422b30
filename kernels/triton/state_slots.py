"""Where the sequences of a step begin, and the slots of what they keep; shared by the kernels of states."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

HELD = 2048  # numbers of a state that a warp holds: 64 registers of a thread


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
def state_at(states, slot, head, i, j, HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers to rows ``i`` and columns ``j`` of a head's state; ``states``: [slots, HEADS, ROWS, COLS]."""
    return states + (slot * HEADS + head) * (ROWS * COLS) + i[:, None] * COLS + j[None, :]


def starts_of(cu_seqlens: np.ndarray, starts: Tensor | None, tokens: int, table: Tensor) -> Tensor | None:
    """What ``bounds`` takes: None where each of the sequences of ``table`` has one of the ``tokens``."""
    if tokens == len(table):
        return None
    return starts if starts is not None else torch.from_numpy(np.asarray(cu_seqlens, np.int32)).to(table.device)


def by_head(x: Tensor) -> Tensor:
    """``x`` [T, heads, size] where a token's numbers lie together, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
