"""A front end's view of its model's weights: whether they are there, slept away, or being replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.engine.nap import ASLEEP, EMPTY, PARTS, UPDATING
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.weight_files.new_weight_files import WeightFiles

MODES = ("wait", "abort", "keep")  # what becomes of running requests when weights are replaced; as vLLM calls it
DRAIN_LOOK_S = 0.02  # how often it is looked whether the last request has ended


class Weights:
    """Of one engine. ``call(name, *arguments)``: has its core's method called and returns what that does; ``busy()``:
    whether requests run. ``empty``: there have never been any; ``new``: those that have taken the place of the model's.
    """

    def __init__(self, call: Callable[..., Any], busy: Callable[[], bool], empty: bool) -> None:
        self.empty = empty
        self.new: WeightFiles | None = None
        self._call = call
        self._busy = busy
        self._gone: frozenset[str] = frozenset(PARTS) if empty else frozenset()
        self._updating = False
        self._update_lock = threading.Lock()
        self._lock = threading.Lock()  # around what is asked of the core and what that says of the weights

    @property
    def asleep(self) -> bool:
        """Whether ``sleep`` was called and not all of the model is back, or it has no weights yet."""
        return bool(self._gone)

    @property
    def why_not(self) -> str:
        """Why no request can be taken now, "" where one can."""
        if self._gone:
            return EMPTY if self.empty else ASLEEP
        return UPDATING if self._updating else ""

    def sleep(self) -> None:
        """Give the model's memory back until ``wake``; what still runs ends in an error, as does what comes meanwhile.
        Returns when it is done. Raises ToolkitError where the engine is down."""
        with self._lock:
            before, self._gone = self._gone, frozenset(PARTS)
            try:
                self._call("sleep")
            except BaseException:
                self._gone = before
                raise

    def wake(self, parts: Sequence[str] = PARTS) -> None:
        """Load what ``sleep`` gave back: "weights", "kv_cache". Raises ToolkitError where that fails; it sleeps on."""
        if unknown := next((part for part in parts if part not in PARTS), None):
            raise UsageError(f"tags: expected {' and '.join(PARTS)}, found {unknown!r:.40}")
        with self._lock:
            self._gone = frozenset(self._call("wake", *parts))

    def update(self, files: WeightFiles, mode: str = "wait") -> None:
        """Run with the tensors of ``files`` in place of the model's from now on, through sleep and restart; it closes
        them when others take their place, at its end, or where this fails.

        They are named as in the model's checkpoint, and all there. ``mode`` says what becomes of requests that run:
        "wait" lets them end first, and refuses new ones meanwhile; "abort" ends them with what they have; "keep" has
        them go on behind the tokens that they have. No key, value or prefix of the old weights is used again. While a
        KV cache is slept away it stays so. Raises UsageError for a model that is packed, ToolkitError that names the
        tensor where they cannot be: the old weights are there still.
        """
        try:
            if mode not in MODES:
                raise UsageError(f"mode: expected one of {', '.join(MODES)}, found {mode!r:.40}")
            with self._update_lock:
                self._updating = mode == "wait"
                try:
                    while mode == "wait" and self._busy():
                        time.sleep(DRAIN_LOOK_S)
                    try:
                        with self._lock:
                            self._gone = frozenset(self._call("update_weights", str(files.path), mode == "keep"))
                            before, self.new, self.empty = self.new, files, False
                    except ToolkitError as e:
                        raise type(e)(f"update_weights: {e}") from e
                finally:
                    self._updating = False
        except BaseException:
            files.close()
            raise
        if before is not None:
            before.close()

    def lost(self) -> None:
        """The engine's process is gone. One that comes back is awake, if it has weights."""
        with self._lock:  # those that asked are told before this is called
            self._gone = frozenset(PARTS) if self.empty else frozenset()

    def close(self) -> None:
        """Nothing is loaded any more."""
        if self.new is not None:
            self.new.close()
