"""A model's own server, as a fleet starts it: a process that listens on this machine alone, behind a key."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from toolkit.engine_configs import EngineConfig
from toolkit.serve.background import Server, launch, order
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


@dataclass(frozen=True)
class Launcher:
    """Starts children. ``settings``: of ServerSettings, the limits apart. ``kv_bytes``: what the KV cache of one model
    may take where ``config`` leaves it open, None = as the engine decides."""

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
        child, told = launch(asked | {"log_format": self.log_format}, Child)
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
