"""What running prompts are about to put into the cache, so that a request that goes on like one of them waits for it
instead of computing it too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.followers import Followers, alike, before_pictures, parent_key
from toolkit.engine.sequence import Sequence

LEAST = 2  # as a share of a block: for a shorter beginning of one nobody waits


class Coming:
    """The blocks that ``running`` requests have not filled yet."""

    def __init__(self, blocks: BlockManager, followers: Followers, running: Iterable[Sequence]) -> None:
        self._blocks = blocks
        self._followers = followers
        self._whole: set[bytes] = set()
        self._behind: defaultdict[tuple[bytes, int], list[tuple[Sequence, int]]] = defaultdict(list)
        for seq in running:
            self.add(seq, blocks.labelled(seq.row))

    def add(self, seq: Sequence, first: int) -> None:
        """A request computes its blocks from ``first`` on."""
        size = self._blocks.block_size
        self._whole.update(seq.keys[first:])
        if not self._blocks.has_states:
            for block in range(first, len(seq.keys)):
                self._behind[parent_key(seq, block), int(seq.tokens[block * size])].append((seq, block))

    def holds(self, seq: Sequence, hit: int, end: int) -> bool:
        """Whether a request, of which ``hit`` blocks are cached, finds more soon: the whole next block, or of its
        tokens before ``end`` as many as half a block more than begin like cached ones."""
        if hit < len(seq.keys) and seq.keys[hit] in self._whole:
            return True
        size = self._blocks.block_size
        start = hit * size
        if seq.keys_root is None or end <= start:
            return False
        others = self._behind.get((parent_key(seq, hit), int(seq.tokens[start])))
        if not others:
            return False
        own = before_pictures(seq, start, end)
        most = max(alike(own, before_pictures(s, j * size, (j + 1) * size)) for s, j in others)
        return most - self._followers.longest(seq, hit, end)[1] >= size // LEAST
