"""``tool serve``: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.commands.options import EngineFlags, with_engine_flags
from toolkit.commands.output import show_engine, stderr
from toolkit.errors import UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Serve a model over HTTP.",
)


@app.callback()
def group() -> None:
    """Serve a model over HTTP."""


@app.command("api_server")
@with_engine_flags
def api_server(
    model: Annotated[str, typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo.")],
    engine: EngineFlags,
    server_name: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 = reachable from outside.")
    ] = "127.0.0.1",
    server_port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = 23333,
    model_name: Annotated[str | None, typer.Option(help="Name that requests use. Default: the model's.")] = None,
    api_keys: Annotated[
        list[str] | None, typer.Option(help="Key that requests must carry; repeat it, or separate keys by commas.")
    ] = None,
    allow_origins: Annotated[
        list[str] | None, typer.Option(help="Web origin that may call (CORS); repeatable. Default: any.")
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="<int>", help="HTTP requests worked on at once; more wait. Default: no limit."),
    ] = None,
    grace_period: Annotated[
        float, typer.Option(min=0, metavar="<float>", help="Seconds that running requests get to finish after SIGTERM.")
    ] = 10.0,
    ssl: Annotated[bool, typer.Option("--ssl", help="HTTPS, by the files in SSL_KEYFILE and SSL_CERTFILE.")] = False,
    disable_fastapi_docs: Annotated[
        bool, typer.Option("--disable-fastapi-docs", help="No documentation pages at / and /openapi.json.")
    ] = False,
    disable_metrics: Annotated[bool, typer.Option("--disable-metrics", help="No /metrics.")] = False,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info (requests too) or debug.")] = "warning",
    max_log_len: Annotated[
        int | None, typer.Option(min=0, metavar="<int>", help="Characters of a prompt in the log. Default: all.")
    ] = None,
) -> None:
    """Serve MODEL with OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

    Example: tool serve api_server demo --server-port 23333
    """
    config = engine.config()
    config.enable_metrics = not disable_metrics
    keys = [key.strip() for entry in api_keys or () for key in entry.split(",")]
    if not all(keys):
        raise UsageError("--api-keys: expected non-empty keys, found an empty one")
    if not grace_period <= 3600:
        raise UsageError(f"--grace-period: expected at most 3600 seconds, found {grace_period:g}")
    from toolkit.serve import run

    keyfile, certfile = run.ssl_files() if ssl else (None, None)
    console = stderr()

    def ready(url: str, opened: run.AsyncEngine) -> None:
        show_engine(console, opened)
        hint = "listening at " if disable_fastapi_docs else "open it in a browser to see the API: "
        for _ in range(3):
            console.print(f"HINT:    The server is ready; {hint}{url}", markup=False, soft_wrap=True)

    run.serve(
        model,
        run.Address(server_name, server_port, grace_period, keyfile, certfile),
        model_name=model_name,
        engine_config=config,
        chat_template=engine.chat_template,
        settings={
            "api_keys": keys,
            "allow_origins": allow_origins or ["*"],
            "docs": not disable_fastapi_docs,
            "max_concurrent_requests": max_concurrent_requests,
            "max_log_len": max_log_len,
        },
        log_level=log_level.lower(),
        progress=lambda text: console.print(text, style="dim", markup=False, soft_wrap=True),
        ready=ready,
    )
