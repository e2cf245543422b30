"""``tool serve gradio``: a chat in the browser by Gradio, with a model or through a running server."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer

from toolkit.commands.options import EngineFlags, with_engine_flags, with_lmdeploy_flags
from toolkit.commands.output import say
from toolkit.configs.option import spelled
from toolkit.errors import UsageError


@with_lmdeploy_flags("serve gradio")
@with_engine_flags
def run(
    engine: EngineFlags,
    model: Annotated[
        str, typer.Argument(help="Local directory, hub id, .gguf file, artifact, demo, or a server's URL.")
    ],
    server_name: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 = reachable from outside.")
    ] = "127.0.0.1",
    server_port: Annotated[int, typer.Option(help="Port.")] = 6006,
    model_name: Annotated[str | None, typer.Option(help="Which of the server's models. Default: the first.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that the server at the URL asks for.")] = None,
    share: Annotated[bool, typer.Option("--share", help="Also a public address, by Gradio's own service.")] = False,
) -> None:
    """Chat in the browser by Gradio (pip install 'toolkit\\[serve-ui]'). The server's own page needs nothing more.

    Example: tool serve gradio http://127.0.0.1:23333
    """
    from toolkit.base.extras import require
    from toolkit.serve.gradio import app

    if model.startswith(("http://", "https://")):
        given = [f.name for f in fields(engine) if getattr(engine, f.name) != f.default]
        if given:
            raise UsageError(f"{spelled(given[0])}: has no effect on the server at {model}; leave it out")
    elif api_key is not None:
        raise UsageError("--api-key: only for a server's URL; leave it out")
    require("gradio", "serve gradio")
    app.run(
        model,
        server_name,
        server_port,
        backend_config=engine.config(),
        chat_template_config=engine.chat_template,
        model_name=model_name,
        api_key=api_key,
        share=share,
        ready=lambda url: say(f"HINT:    The chat is ready at {url}"),
    )
