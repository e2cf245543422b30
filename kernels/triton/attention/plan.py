"""How a step's attention is cut into tiles of work, on the host, once for all layers.

A tile is some new tokens of one sequence, with all query heads that share a key head as its rows, against a range of
keys. Ranges end at fixed absolute positions, whatever the batch, the chunk or the sequence's length. They grow with the
position, so that a long sequence has few partial results to merge.

Few tokens of a sequence are cut finely, many are not. Where a token's sums are to be the same whatever tokens come
with it, its first ranges are those of prompts (``PROMPT_KEYS``), all tiles have the same rows, and tiles end at fixed
positions too: none reaches over the end of a range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...reference.attention import newest, oldest

FEW_ROWS = 16  # a sequence with at most this many rows (tokens · heads of a group) is cut finely: it decodes
DECODE_KEYS = {0: 256, 8: 512, 4: 512}  # keys of the first ranges of decoding, by bits of the cache (0: dense)
PROMPT_KEYS = 8192
EVEN_RANGES, MORE_RANGES = 64, 32  # ranges of the first size, and of each doubled size after that


class Sight(NamedTuple):
    """Which keys a query sees; see ``window``, ``chunked`` and ``block`` of ``reference.attention.paged_attention``."""

    window: int | None = None
    chunked: bool = False
    block: int = 1

    def oldest(self, at: Any) -> Any:
        """Position of the oldest key that queries at ``at`` (one or several) may see."""
        return np.maximum(0, oldest(at, self.window, self.chunked))

    def newest(self, at: Any) -> Any:
        """Position of the newest key that queries at ``at`` (one or several) may see; it may lie behind the last."""
        return newest(at, self.block)


@dataclass(frozen=True)
class Tiles:
    """``items`` int32 [N, 8]: sequence (-1: nothing to do), first flat row, tokens, position of the first token, first
    key, end of keys, index of the partial result or -1 to write the result itself, 0. ``merges`` int32 [M, 4]: flat
    row, token in its tile, first partial result, count. ``parts``: partial results; ``block_rows``: rows of a tile.
    """

    items: Tensor
    merges: Tensor
    parts: int
    block_rows: int
    kind: str  # decode, mixed, prefill


@dataclass
class Plan:
    """A step for one cache group and sight; the tiles of each head layout are made when first asked for."""

    table: Tensor
    cu_seqlens: np.ndarray
    seq_lens: np.ndarray
    sight: Sight
    device: torch.device
    _tiles: dict[tuple[int, int], Tiles] = field(default_factory=dict)

    def tiles(self, group: int, first: int, block_rows: Callable[[str], int]) -> Tiles:
        """``group``: query heads a key head; ``first``: keys of the first ranges of decoding; ``block_rows``: rows of a
        tile for each kind of step.
        """
        if (group, first) not in self._tiles:
            kind = kind_of(np.diff(self.cu_seqlens), group, first)
            rows = block_rows(kind)
            items, merges, parts = cut(self.cu_seqlens, self.seq_lens, self.sight, group, first, rows)
            on_device = torch.from_numpy(items).to(self.device), torch.from_numpy(merges).to(self.device)
            self._tiles[group, first] = Tiles(*on_device, parts, rows, kind)
        return self._tiles[group, first]


def make_plan(
    block_table: np.ndarray,
    cu_seqlens: np.ndarray,
    seq_lens: np.ndarray,
    block_size: int,
    num_blocks: int,
    window: int | None,
    device: torch.device,
    chunked: bool = False,
    block: int = 1,
) -> Plan:
    """See ``Plan``; ``block_size`` and ``num_blocks`` are other implementations' needs."""
    table = torch.from_numpy(np.ascontiguousarray(block_table, np.int32)).to(device)
    return Plan(table, cu_seqlens, seq_lens, Sight(window, chunked, block), device)


def kind_of(new: np.ndarray, group: int, first: int) -> str:
    """``decode`` where every sequence brings few rows, ``prefill`` where none does, else ``mixed``; that too where sums
    are to be alike. ``first``: see ``Plan.tiles``.
    """
    if first == PROMPT_KEYS:
        return "mixed"
    few = new * group <= max(FEW_ROWS, group)
    return "decode" if few.all() else "mixed" if few.any() else "prefill"


def borders(first: int, length: int) -> np.ndarray:
    """Where ranges of keys begin: 0, first, 2·first … then by steps that double; up to a border that is not below
    ``length``.
    """
    found, step, at = [np.arange(EVEN_RANGES) * first], first, EVEN_RANGES * first
    while at < length:
        step *= 2
        found.append(at + np.arange(MORE_RANGES) * step)
        at += MORE_RANGES * step
    return np.concatenate([*found, [at]]).astype(np.int64)


def range_of(keys: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray]:
    """(begin, end) of the range that holds each key, by the ``borders`` of ``first``."""
    edges = borders(first, int(keys.max(initial=0)) + 1)
    at = np.searchsorted(edges, keys, side="right") - 1
    return edges[at], np.append(edges, np.iinfo(np.int32).max)[at + 1]


def tokens_together(rows: int, group: int, fixed: bool) -> int:
    """Tokens of a tile of ``rows``. ``fixed``: a power of two, so that multiples of it are borders of blocks too."""
    most = max(1, rows // group)
    return 1 << (most.bit_length() - 1) if fixed else most


def _tiles_of_tokens(
    new: np.ndarray, before: np.ndarray, most: int, fixed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each tile: sequence, first token of the ``new`` ones, tokens, and the position that it begins at. ``before``:
    tokens that each sequence has; ``most``: of a tile. ``fixed``: a tile begins at a multiple of ``most``, though
    those at its beginning may be there already.
    """
    aside = np.where(new > 0, before % most, 0) if fixed else np.zeros_like(new)
    tiles = -(-(new + aside) // most)
    seq = np.repeat(np.arange(len(new)), tiles)
    begin = (np.arange(len(seq)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most - aside[seq]
    first = np.maximum(begin, 0)
    return seq, first, np.minimum(begin + most, new[seq]) - first, before[seq] + begin


def cut(
    cu_seqlens: np.ndarray, seq_lens: np.ndarray, sight: Sight, group: int, first: int, block_rows: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(items, merges, number of partial results), see ``Tiles``, long tiles first; ``first``: see ``Plan.tiles``."""
    new = np.diff(cu_seqlens).astype(np.int64)
    fixed = first == PROMPT_KEYS
    few = new * group <= max(FEW_ROWS, group)
    before = seq_lens.astype(np.int64) - new
    seq, begin, tokens, border = _tiles_of_tokens(new, before, tokens_together(block_rows, group, fixed), fixed)
    position = before[seq] + begin
    low = sight.oldest(border)
    high = np.minimum(seq_lens[seq], sight.newest(position + tokens - 1) + 1)
    longest = int(seq_lens.max(initial=1))
    first_range, ranges, edges = np.zeros_like(low), np.ones_like(low), {}
    for fine, size in ((True, first), (False, PROMPT_KEYS)):
        edges[fine], mine = borders(size, longest), few[seq] == fine
        first_range[mine] = np.searchsorted(edges[fine], low[mine], side="right") - 1
        last = np.searchsorted(edges[fine], high[mine], side="left") - 1
        ranges[mine] = last - first_range[mine] + 1
    tile = np.repeat(np.arange(len(seq)), ranges)
    j = np.arange(len(tile)) - np.repeat(np.cumsum(ranges) - ranges, ranges)
    at = first_range[tile] + j
    start, end = np.empty_like(at), np.empty_like(at)
    for fine, edge in edges.items():
        mine = few[seq][tile] == fine
        edge = np.append(edge, np.iinfo(np.int32).max)
        start[mine], end[mine] = edge[at[mine]], edge[at[mine] + 1]
    split = ranges > 1
    first_part = np.cumsum(np.where(split, ranges, 0)) - np.where(split, ranges, 0)
    items = np.zeros((len(tile), 8), np.int32)
    columns = (
        seq[tile],
        cu_seqlens[seq[tile]] + begin[tile],
        tokens[tile],
        position[tile],
        np.maximum(start, low[tile]),
        np.minimum(end, high[tile]),
        np.where(split[tile], first_part[tile] + j, -1),
    )
    for i, column in enumerate(columns):
        items[:, i] = column
    order = np.argsort((items[:, 4] - items[:, 5]) * np.minimum(items[:, 2], 1), kind="stable")
    whole = np.flatnonzero(split)
    owner = np.repeat(whole, tokens[whole])
    token = np.arange(len(owner)) - np.repeat(np.cumsum(tokens[whole]) - tokens[whole], tokens[whole])
    merges = np.zeros((len(owner), 4), np.int32)
    for i, column in enumerate(
        (cu_seqlens[seq[owner]] + begin[owner] + token, token, first_part[owner], ranges[owner])
    ):
        merges[:, i] = column
    return np.ascontiguousarray(items[order]), merges, int(ranges[split].sum())
