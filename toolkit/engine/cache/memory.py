"""How much memory the KV cache takes; on CPUs, blocks that nobody has wanted for a while are given back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.engine.cache.block_manager import BlockManager
    from toolkit.runners.base import Runner

SWEEP_SECONDS = 60.0  # between two looks at blocks that nobody uses


class CacheMemory:
    """Of one runner's cache."""

    def __init__(self, runner: Runner, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._block_bytes = runner.memory().block_bytes
        self._discard = runner.discard_blocks if runner.device == "cpu" else None
        self._next_sweep = time.monotonic() + SWEEP_SECONDS

    @property
    def patience(self) -> float | None:
        """Seconds until ``sweep`` may find something; None: there is nothing to be found."""
        if self._discard is None or not any(pool.touched for pool in self._blocks.pools):
            return None
        return max(0.0, self._next_sweep - time.monotonic())

    def sweep(self) -> None:
        """Give memory back to the system, if it is time."""
        if self._discard is None or time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_SECONDS
        for group, pool in enumerate(self._blocks.pools):
            if blocks := pool.sweep():
                self._discard(group, blocks)

    def stats(self) -> dict[str, int]:
        """Bytes of the whole KV cache, and what of it is in memory."""
        pools = list(zip(self._blocks.pools, self._block_bytes, strict=True))
        planned = sum(pool.size * size for pool, size in pools)
        resident = planned if self._discard is None else sum(pool.touched * size for pool, size in pools)
        return {"kv_planned_bytes": planned, "kv_resident_bytes": resident}
