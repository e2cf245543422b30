"""Puts blocks of requests that ask for it where other engines find them, while those requests run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.kept.block import Block, block_of
from toolkit.engine.cache.kept.shelf import Shelf
from toolkit.engine.cache.kept.writer import Writer
from toolkit.engine.sequence import Sequence

if TYPE_CHECKING:
    from toolkit.runners.base import Runner

log = logging.getLogger(__name__)
ROOM_SECONDS = 0.5  # that a step waits for blocks of those before it to be written
LAST_SECONDS = 2.0  # the same of a request's end: whoever hears of it asks for its blocks at once


class Lender:
    """The engine's thread owns it. ``close``: ends what the shelf is behind, too."""

    def __init__(self, shelf: Shelf, runner: Runner, blocks: BlockManager, close: Callable[[], None]) -> None:
        self._shelf, self._runner, self._blocks = shelf, runner, blocks
        self._close = close
        self._writer = Writer(shelf, gently=False)

    def note(self, seq: Sequence, first: int, stop: int) -> None:
        """The blocks ``first`` to ``stop`` - 1 of a request are cached now. Those that may go before its end are lent
        with it alone, where they are seen from there."""
        for group, window in enumerate(self._blocks.windows):
            if window is None:
                for entry in range(first, stop):
                    self._lend(block_of(seq, group, entry, self._blocks.block_size))

    def end(self, seq: Sequence) -> None:
        """A request's prompt is computed: lend what another one like it would start on, wherever it came from."""
        size = self._blocks.block_size
        for group, entry in self._blocks.needed(min((seq.prompt_len - 1) // size, len(seq.keys))):
            self._lend(block_of(seq, group, entry, size))
        self._writer.flush(LAST_SECONDS)

    def _lend(self, block: Block) -> None:
        at = self._blocks.pools[block.group].find(block.key)
        if at is None or self._shelf.has(block):
            return
        if not self._writer.room():
            self._writer.flush(ROOM_SECONDS)
        if self._writer.room():
            self._writer.take(block, self._runner, at, "lent")

    def flush(self) -> None:
        """Write what waits."""
        self._writer.flush(LAST_SECONDS)

    def close(self) -> None:
        """From now on nothing of this engine is lent."""
        self._writer.close()
        self._close()

    @property
    def lent_bytes(self) -> int:
        return self._shelf.counts.written_bytes
