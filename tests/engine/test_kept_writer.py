"""The thread that keeps blocks uses their memory again, and every block is written as it was when it was taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from toolkit.engine.cache.kept.block import Block, Buffer
from toolkit.engine.cache.kept.writer import Writer

SIZES = (64, 48)  # bytes of a block, by groups


class Cache:
    """Blocks of ``SIZES``, each full of its own number."""

    def __init__(self) -> None:
        self.fresh = 0

    def export_block(self, group: int, block: int, into: memoryview | None = None) -> memoryview:
        self.fresh += into is None
        data = np.empty(SIZES[group], np.uint8) if into is None else np.frombuffer(into, np.uint8)
        assert data.size == SIZES[group]
        data[:] = block
        return data.data


class Shelf:
    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []

    def write(self, blocks: Sequence[tuple[Block, Buffer]]) -> bool:
        self.written += [(block.group, bytes(data)) for block, data in blocks]
        return True


@pytest.mark.parametrize("at_once", [1, 3])
def test_memory_of_written_blocks_is_used_again(at_once: int) -> None:
    cache, shelf = Cache(), Shelf()
    runner: Any = cache
    kept: Any = shelf
    writer = Writer(kept)
    expected = []
    for first in range(0, 60, at_once):
        for number in range(first, first + at_once):
            group = number % len(SIZES)
            assert writer.take(Block(group, bytes([number]), b"", b"", b""), runner, number, "kept")
            expected.append((group, bytes([number]) * SIZES[group]))
        writer.flush(10)
    writer.close()
    assert shelf.written == expected
    assert cache.fresh <= 20
