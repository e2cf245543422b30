"""What running prompts are about to put into the cache, so that a request that goes on like one of them waits for it
instead of computing it too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.followers import Followers, alike, pictures_in
from toolkit.engine.sequence import Sequence

LEAST = 2  # as a share of a block: for a shorter beginning of one nobody waits


class Coming:
    """The blocks that ``running`` requests have not filled yet."""

    def __init__(self, blocks: BlockManager, followers: Followers, running: Iterable[Sequence]) -> None:
        self._blocks = blocks
        self._followers = followers
        self._whole: dict[bytes, str] = {}
        self._behind: defaultdict[tuple[bytes, int], list[Sequence]] = defaultdict(list)
        for seq in running:
            self.add(seq, blocks.labelled(seq.row))

    def add(self, seq: Sequence, first: int) -> None:
        """A request computes its blocks from ``first`` on."""
        size = self._blocks.block_size
        for key in seq.keys[first:]:
            self._whole.setdefault(key, seq.user)
        if not self._blocks.has_states:
            for block in range(first, len(seq.keys)):
                self._behind[seq.parent(block), int(seq.tokens[block * size])].append(seq)

    def of(self, seq: Sequence, hit: int, end: int) -> str | None:
        """Whose prompt is about to compute more of what a request begins with, of which ``hit`` blocks are cached: the
        whole next block, or of its tokens before ``end`` as many as half a block more than begin like cached ones."""
        if hit < len(seq.keys) and (user := self._whole.get(seq.keys[hit])) is not None:
            return user
        size = self._blocks.block_size
        start = hit * size
        if seq.keys_root is None or end <= start:
            return None
        others = self._behind.get((seq.parent(hit), int(seq.tokens[start])))
        if not others:
            return None
        own, seen, stop = seq.tokens[start:end], pictures_in(seq.spans, start, end), start + size
        most, user = max(
            (alike(start, own, seen, s.tokens[start:stop], pictures_in(s.spans, start, stop)), s.user) for s in others
        )
        return user if most - self._followers.longest(seq, hit, end)[1] >= size // LEAST else None
