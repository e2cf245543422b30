"""Tokens gathered by expert, or by adapter, in whole tiles, without sorting."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ALIKE_ROWS, launch, power_of_2

SCAN = 1024  # slots that a program looks at together


@triton.jit(do_not_specialize=["slots", "tiles"])
def count_kernel(experts, counts, tile_expert, tiles, slots, EXPERTS: tl.constexpr, SCAN: tl.constexpr):
    """Program e: how many slots chose expert e; and the tiles e, e + EXPERTS … are marked unused."""
    e = tl.program_id(0)
    total = tl.zeros([SCAN], tl.int32)
    for start in range(0, slots, SCAN):
        i = start + tl.arange(0, SCAN)
        total += tl.where(tl.load(experts + i, mask=i < slots, other=-1) == e, 1, 0)
    tl.store(counts + e, tl.sum(total, 0))
    for start in range(0, tiles, SCAN):
        i = start + tl.arange(0, SCAN)
        tl.store(tile_expert + i, tl.full([SCAN], -1, tl.int32), mask=(i < tiles) & (i % EXPERTS == e))


@triton.jit(do_not_specialize=["slots"])
def place_kernel(
    experts, counts, tile_expert, order, slots, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SCAN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program e: its slots in ascending order into its tiles; places left over hold ``slots``."""
    e = tl.program_id(0)
    other = tl.arange(0, WIDTH)
    sizes = tl.load(counts + other, mask=other < EXPERTS, other=0)
    first = tl.sum(tl.where(other < e, (sizes + ROWS - 1) // ROWS, 0), 0)
    mine = tl.sum(tl.where(other == e, sizes, 0), 0)
    used = (mine + ROWS - 1) // ROWS
    placed = first * ROWS
    for start in range(0, slots, SCAN):
        i = start + tl.arange(0, SCAN)
        hit = tl.where(tl.load(experts + i, mask=i < slots, other=-1) == e, 1, 0)
        at = placed + tl.cumsum(hit, 0) - 1
        tl.store(order + at, i, mask=hit == 1)
        placed += tl.sum(hit, 0)
    pad = tl.arange(0, ROWS)
    tl.store(order + placed + pad, tl.zeros([ROWS], tl.int32) + slots, mask=placed + pad < (first + used) * ROWS)
    for tile in range(first, first + used):
        tl.store(tile_expert + tile, e)


class Gathered(NamedTuple):
    """``order``: int32 [tiles · rows], the slots in each tile, undefined in unused tiles, T·k in places left over;
    ``tile_expert``: int32 [tiles], the tile's expert or -1; ``rows``: slots of a tile.
    """

    order: Tensor
    tile_expert: Tensor
    rows: int


def tile_rows(experts: Tensor, count: int, most: int, alike: bool) -> int:
    """Slots of a tile: about what each of ``count`` experts gets, from 16 to ``most``; ``alike``: whatever they get."""
    return ALIKE_ROWS if alike else max(16, min(most, power_of_2(-(-experts.numel() // count))))


def gather_by_expert(experts: Tensor, count: int, rows: int) -> Gathered:
    """The slots (token, choice) of ``experts`` [T, k], integers below ``count``, in tiles of ``rows``; two launches."""
    experts, slots = experts.contiguous(), experts.numel()
    tiles = slots // rows + min(count, slots)
    order = torch.empty(tiles * rows, dtype=torch.int32, device=experts.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    launch(count_kernel, (count,), experts, counts, tile_expert, tiles, slots, EXPERTS=count, SCAN=SCAN)
    sizes = {"EXPERTS": count, "WIDTH": power_of_2(count), "SCAN": SCAN, "ROWS": rows}
    launch(place_kernel, (count,), experts, counts, tile_expert, order, slots, **sizes)
    return Gathered(order, tile_expert, rows)
