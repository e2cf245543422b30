"""``tool serve api_server``: one model, or several, behind OpenAI's API."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.base.ending import exits_at_sigterm
from toolkit.commands.app.config_file import FLAG as CONFIG
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags, with_lmdeploy_flags
from toolkit.commands.output import say, show_engine, stderr
from toolkit.configs.moving import EngineRole
from toolkit.errors import UsageError
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import KEYS, ServerSettings, split_keys

if TYPE_CHECKING:
    from toolkit.chat.renderer import Renderer
    from toolkit.configs.engine import EngineConfig
    from toolkit.engine.process.process_loop import Child


@with_lmdeploy_flags("serve api_server")
@with_engine_flags
@with_flags("limits", Limits, "Limits")
@with_flags("settings", ServerSettings)
def run(
    engine: EngineFlags,
    limits: Limits,
    settings: ServerSettings,
    model: Annotated[
        list[str] | None,
        typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo; several are loaded on demand."),
    ] = None,
    config_file: Annotated[
        str | None,
        typer.Option(
            CONFIG, metavar="FILE", help="Options (and model) of a YAML file, by their names; those typed count before."
        ),
    ] = None,  # read before this one is called (app/config_file.py)
) -> None:
    """Serve MODEL with OpenAI's API (/v1/chat/completions, /v1/responses and others) and Anthropic's (/v1/messages).

    Example: tool serve api_server demo --server-port 23333
    """
    config = engine.config()
    config.enable_metrics = not settings.disable_metrics
    keys = split_keys(f"--api-keys (or {KEYS})", settings.api_keys)
    if not keys and KEYS in os.environ:
        raise UsageError(f"{KEYS} is set and empty: expected keys; unset it where none are asked for")
    settings = replace(settings, api_keys=keys, limits=limits)
    if settings.models_dir is not None or len(model or ()) != 1:
        if engine.adapters is not None:
            raise UsageError("--adapters: only for a server of one model; leave the option out")
        if config.role != EngineRole.Hybrid:
            raise UsageError("--role: only for a server of one model; leave the option out")
        serve_several(model or [], settings, config, engine.chat_template)
    else:
        serve_one((model or [""])[0], settings, engine, config)


def serve_one(model: str, settings: ServerSettings, engine: EngineFlags, config: EngineConfig) -> None:
    """Serve ``model``, with what there is to say on standard error."""
    with exits_at_sigterm(), contextlib.ExitStack() as ending:
        # What runs beside the server imports its own while this process imports the server, which takes longest.
        child, renderer = _begun(config, ending)
        from toolkit.serve import run

        told = partial(say, style="dim")

        def ready(url: str, opened: run.AsyncEngine) -> None:
            show_engine(stderr(), opened)
            hint = "listening at " if settings.no_page else "open it in a browser to chat: "
            say(f"HINT:    The server is ready; {hint}{url}")
            say(f"INFO:    Uvicorn running on {url} (Press CTRL+C to quit)")

        run.serve(
            model,
            settings,
            engine_config=config,
            chat_template=engine.chat_template,
            packed=engine.packed(config, told),
            engine_child=child,
            renderer=renderer,
            progress=told,
            ready=ready,
        )


def _begun(config: EngineConfig, ending: contextlib.ExitStack) -> tuple[Child | None, Renderer]:
    """The processes of the engine, which is killed at the end unless it has ended, and of templates."""
    from toolkit.chat.renderer import Renderer
    from toolkit.engine.load.ranks import leads
    from toolkit.engine.process.process_loop import Child

    renderer, child = Renderer(), None
    if leads(config):
        child = Child()
        ending.callback(child.kill)
    renderer.start()
    return child, renderer


def serve_several(models: list[str], settings: ServerSettings, config: EngineConfig, chat_template: str | None) -> None:
    """Serve ``models``, each of which is loaded when it is asked for."""
    from toolkit.serve.fleet import run

    def ready(url: str, names: list[str]) -> None:
        say(f"models, loaded when they are asked for: {', '.join(names)}")
        say(f"HINT:    The server is ready at {url}")

    run.serve(models, settings, engine_config=config, chat_template=chat_template, ready=ready)
