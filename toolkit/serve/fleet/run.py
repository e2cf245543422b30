"""Runs a server of several models in this process until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.chat.template import ChatTemplate
from toolkit.configs.engine import EngineConfig
from toolkit.configs.option import read_size
from toolkit.engine.load.ranks import only_lead
from toolkit.engine.pooling import check_pooling
from toolkit.serve.fleet.app import create_app
from toolkit.serve.fleet.catalog import listed
from toolkit.serve.fleet.child import Launcher
from toolkit.serve.fleet.fleet import Fleet, Model
from toolkit.serve.fleet.unloaded import shown
from toolkit.serve.options import ProxySettings, ServerSettings
from toolkit.serve.run import begin, bind, run_app
from toolkit.serve.watch.traces import check as check_traces


def serve(
    models: Sequence[str],
    settings: ServerSettings,
    *,
    engine_config: EngineConfig,
    chat_template: str | None,
    ready: Callable[[str, list[str]], None],
) -> None:
    """Serve ``models`` and those in the settings' ``models_dir``. ``ready`` gets the URL and the names of the models,
    none of which is loaded yet.

    Raises ToolkitError or UsageError for whatever keeps it from starting.
    """
    address = begin(settings)
    settings.check(several=True)
    only_lead(engine_config, "a server of several models")
    check_traces(settings.otlp_traces_endpoint)
    ChatTemplate.check(chat_template)
    check_pooling(settings.pooling, "--pooling")
    budget = None if settings.memory is None else read_size("--memory", settings.memory)
    found = listed(models, settings.models_dir, settings.alias)
    key = secrets.token_hex(16)
    weights = sum(model.weight_bytes() for model in found)
    launcher = Launcher(engine_config, key, settings, chat_template, budget, weights, len(found))
    front = ProxySettings(
        api_keys=settings.api_keys,
        api_key_file=settings.api_key_file,
        node_key=key,
        node_timeout=0,  # a model's server that stands still is restarted by itself
        allow_origins=settings.allow_origins,
        limits=settings.limits,
        no_page=settings.no_page,
    )
    with contextlib.closing(bind(address.host, address.port)) as sock:
        fleet = Fleet(
            found,
            launcher,
            budget=budget,
            idle_timeout=settings.idle_timeout,
            swap_patience=settings.swap_patience,
            at_once=settings.max_concurrent_requests,
        )

        def show(model: Model) -> dict[str, Any]:
            length = engine_config.session_len
            return shown(model.listed.name, Path(model.listed.path), chat_template, settings, length)

        app = create_app(fleet, front, show, metrics=not settings.disable_metrics)

        async def beside(url: str) -> None:
            try:
                launcher.spare.fill()
                await fleet.watch()
            finally:
                await asyncio.shield(fleet.close())
                launcher.spare.close()

        run_app(app, sock, address, lambda url: ready(url, fleet.names()), beside)
