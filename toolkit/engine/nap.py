"""Sleeping: a model's weights and KV cache are given back while its process stays, so that it is soon there again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerError

if TYPE_CHECKING:
    from toolkit.engine.cache.block_manager import BlockManager
    from toolkit.runners.base import Runner

PARTS = ("weights", "kv_cache")  # in the order in which they come back
ASLEEP = "the model sleeps; POST /wakeup wakes it"


class Nap:
    """What of one runner is given back. No step runs meanwhile."""

    def __init__(self, runner: Runner, blocks: BlockManager, num_blocks: tuple[int, ...]) -> None:
        self._runner = runner
        self._blocks = blocks
        self._num_blocks = num_blocks
        self.gone: list[str] = []

    def begin(self) -> None:
        """Give everything back; the prefix cache and sessions are forgotten. Nothing runs."""
        self._blocks.reset_cache()
        self._runner.release_cache()
        self._runner.release_weights()
        self.gone = list(PARTS)

    def end(self, parts: Sequence[str]) -> None:
        """Load ``parts`` again. Raises UsageError for the cache before the weights, ToolkitError where one fails."""
        try:
            for part in [p for p in PARTS if p in self.gone and p in parts]:
                if part == "weights":
                    self._runner.load_weights()
                elif "weights" in self.gone:
                    raise UsageError("tags: the KV cache comes back with or after the weights; wake those first")
                else:
                    self._runner.allocate_cache(self._num_blocks)
                self.gone.remove(part)
        except (RunnerError, MemoryError) as e:
            raise ToolkitError(f"the model cannot be woken: {e}") from e
