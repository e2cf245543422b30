"""Sleeping: a model's weights and KV cache are given back while its process stays, so that it is soon there again; and
waking with other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerError

if TYPE_CHECKING:
    from toolkit.engine.cache.block_manager import BlockManager
    from toolkit.runners.base import Runner

PARTS = ("weights", "kv_cache")  # in the order in which they come back
ASLEEP = "the model sleeps; POST /wakeup wakes it"
UPDATING = "the model's weights are being replaced; try again in a moment"
EMPTY = "the model has no weights yet (empty_init); POST /update_weights or Pipeline.update_weights brings them"


class Nap:
    """What of one runner is given back. No step runs meanwhile. ``empty``: it has no weights that could be loaded."""

    def __init__(self, runner: Runner, blocks: BlockManager, num_blocks: tuple[int, ...], empty: bool = False) -> None:
        self._runner = runner
        self._blocks = blocks
        self._num_blocks = num_blocks
        self.empty = empty
        self.gone: list[str] = list(PARTS) if empty else []

    @property
    def why(self) -> str:
        """Why it answers nothing, while something is gone."""
        return EMPTY if self.empty else ASLEEP

    def begin(self) -> None:
        """Give everything back; the prefix cache and sessions are forgotten. Nothing runs."""
        self._blocks.reset_cache()
        self._runner.release_cache()
        self._runner.release_weights()
        self.gone = list(PARTS)

    def end(self, parts: Sequence[str]) -> None:
        """Load ``parts`` again, of weights that are still to come nothing. Raises UsageError for the cache before the
        weights, ToolkitError where one fails."""
        try:
            for part in [p for p in PARTS if p in self.gone and p in parts]:
                if self.empty:
                    if part == "kv_cache":
                        raise UsageError(f"tags: {EMPTY}; the KV cache comes with them")
                elif part == "weights":
                    self._runner.load_weights()
                    self.gone.remove(part)
                elif "weights" in self.gone:
                    raise UsageError("tags: the KV cache comes back with or after the weights; wake those first")
                else:
                    self._runner.allocate_cache(self._num_blocks)
                    self.gone.remove(part)
        except (RunnerError, MemoryError) as e:
            raise ToolkitError(f"the model cannot be woken: {e}") from e

    def renew(self, weights: Callable[[], Mapping[str, Any]]) -> None:
        """Load other weights in place of those that are there, slept away or still to come; a KV cache that was given
        back stays so. Nothing runs. Raises ToolkitError where they cannot be loaded: what was there is there again."""
        was = [] if self.empty else self.gone
        try:
            before = self._runner.use_weights(weights)
        except RunnerError as e:  # a rank on another machine cannot read them
            raise ToolkitError(f"the new weights cannot be loaded, the old ones stay: {e}") from e
        self.begin()
        try:
            self._runner.load_weights()
            if "kv_cache" not in was:
                self._runner.allocate_cache(self._num_blocks)
        except Exception as e:
            self.begin()
            self._runner.use_weights(before)
            back = "there are none yet"
            if not self.empty:
                self.end([part for part in PARTS if part not in was])
                back = "the old ones are back"
            raise ToolkitError(f"the new weights cannot be loaded, {back}: {e}") from e
        self.empty = False
        self.gone = [part for part in was if part == "kv_cache"]
