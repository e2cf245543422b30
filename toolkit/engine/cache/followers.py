"""What cached blocks begin with, so that a request may start in the middle of one.

Keys name whole blocks. A request that goes on like a cached block for some tokens, and then differs, has that block
copied and computes the rest. So it is with the last, unfilled block of a request that has ended: its tokens are kept,
too, for as many ended requests as may run at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.prefix import block_key, shows
from toolkit.engine.pictures.spans import Span
from toolkit.engine.sequence import Sequence

LIKE = 8  # blocks known behind one block that begin with the same token: of more the one used longest ago is forgotten
LEAST = 8  # as a share of a block: a shorter end is not kept
ROOM = 1024  # blocks known before it is looked for those that are no longer cached


Shown = tuple[int, int, bytes]
"""A picture: its first place in the prompt and its last, and its digest."""


@dataclass(frozen=True)
class Known:
    """What a cached block holds."""

    tokens: NDArray[np.int32]
    pictures: list[Shown]


class Followers:
    """The tokens of cached blocks by what stands before them. ``tails``: unfilled blocks that are kept at most.

    Not for models with states: these are known at the borders of blocks alone.
    """

    def __init__(self, blocks: BlockManager, tails: int) -> None:
        self.blocks = blocks
        self._behind: dict[tuple[bytes, int], OrderedDict[bytes, Known]] = {}
        self._count, self._room = 0, ROOM
        self._tails: OrderedDict[bytes, None] = OrderedDict()
        self._most_tails = tails

    def note(self, seq: Sequence, first: int, stop: int) -> None:
        """The blocks ``first`` to ``stop`` - 1 of a request are cached now."""
        size = self.blocks.block_size
        for j in range(first, stop):
            self._add(seq, j, seq.keys[j], (j + 1) * size)

    def keep_tail(self, seq: Sequence) -> None:
        """Before a request gives up its row: keep the block that it has filled in part."""
        size = self.blocks.block_size
        full, filled = divmod(seq.stored, size)
        if seq.keys_root is None or filled < max(1, size // LEAST) or not self.blocks.there(seq.row, full):
            return  # the block may be given back where a step in flight, or one that failed, was to go on behind it
        shown = shows(seq.spans, full * size, seq.stored)
        key = block_key(seq.parent(full), seq.tokens[full * size : seq.stored], shown)
        if not self._add(seq, full, key, seq.stored):
            return
        self.blocks.label_tail(seq.row, full, key)
        self._tails[key] = None
        self._tails.move_to_end(key)
        if len(self._tails) > self._most_tails:
            self.blocks.forget(self._tails.popitem(last=False)[0])

    def longest(self, seq: Sequence, hit: int, end: int) -> tuple[bytes, int]:
        """(key of a cached block, tokens that it and the request begin with behind ``hit`` blocks, up to ``end``)."""
        start = hit * self.blocks.block_size
        tokens = seq.tokens[start : max(start, end)]
        best, count = b"", 0
        if seq.keys_root is None or self.blocks.has_states or not len(tokens):
            return best, count
        behind = self._behind.get((seq.parent(hit), int(tokens[0])), OrderedDict())
        pictures = pictures_in(seq.spans, start, start + len(tokens))
        for key, known in behind.items():
            if not self.blocks.cached(key):
                continue
            if (both := alike(start, tokens, pictures, known.tokens, known.pictures)) > count:
                best, count = key, both
        if count:
            behind.move_to_end(best)
            if best in self._tails:
                self._tails.move_to_end(best)
        if seq.canvas is not None:  # its tokens see each other, up to the end of their block
            count = max(0, count - (start + count) % seq.canvas.length)
        return best, count

    def _add(self, seq: Sequence, block: int, key: bytes, stop: int) -> bool:
        start = block * self.blocks.block_size
        if self.blocks.has_states:
            return False
        tokens = seq.tokens[start:stop]
        behind = self._behind.setdefault((seq.parent(block), int(tokens[0])), OrderedDict())
        if behind.pop(key, None) is None:
            self._count += 1
        behind[key] = Known(tokens.copy(), pictures_in(seq.spans, start, stop))
        if len(behind) > LIKE:
            behind.popitem(last=False)
            self._count -= 1
        if self._count > self._room:
            self._forget()
        return True

    def _forget(self) -> None:
        """Forget the blocks that are no longer cached."""
        for behind in self._behind.values():
            for key in [key for key in behind if not self.blocks.cached(key)]:
                del behind[key]
        self._behind = {at: behind for at, behind in self._behind.items() if behind}
        self._count = sum(map(len, self._behind.values()))
        self._room = max(ROOM, 2 * self._count)


def pictures_in(spans: Seq[Span], start: int, stop: int) -> list[Shown]:
    """Those that have a place from ``start`` to ``stop`` - 1."""
    ends = ((int(s.places[0]), int(s.places[-1]), s.picture.digest) for s in spans)
    return [shown for shown in ends if shown[0] < stop and shown[1] >= start]


def alike(start: int, one: NDArray[np.int32], seen: Seq[Shown], other: NDArray[np.int32], others: Seq[Shown]) -> int:
    """Tokens that two prompts have in common from ``start`` on, where both have the same before it. ``seen`` and
    ``others``: their pictures from there."""
    both = min(len(one), len(other))
    differ = np.flatnonzero(one[:both] != other[:both])
    return before_pictures(start, start + (int(differ[0]) if len(differ) else both), seen, others) - start


def before_pictures(start: int, stop: int, ours: Seq[Shown], theirs: Seq[Shown]) -> int:
    """How far two prompts whose tokens are alike from ``start`` to ``stop`` show the same; not to the midst of a
    picture, whose tokens may see each other both ways."""
    for first, _, _ in set(ours) ^ set(theirs):
        stop = min(stop, max(start, first))
    for first, last, _ in ours:
        if first < stop <= last:
            stop = max(start, first)
    return stop
