"""Low-rank adapters of linears over a ragged batch of tokens with different adapters.

Tokens are gathered by adapter in tiles, as the mixture of experts gathers its slots, once a step for all layers; then
one launch shrinks and one expands. Nothing returns to the host. With few tokens both launches are latency: long inputs
are therefore cut into ranges, whose sums ``expand`` adds in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import on_request
from ...reference import lora as reference
from ..codes import cast
from ..gather import Gathered, gather_by_expert
from ..launch import ALIKE_ROWS, dot_dtype, launch, needs, power_of_2, stages_of
from ..tuning import tuned

RANKS = 16  # of one program


@triton.jit(do_not_specialize=["tokens"])
def lora_shrink_kernel(
    x,
    a,
    ranks,
    order,
    tile_adapter,
    h,
    tokens,
    n_in,
    stride_x,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of an adapter's tokens by one range of inputs by COLS ranks; ``tile_adapter``: see ``group_tokens``."""
    adapter = tl.load(tile_adapter + tl.program_id(0)).to(tl.int64) - 1
    if adapter < -1:
        return
    token = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = token < tokens
    start = tl.program_id(1) * PART
    column = tl.program_id(2) * COLS + tl.arange(0, COLS)
    stop = start
    if adapter >= 0:
        if tl.program_id(2) * COLS % RANK < tl.load(ranks + adapter):
            stop = tl.minimum(start + PART, n_in)
    source = x + (tl.where(valid, token, 0).to(tl.int64) * stride_x)[:, None]
    matrix = a + (adapter * SLICES * RANK + column).to(tl.int64)[:, None] * n_in
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for k0 in range(start, stop, K):
        k = k0 + tl.arange(0, K)
        tile = tl.load(source + k[None, :], mask=valid[:, None] & (k < stop)[None, :], other=0.0).to(DOT)
        w = tl.load(matrix + k[None, :], mask=(k < stop)[None, :], other=0.0).to(DOT)
        acc = tl.dot(tile, tl.trans(w), acc, input_precision="ieee")
    row = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(h + row[:, None] * (SLICES * RANK) + column[None, :], acc, mask=valid[:, None])


@triton.jit(do_not_specialize=["tokens", "parts"])
def lora_expand_kernel(
    h,
    b,
    ranks,
    order,
    tile_adapter,
    y,
    tokens,
    parts,
    n_out,
    stride_y,
    start1,
    start2,
    start3,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of an adapter's tokens by COLS outputs of a slice, which starts at 0, start1, start2, start3, n_out.

    WIDE: a power of two that is at least RANK.
    """
    adapter = tl.load(tile_adapter + tl.program_id(0)).to(tl.int64) - 1
    s = tl.program_id(2)
    first = tl.where(s == 0, 0, tl.where(s == 1, start1, tl.where(s == 2, start2, start3)))
    last = tl.where(s == 0, start1, tl.where(s == 1, start2, tl.where(s == 2, start3, n_out)))
    column = first + tl.program_id(1) * COLS + tl.arange(0, COLS)
    if (adapter < 0) | (first + tl.program_id(1) * COLS >= last):
        return
    token = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = token < tokens
    safe = tl.where(valid, token, 0).to(tl.int64)
    rank = tl.arange(0, WIDE)
    known = (rank < tl.load(ranks + adapter))[None, :]
    w = tl.load(
        b + (adapter * n_out + column)[:, None] * RANK + rank[None, :], mask=(column < last)[:, None] & known, other=0.0
    ).to(DOT)
    total = tl.zeros([ROWS, WIDE], tl.float32)
    for part in range(parts):
        row = (part * tokens + safe) * SLICES + s
        total += tl.load(h + row[:, None] * RANK + rank[None, :], mask=valid[:, None] & known, other=0.0)
    added = tl.dot(cast(total, y.dtype.element_ty).to(DOT), tl.trans(w), input_precision="ieee")
    target = y + (safe * stride_y)[:, None] + column[None, :]
    mask = valid[:, None] & (column < last)[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, cast(before + added, y.dtype.element_ty), mask=mask)


def group_tokens(adapter: Tensor, adapters: int, alike: bool = False) -> Gathered:
    """The plan of a step: three small launches. ``adapter``: int32 [T], -1 for none. A tile's "expert" is its adapter,
    counted from 1 on, 0 for tokens without one.
    """
    rows = 16 if adapter.shape[0] <= 64 and not alike else ALIKE_ROWS
    return gather_by_expert((adapter + 1)[:, None], adapters + 1, rows)


@reference.lora_shrink.register("triton", devices=("cuda",), unsupported=needs(), plan=group_tokens, alike=on_request)
def lora_shrink(
    x: Tensor, a: Tensor, ranks: Tensor, adapter: Tensor, plan: object = None, alike: bool = False
) -> Tensor:
    """One launch where the step's plan is given."""
    if x.stride(1) != 1:
        x = x.contiguous()
    (tokens, n_in), (count, slices, rank) = x.shape, a.shape[:3]
    tiles = plan if isinstance(plan, Gathered) else group_tokens(adapter, count, alike)
    parts = triton.cdiv(n_in, reference.PART)
    h = torch.empty(parts, tokens, slices, rank, dtype=torch.float32, device=x.device)
    default = {"k": 64 if x.dtype == torch.float32 else 128, "warps": 2 if tiles.rows == 16 else 4}
    choice = tuned("lora_shrink_kernel", f"rows{tiles.rows}", default, x.device)
    stage = (tiles.rows + RANKS) * choice["k"] * x.element_size()
    choice.setdefault("stages", stages_of(x.device, stage))
    launch(
        lora_shrink_kernel,
        (tiles.tile_expert.shape[0], parts, slices * rank // RANKS),
        x,
        a,
        ranks,
        tiles.order,
        tiles.tile_expert,
        h,
        tokens,
        n_in,
        x.stride(0),
        warps=choice["warps"],
        stages=choice["stages"],
        SLICES=slices,
        RANK=rank,
        PART=reference.PART,
        ROWS=tiles.rows,
        COLS=RANKS,
        K=choice["k"],
        DOT=dot_dtype(x.dtype),
    )
    return h


@reference.lora_expand.register("triton", devices=("cuda",), unsupported=needs(), alike=on_request)
def lora_expand(
    h: Tensor,
    b: Tensor,
    ranks: Tensor,
    adapter: Tensor,
    y: Tensor,
    widths: tuple[int, ...],
    plan: object = None,
    alike: bool = False,
) -> None:
    """One launch where the step's plan is given."""
    (parts, tokens, slices, rank), (count, n_out) = h.shape, b.shape[:2]
    tiles = plan if isinstance(plan, Gathered) else group_tokens(adapter, count, alike)
    assert slices == len(widths) <= 4 and sum(widths) == n_out and y.stride(1) == 1
    starts = [sum(widths[: s + 1]) for s in range(3)]
    cols = 32 if y.dtype == torch.float32 else 64
    launch(
        lora_expand_kernel,
        (tiles.tile_expert.shape[0], triton.cdiv(max(widths), cols), slices),
        h,
        b,
        ranks,
        tiles.order,
        tiles.tile_expert,
        y,
        tokens,
        parts,
        n_out,
        y.stride(0),
        *starts,
        warps=4,
        SLICES=slices,
        RANK=rank,
        WIDE=power_of_2(rank),
        ROWS=tiles.rows,
        COLS=cols,
        DOT=dot_dtype(y.dtype),
    )
