"""The adapters of one engine, as requests name them; they come and go while it runs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError, UsageError

LOOK_SECONDS = 0.02  # between two looks whether a new adapter has been read


class AdapterNames:
    """``call(name, *arguments)``: has the engine's core do something; ``model_name``: what none may be called."""

    def __init__(self, call: Callable[..., Any], names: Sequence[str], model_name: str) -> None:
        self._call = call
        self._model_name = model_name
        self._known = {name: number for number, name in enumerate(names)}
        self._numbers = itertools.count(len(names))  # none is used twice: caches are told apart by them
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may use now."""
        return tuple(self._known)

    def load(self, name: str, path: Path) -> None:
        """Have requests use the adapter in a directory by ``name`` from now on, while others run. Raises UsageError for
        a name that is taken, ToolkitError where the adapter cannot be read or is of another model."""
        with self._lock:
            if name in (*self._known, self._model_name):
                raise UsageError(f"lora_name: {name!r:.80} is taken; unload that one first, or choose another name")
            number = next(self._numbers)
            while not self._call("read_adapter", number, str(path)):
                time.sleep(LOOK_SECONDS)
            self._call("load_adapter", number, str(path))
            self._known[name] = number

    def unload(self, name: str) -> None:
        """Take no more requests for the adapter; those that run end as they would have. Raises UsageError where there
        is none of the name, ToolkitError where the engine is down: it is still there when that has come back."""
        with self._lock:
            if name not in self._known:
                there = ", ".join(self._known) or "none"
                raise UsageError(f"lora_name: there is no adapter {name!r:.80}; there is {there}")
            number = self._known.pop(name)
            try:
                self._call("unload_adapter", number)
            except ToolkitError:
                self._known[name] = number
                raise

    def number(self, name: str | None) -> int:
        """As ``EngineRequest.adapter`` has it. Raises UsageError for a name that is not known."""
        if name is None:
            return -1
        found = self._known.get(name)
        if found is None:
            known = f"one of {', '.join(self._known)}" if self._known else "none, the engine has no adapters"
            raise UsageError(f"adapter_name: expected {known}, found {name!r:.80}")
        return found
