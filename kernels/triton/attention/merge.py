"""The merge of partial results: one token's ranges of keys, in order (Dao, "Flash-Decoding", 2023)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..codes import cast
from ..launch import launch, let_next_begin, power_of_2
from .plan import Tiles
from .tile import LOG2E


@triton.jit
def merge_kernel(
    merges,
    part_sums,
    part_norms,
    sinks,
    out,
    heads,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token whose keys were cut into ranges, query head): the weighted mean of its partial results."""
    let_next_begin(EARLY)
    merge = merges + tl.program_id(0) * 4
    query_head = tl.program_id(1)
    row, token = tl.load(merge).to(tl.int64), tl.load(merge + 1)
    first, count = tl.load(merge + 2).to(tl.int64), tl.load(merge + 3)
    column = tl.arange(0, COLS)
    m = tl.full([1], float("-inf"), tl.float32)
    denominator = tl.zeros([1], tl.float32)
    if SINKS:
        m = tl.full([1], 1.0, tl.float32) * tl.load(sinks + query_head).to(tl.float32) * LOG2E
        denominator = tl.full([1], 1.0, tl.float32)
    acc = tl.zeros([COLS], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = part < count
        slot = ((first + part) * heads + query_head // GROUP) * ROWS + token * GROUP + query_head % GROUP
        peaks = tl.load(part_norms + slot * 2, mask=inside, other=float("-inf"))
        weights = tl.load(part_norms + slot * 2 + 1, mask=inside, other=0.0)
        filled = inside[:, None] & (column < HEAD_DIM)[None, :]
        sums = tl.load(part_sums + slot[:, None] * HEAD_DIM + column[None, :], mask=filled, other=0.0)
        top = tl.maximum(m, tl.max(peaks, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        shrink, factor = tl.exp2(m - base), tl.exp2(peaks - base)
        acc = acc * shrink + tl.sum(sums * factor[:, None], 0)
        denominator = denominator * shrink + tl.sum(weights * factor, 0)
        m = top
    result = acc / tl.where(denominator == 0.0, 1.0, denominator)
    target = (row * (heads * GROUP) + query_head) * HEAD_DIM + column
    tl.store(
        out + target,
        cast(result, out.dtype.element_ty),
        mask=(column < HEAD_DIM) & (tl.full([COLS], 0, tl.int32) < count),
    )


def merge(out: Tensor, tiles: Tiles, sums: Any, norms: Any, sinks: Tensor | None, kv_heads: int) -> None:
    """Write the rows of ``out`` whose keys were cut into ranges."""
    heads, dim = out.shape[1:]
    launch(
        merge_kernel,
        (tiles.merges.shape[0], heads),
        tiles.merges,
        sums,
        norms,
        sinks,
        out,
        kv_heads,
        warps=4,
        HEAD_DIM=dim,
        GROUP=heads // kv_heads,
        COLS=power_of_2(dim),
        ROWS=tiles.block_rows,
        PARTS=16,
        SINKS=sinks is not None,
    )
