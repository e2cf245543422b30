"""``tool serve dynamo``: the engine as a worker of NVIDIA Dynamo."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.base import extras
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import say
from toolkit.errors import UsageError
from toolkit.serve.dynamo.options import DynamoSettings


@with_engine_flags
@with_flags("settings", DynamoSettings)
def run(
    engine: EngineFlags,
    settings: DynamoSettings,
    model: Annotated[str, typer.Argument(help="Local directory, hub id, artifact, or demo.")],
) -> None:
    """Answer requests of NVIDIA Dynamo's front ends: tokens in, tokens out. Needs the extra "dynamo".

    Example: tool serve dynamo demo --discovery-backend file
    """
    from toolkit.artifacts.source import resolve_model

    extras.require("dynamo", "tool serve dynamo")
    path = resolve_model(model)
    if not path.is_dir():
        raise UsageError(f"{path}: expected a directory with tokenizer.json: Dynamo's front end reads that itself")
    if engine.chat_template is not None:
        raise UsageError("--chat-template: Dynamo's front end renders prompts; leave the option out")
    config = engine.config()
    from toolkit.serve.dynamo import engine as worker

    say(f"opening {model}; the worker registers when it is ready", style="dim")
    worker.serve(path, config, settings)
