"""Changes of the logits before a token is drawn, in place: penalties and grammar masks. One launch each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...reference import sampling as reference
from ..launch import launch, needs


@triton.jit(do_not_specialize=["entries"])
def penalize_kernel(logits, rows, ids, counts, repetition, presence, frequency, entries, stride, BLOCK: tl.constexpr):
    """BLOCK entries (row, id, count); no pair occurs twice."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = j < entries
    row = tl.load(rows + j, mask=mask, other=0).to(tl.int64)
    at = logits + row * stride + tl.load(ids + j, mask=mask, other=0).to(tl.int64)
    count = tl.load(counts + j, mask=mask, other=0.0)
    p = tl.load(repetition + row, mask=mask, other=1.0)
    seen = tl.load(at, mask=mask, other=0.0)
    seen = tl.where(seen > 0, tl.div_rn(seen, p), seen * p)
    frequent = tl.load(frequency + row, mask=mask, other=0.0) * count
    present = tl.where(count > 0, tl.load(presence + row, mask=mask, other=0.0), 0.0)
    tl.store(at, seen - (frequent + present), mask=mask)


@triton.jit
def bitmask_kernel(logits, bitmask, vocab, stride, words, BLOCK: tl.constexpr):
    """BLOCK ids of one row; only banned ones are written."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + row * words + (i >> 5), mask=i < vocab, other=-1)
    banned = (((word >> (i & 31)) & 1) == 0) & (i < vocab)
    tl.store(logits + row * stride + i, tl.full([BLOCK], float("-inf"), tl.float32), mask=banned)


@reference.penalize.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def penalize(
    logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """One launch over the entries."""
    grid = (triton.cdiv(rows.numel(), 256),)
    columns = (repetition, presence, frequency)
    launch(
        penalize_kernel, grid, logits, rows, ids, counts, *columns, rows.numel(), logits.stride(0), warps=4, BLOCK=256
    )


@reference.apply_bitmask.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """One launch; reads a bit an id."""
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, 4096))
    bits = bitmask.contiguous()
    launch(bitmask_kernel, grid, logits, bits, vocab, logits.stride(0), bits.shape[1], warps=8, BLOCK=4096)
