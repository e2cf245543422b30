"""The plan of a step's attention in memory of ours: made without waiting, and padded where a graph will read it.

``kernels.triton.attention.plan`` cuts a step into tiles of work. Their number decides a launch's grid, which a graph
fixes; so a graph gets room for more tiles than the step has, and those left over say that there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import numpy as np
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.triton.attention.plan import Sight, Tiles, cut, kind_of, range_of
from toolkit.models.spec import DecoderSpec

Kind = tuple[int, int | None]  # cache group, window
Heads = tuple[int, int]  # query heads a key head, keys of the first ranges of decoding
TileRows = dict[tuple[str, Heads], int]  # rows of a tile of attention by kind of step (``kind_of``) and heads
NOTHING = -1  # the sequence of a tile without work
PART_KEYS = 256  # keys that one partial result of decode attention stands for
PART_ROWS = 16  # rows of a partial result, padding included


def partial_bytes(spec: DecoderSpec, block_bytes: tuple[int, ...], block_size: int, free: int) -> int:
    """Partial results of decode attention over a cache that fills ``free`` bytes, rounded up as graphs are."""
    tokens = free // max(1, sum(block_bytes)) * block_size
    sums = [PART_ROWS * kept.heads * kept.head_dim for _, _, kept in spec.paged()]
    sums += [mixer.heads * mixer.kv_rank for _, mixer in spec.mixers() if mixer.kind == "latent"]
    return 2 * tokens // PART_KEYS * max(sums, default=0) * 4


def sight_of(spec: DecoderSpec, kind: Kind) -> Sight:
    """What a token sees in the layers of ``kind``."""
    return Sight(kind[1], spec.cache_groups[kind[0]].kind == "chunk", spec.block)


@dataclass(frozen=True)
class Cut:
    """``items`` and ``merges`` as ``Tiles`` has them, on the host."""

    items: np.ndarray
    merges: np.ndarray
    parts: int

    def padded(self, items: int, merges: int) -> Cut:
        """With as many more tiles and merges that do nothing."""
        more = np.zeros((items - len(self.items), self.items.shape[1]), np.int32)
        more[:, 0] = NOTHING
        idle = np.zeros((merges - len(self.merges), self.merges.shape[1]), np.int32)
        return Cut(np.concatenate([self.items, more]), np.concatenate([self.merges, idle]), items)


def kind_of_decode(heads: Heads) -> str:
    """The kind of a step that adds one token to each sequence."""
    return kind_of(np.ones(1, np.int32), *heads)


def cut_decode(lengths: np.ndarray, sight: Sight, heads: Heads, rows: int) -> Cut:
    """Tiles of a step that adds one token to each sequence of ``lengths``; ``rows``: of a tile."""
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return Cut(*cut(starts, lengths, sight, *heads, rows))


@dataclass
class DecodeCut:
    """``cut_decode`` of one step after another. As long as no sequence comes to a border of its ranges of keys, tiles
    are those of the step before, one key further; their order (long ones first) is then that of the cut.

    ``least``, ``most``: lengths between which each sequence has these ranges; ``begin``, ``end``: the tiles' ranges.
    """

    sight: Sight
    heads: Heads
    rows: int
    made: Cut
    least: np.ndarray
    most: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(lengths: np.ndarray, sight: Sight, heads: Heads, rows: int) -> DecodeCut:
        """Cut anew."""
        made = cut_decode(lengths, sight, heads, rows)
        begin, end = range_of(made.items[:, 4].astype(np.int64), heads[1])
        sequence, far = made.items[:, 0], np.iinfo(np.int64).max
        least, most = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
        np.maximum.at(least, sequence, begin + 1)
        np.maximum.at(most, sequence, end)
        if sight.chunked:
            chunk = sight.oldest(lengths - 1)
            least, most = np.maximum(least, chunk + 1), np.minimum(most, chunk + sight.window)
        elif sight.window is not None:
            first, last = np.full(len(lengths), far), np.full(len(lengths), far)
            np.minimum.at(first, sequence, begin)
            np.minimum.at(last, sequence, end)
            least = np.maximum(least, np.where(first > 0, first + sight.window, 0))
            most = np.minimum(most, last + sight.window - 1)
        return DecodeCut(sight, heads, rows, made, least, most, begin, end)

    def at(self, lengths: np.ndarray) -> Cut | None:
        """The cut for ``lengths``; None where it must be made anew."""
        if len(lengths) != len(self.least) or not ((lengths >= self.least) & (lengths <= self.most)).all():
            return None
        items = self.made.items.copy()
        length = lengths[items[:, 0]]
        items[:, 3] = length - 1
        items[:, 4] = self.begin
        if self.sight.window is not None:
            items[:, 4] = np.maximum(self.begin, self.sight.oldest(length - 1))
        items[:, 5] = np.minimum(self.end, length)
        return Cut(items, self.made.merges, self.made.parts)


@dataclass
class AttentionPlan:
    """What ``paged_attention`` is given as its plan, for one cache group and sight.

    ``ready``: tiles that are on the device already; others are made when asked for and ``put`` there. ``rows``: how
    many rows a tile has; what is learnt is kept there. ``own``: the first sequences, by which the kind of step goes;
    None: all.
    """

    table: Tensor
    cu_seqlens: np.ndarray
    seq_lens: np.ndarray
    sight: Sight
    put: Callable[[dict[str, np.ndarray]], dict[str, Tensor]]
    rows: TileRows
    own: int | None = None
    ready: dict[Heads, Tiles] = field(default_factory=dict)

    def give(self, heads: Heads, items: Tensor, merges: Tensor, parts: int, kind: str) -> None:
        """Tiles that are on the device already; ``parts``: partial results there is room for; ``kind``: of step."""
        self.ready[heads] = Tiles(items, merges, parts, self.rows[kind, heads], kind)

    def tiles(self, group: int, first: int, block_rows: Callable[[str], int]) -> Tiles:
        """See ``kernels.triton.attention.plan.Plan``."""
        found = self.ready.get((group, first))
        if found is None:
            kind = kind_of(np.diff(self.cu_seqlens)[: self.own], group, first)
            rows = self.rows[kind, (group, first)] = block_rows(kind)
            made = Cut(*cut(self.cu_seqlens, self.seq_lens, self.sight, group, first, rows))
            on_device = self.put({"items": made.items, "merges": made.merges})
            found = Tiles(on_device["items"], on_device["merges"], made.parts, rows, kind)
            self.ready[group, first] = found
        return found
