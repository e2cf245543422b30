"""A model's own server, as a fleet starts it: a process that listens on this machine alone, behind a key."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

import psutil

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import EngineConfig
from toolkit.errors import ToolkitError
from toolkit.serve.background import Order, Server, Started, launch
from toolkit.serve.fleet.catalog import Listed
from toolkit.serve.options import ServerSettings

LATER_S = 3.0  # seconds after a model was loaded until another process begins to wait for an order
DEFAULT_SHARE = 0.8  # of cache_max_entry_count: nothing was asked for
# What each model's server is told, too.
OF_EACH = (
    "generation_config max_log_len otlp_traces_endpoint pooling tool_call_parser reasoning_parser parse_special "
    "vision_max_batch_size allowed_local_media_path allowed_media_domains allow_private_media media_io_kwargs "
    "limit_mm_per_prompt log_level log_format limits key_share key_requests key_tokens_per_minute lowest_priority "
    "prefix_cache_shared grace_period"  # a SIGTERM may be for all processes together, as systemd's is
).split()


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
        """Start one where there is none. Where the system has no process for it, whoever needs one is told."""
        with self._lock, suppress(ToolkitError):
            if self._child is None and not self._closed:
                self._child = Started()

    def fill_later(self) -> None:
        """The same in a while: to begin takes the cores that the first answers of a model need."""
        later = threading.Timer(LATER_S, self.fill)
        later.daemon = True
        later.start()

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
    """Starts children, or takes the ``spare`` one. ``settings``: of the server that they belong to. ``budget``: bytes
    that models may take together, ``weights`` those of their weights; None = as each engine decides."""

    config: EngineConfig
    key: str
    settings: ServerSettings
    chat_template: str | None = None
    budget: int | None = None
    weights: int = 0  # bytes of all models'
    models: int = 1
    spare: Spare = field(default_factory=Spare)

    def __call__(self, listed: Listed) -> Child:
        config = replace(self.config, adapters=dict(listed.adapters) or None, **self._cache(listed))
        settings = ServerSettings(
            **{name: getattr(self.settings, name) for name in OF_EACH},
            server_port=0,
            model_name=listed.name,
            alias=listed.aliases,
            api_keys=[self.key],
            trusted_proxy=["127.0.0.1"],  # this process: nobody else has the key
            enable_sleep_mode=True,
            disable_fastapi_docs=True,
        )
        try:
            order = Order.of(listed.path, config, self.chat_template, settings)
            child, told = launch(order, Child, self.spare.take())
        finally:
            self.spare.fill_later()
        child.memory = int(told["memory"])
        return child

    def _cache(self, listed: Listed) -> dict[str, Any]:
        """A share of memory such that all models fit the budget together, or this one alone; where it cannot do with
        that, one for the KV cache."""
        if self.budget is None or self.config.cache_max_entry_count != DEFAULT_SHARE:
            return {}
        own, rest = listed.weight_bytes(), self.budget - self.weights
        wanted = rest / self.models if rest > 0 else (self.budget - own) / 2
        free = psutil.virtual_memory().available - own
        share = min(max(wanted / max(free, 1), 0.001), 0.25)
        return {"cache_max_entry_count": share, "memory_share": max(1, own + int(share * max(free, 0)))}
