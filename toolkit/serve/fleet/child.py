"""A model's own server, as a fleet starts it: a process that listens on this machine alone, behind a key."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from toolkit.engine_configs import EngineConfig
from toolkit.serve.background import Server, Started, launch, order
from toolkit.serve.fleet.catalog import Listed
from toolkit.serve.limits import Limits

DEFAULT_SHARE = 0.8  # of cache_max_entry_count: nothing was asked for
SLEEP = "--enable-sleep-mode"


class Child(Server):
    """``memory``: bytes that its model may take, by its own plan."""

    memory: int = 0

    def alive(self) -> bool:
        return self._process.poll() is None

    def sleep(self) -> None:
        """Give the model's memory back. Raises ToolkitError."""
        self._open("/sleep", {}).close()

    def wake(self) -> None:
        """Load the model again. Raises ToolkitError."""
        self._open("/wakeup", {}).close()


class Spare:
    """One child that waits for an order: a model is there sooner by the time that a process takes to begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: Started | None = None
        self._closed = False

    def fill(self) -> None:
        """Start one where there is none."""
        with self._lock:
            if self._child is None and not self._closed:
                self._child = Started()

    def take(self) -> Started | None:
        """The child, which is another's from now on; None where there is none, or it has ended."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None and not child.alive():
            child.close()
            return None
        return child

    def close(self) -> None:
        """End it; there will be no other."""
        with self._lock:
            self._closed = True
        if (child := self.take()) is not None:
            child.close()


@dataclass(frozen=True)
class Launcher:
    """Starts children, or takes the ``spare`` one. ``settings``: of ServerSettings but its limits. ``kv_bytes``: what
    the KV cache of one model may take where ``config`` leaves it open, None = as the engine decides."""

    config: EngineConfig
    key: str
    settings: dict[str, Any]
    limits: Limits
    chat_template: str | None = None
    log_level: str = "warning"
    log_format: str = "text"
    budget: int | None = None
    weights: int = 0  # bytes of all models'
    models: int = 1
    spare: Spare = field(default_factory=Spare)

    def __call__(self, listed: Listed) -> Child:
        config = replace(self.config, adapters=dict(listed.adapters) or None, **self._cache(listed))
        settings = {
            **self.settings,
            "api_keys": [self.key],
            "aliases": list(listed.aliases),
            "allowed": [SLEEP],
            "docs": False,
            "limits": asdict(self.limits),
        }
        asked = order(listed.path, config, listed.name, self.chat_template, "127.0.0.1", 0, settings, self.log_level)
        try:
            child, told = launch(asked | {"log_format": self.log_format}, Child, self.spare.take())
        finally:
            self.spare.fill()
        child.memory = int(told["memory"])
        return child

    def _cache(self, listed: Listed) -> dict[str, Any]:
        """A share of memory for the KV cache such that all models fit the budget together, or this one alone."""
        if self.budget is None or self.config.cache_max_entry_count != DEFAULT_SHARE:
            return {}
        own, rest = listed.weight_bytes(), self.budget - self.weights
        wanted = rest / self.models if rest > 0 else (self.budget - own) / 2
        free = psutil.virtual_memory().available - own
        return {"cache_max_entry_count": min(max(wanted / max(free, 1), 0.001), 0.25)}
