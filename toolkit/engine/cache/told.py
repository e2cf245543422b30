"""Tells others which whole blocks the prefix cache has, as that changes: routers that send a request to where most of
its prompt is cached already."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from toolkit.engine.cache.block_manager import BlockManager

if TYPE_CHECKING:
    from toolkit.engine.sequence import Sequence


class Listener(Protocol):
    """Called in the engine's thread, between two steps; it must not wait."""

    def stored(self, tokens: Seq[int], keys: Seq[bytes], parent: bytes | None, adapter: int) -> None:
        """Blocks of ``tokens``, one behind the other, are cached; ``parent``: the block before them, None at the start
        of a prompt."""
        ...

    def removed(self, key: bytes) -> None:
        """A block is cached no more."""
        ...


class Told:
    """Of the first cache group that keeps every token; of a model without one nothing is told."""

    def __init__(self, blocks: BlockManager, listener: Listener) -> None:
        self._size, self._listener = blocks.block_size, listener
        self._known: set[bytes] = set()
        self._pool = next((pool for pool, w in zip(blocks.pools, blocks.windows, strict=True) if w is None), None)
        if self._pool is not None:
            self._pool.forgotten = self._forgotten

    def note(self, seq: Sequence, stop: int) -> None:
        """A request's blocks up to ``stop`` are computed. Those with pictures are not told: tokens do not say what
        they show."""
        if self._pool is None or seq.spans:
            return
        keys, first, last = seq.keys, 0, 0
        while first < stop and keys[first] in self._known:
            first += 1
        last = first
        # One may be missing: another request's block had its name, and is gone.
        while last < stop and keys[last] not in self._known and self._pool.find(keys[last]) is not None:
            last += 1
        if first < last:
            self._known.update(keys[first:last])
            tokens = seq.tokens[first * self._size : last * self._size].tolist()
            self._listener.stored(tokens, keys[first:last], keys[first - 1] if first else None, seq.request.adapter)

    def _forgotten(self, key: bytes) -> None:
        if key in self._known:
            self._known.discard(key)
            self._listener.removed(key)
