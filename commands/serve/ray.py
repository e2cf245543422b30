"""``tool serve ray``: replicas of a model on Ray Serve."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from toolkit.base.ray import check_ray
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import say
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import KEYS, split_keys
from toolkit.serve.ray.options import RaySettings


@with_engine_flags
@with_flags("limits", Limits, "Limits")
@with_flags("settings", RaySettings)
def run(
    engine: EngineFlags,
    limits: Limits,
    settings: RaySettings,
    model: Annotated[list[str], typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo.")],
) -> None:
    """Serve MODEL by replicas on Ray, whose number follows the queue. Needs the extra "ray".

    Example: tool serve ray demo --replicas 1:4
    """
    from toolkit.serve.ray import run
    from toolkit.serve.ray.plan import Plan

    settings = replace(settings, limits=limits, api_keys=split_keys(f"--api-keys (or {KEYS})", settings.api_keys))
    settings.check()
    if settings.write_config is None:
        check_ray("tool serve ray")
    plan = Plan.of(model, engine.config(), engine.chat_template, settings)
    told = partial(say, style="dim")
    if settings.write_config is not None:
        run.write_config(plan)
        told(f"{settings.write_config}: deploy it with: serve deploy {settings.write_config}")
        return
    run.serve(plan, lambda url: say(f"HINT:    The server is ready at {url}"), told)
