"""Blocks that are to be copied before the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.cache.block_pool import BlockPool


class Copies:
    """Of blocks of ``pools``, one a cache group. A source is held until its copy is done."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._waiting: list[dict[int, int]] = [{} for _ in pools]  # destination: source
        self._on_their_way: list[Counter[int]] = [Counter() for _ in pools]  # sources

    def add(self, group: int, source: int, destination: int) -> None:
        """One more; the source is held by the caller up to now."""
        self._waiting[group][destination] = source

    def drop(self, group: int, destination: int) -> None:
        """This block need not be written any more."""
        if (source := self._waiting[group].pop(destination, None)) is not None:
            self._pools[group].drop(source)

    def take(self) -> tuple[NDArray[np.int32], ...]:
        """What is to be done before the next step, [C, 2] (source, destination) a group; () if there is nothing.
        Whoever takes it says when it is ``done``, or that it is not (``put_back``)."""
        if not any(self._waiting):
            return ()
        taken = tuple(np.array([(a, b) for b, a in c.items()], np.int32).reshape(-1, 2) for c in self._waiting)
        for sources, copies in zip(self._on_their_way, self._waiting, strict=True):
            sources.update(copies.values())
            copies.clear()
        return taken

    def done(self, copies: Sequence[NDArray[np.int32]]) -> None:
        """These (of ``take``) are."""
        for pool, sources, pairs in zip(self._pools, self._on_their_way, copies, strict=False):
            for source in pairs[:, 0].tolist():
                sources[source] -= 1
                pool.drop(source)

    def put_back(self, copies: Sequence[NDArray[np.int32]]) -> None:
        """These (of ``take``) are to be done before the next step after all."""
        for pool, sources, waiting, pairs in zip(self._pools, self._on_their_way, self._waiting, copies, strict=False):
            for source, destination in pairs.tolist():
                sources[source] -= 1
                if destination in waiting:  # it has become another row's block since
                    pool.drop(source)
                else:
                    waiting[destination] = source

    def sources(self, group: int) -> list[int]:
        """The blocks that are held, as often as they are."""
        return [*self._waiting[group].values(), *self._on_their_way[group].elements()]
