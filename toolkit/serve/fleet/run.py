"""Runs a server of several models in this process until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.chat.template import ChatTemplate
from toolkit.engine.pooling import choose as choose_pooling
from toolkit.engine_configs import EngineConfig
from toolkit.serve.fleet.app import create_app
from toolkit.serve.fleet.catalog import listed
from toolkit.serve.fleet.child import Launcher
from toolkit.serve.fleet.fleet import Fleet
from toolkit.serve.limits import Limits
from toolkit.serve.log import begin as begin_log
from toolkit.serve.proxy.state import ProxySettings
from toolkit.serve.run import Address, bind, run_app
from toolkit.serve.traces import check as check_traces

# What each model's server is told, too.
OF_EACH = (
    "generation_config",
    "max_log_len",
    "otlp_traces_endpoint",
    "pooling",
    "tool_call_parser",
    "reasoning_parser",
    "vision_max_batch_size",
    "allowed_local_media_path",
    "allowed_media_domains",
)


@dataclass(frozen=True)
class Holdings:
    """``models`` and those in ``models_dir``; ``aliases``: OTHER=NAME. ``budget`` and ``idle_timeout``: see Fleet."""

    models: Sequence[str]
    models_dir: Path | None = None
    aliases: Sequence[str] = ()
    budget: int | None = None
    idle_timeout: float = 0.0


def serve(
    holdings: Holdings,
    address: Address,
    *,
    engine_config: EngineConfig,
    chat_template: str | None,
    settings: Mapping[str, Any],
    log_level: str,
    log_format: str = "text",
    ready: Callable[[str, list[str]], None],
) -> None:
    """``settings``: of ServerSettings. ``ready`` gets the URL and the names of the models, none of which is loaded yet.

    Raises ToolkitError or UsageError for whatever keeps it from starting.
    """
    begin_log(log_level, log_format)
    check_traces(settings.get("otlp_traces_endpoint"))
    ChatTemplate.check(chat_template)
    choose_pooling(str(settings.get("pooling", "auto")), None)
    models = listed(holdings.models, holdings.models_dir, holdings.aliases)
    limits: Limits = settings.get("limits", Limits())
    key = secrets.token_hex(16)
    launcher = Launcher(
        engine_config,
        key,
        {name: settings[name] for name in OF_EACH if name in settings},
        limits,
        chat_template,
        log_level,
        log_format,
        holdings.budget,
        sum(model.weight_bytes() for model in models),
        len(models),
    )
    front = ProxySettings(
        api_keys=settings.get("api_keys", ()),
        api_key_file=settings.get("api_key_file"),
        node_key=key,
        allow_origins=settings.get("allow_origins", ()),
        limits=limits,
        page=settings.get("page", True),
    )
    with contextlib.closing(bind(address.host, address.port)) as sock:
        fleet = Fleet(models, launcher, budget=holdings.budget, idle_timeout=holdings.idle_timeout)
        app = create_app(fleet, front, metrics=settings.get("metrics", True))
        names = [name for model in models for name in model.names]

        async def beside(url: str) -> None:
            try:
                launcher.spare.fill()
                await fleet.watch()
            finally:
                await asyncio.shield(fleet.close())
                launcher.spare.close()

        run_app(app, sock, address, log_level, lambda url: ready(url, names), beside)
