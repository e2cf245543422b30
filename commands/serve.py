"""``tool serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from toolkit.commands.groups import Group
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import show_engine, stderr
from toolkit.commands.sampling_options import SamplingFlags, with_answer_flags
from toolkit.commands.serve_gradio import gradio
from toolkit.commands.serve_proxy import KEYS, proxy, read_keys
from toolkit.errors import UsageError
from toolkit.serve.limits import Limits

SERVERS = "the server's sampling"
SEVERAL = "Several models"
IMAGES = "Images"
CONTROL = "What clients may do to the server"
app = typer.Typer(
    cls=Group,
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
@with_flags("limits", Limits, "Limits")
def api_server(
    engine: EngineFlags,
    limits: Limits,
    model: Annotated[
        list[str] | None,
        typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo; several are loaded on demand."),
    ] = None,
    server_name: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 = reachable from outside.")
    ] = "127.0.0.1",
    server_port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = 23333,
    model_name: Annotated[str | None, typer.Option(help="Name that requests use. Default: the model's.")] = None,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(envvar=KEYS, help="Key that requests must carry; repeat it, or separate keys by commas."),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="File of keys, one a line; read again as it changes.")
    ] = None,
    allow_origins: Annotated[
        list[str] | None, typer.Option(help="Web origin that may call (CORS), * for any; repeatable. Default: none.")
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="<int>", help="HTTP requests worked on at once; more wait. Default: no limit."),
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="Directory of more models and adapters.", rich_help_panel=SEVERAL)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="What loaded models may take together, such as 12GB.", rich_help_panel=SEVERAL),
    ] = None,
    idle_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="<float>",
            help="Seconds after which an unused model's process ends; 0 = never.",
            rich_help_panel=SEVERAL,
        ),
    ] = 0.0,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="OTHER=NAME: another name of a model; repeatable.", rich_help_panel=SEVERAL),
    ] = None,
    proxy_url: Annotated[str | None, typer.Option(help="Proxy (tool serve proxy) to join.")] = None,
    node_url: Annotated[
        str | None, typer.Option(help="This server's address as the proxy reaches it. Default: found out.")
    ] = None,
    proxy_key: Annotated[
        str | None, typer.Option(envvar="TOOLKIT_PROXY_KEY", help="Key that the proxy's /nodes/* asks for.")
    ] = None,
    grace_period: Annotated[
        float, typer.Option(min=0, metavar="<float>", help="Seconds that running requests get to finish after SIGTERM.")
    ] = 10.0,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling that requests leave open: auto (the model's generation_config.json, else greedy), toolkit "
            "(greedy), or another such file or its directory."
        ),
    ] = "auto",
    pooling: Annotated[
        str,
        typer.Option(
            help="Which hidden state is a text's embedding: last (of its last token), mean (of all), or auto (as the "
            "model's sentence-transformers config says, else last)."
        ),
    ] = "auto",
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How the model writes calls of tools, such as hermes. Default: by its chat template."),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How it marks thoughts, such as qwen3; none: leave them in the text. Default: by its template."
        ),
    ] = None,
    vision_max_batch_size: Annotated[
        int, typer.Option(min=1, metavar="<int>", help="Images that are encoded at once, at most.")
    ] = 1,
    allowed_local_media_path: Annotated[
        str | None,
        typer.Option(
            help="Folder whose files requests may name as images. Default: none may be.", rich_help_panel=IMAGES
        ),
    ] = None,
    allowed_media_domains: Annotated[
        list[str] | None,
        typer.Option(help="Hosts that images are fetched from. Default: all that are public.", rich_help_panel=IMAGES),
    ] = None,
    ssl: Annotated[bool, typer.Option("--ssl", help="HTTPS, by the files in SSL_KEYFILE and SSL_CERTFILE.")] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page to chat at /.")] = False,
    disable_fastapi_docs: Annotated[
        bool, typer.Option("--disable-fastapi-docs", help="No documentation of the API at /docs and /openapi.json.")
    ] = False,
    disable_metrics: Annotated[bool, typer.Option("--disable-metrics", help="No /metrics.")] = False,
    allow_terminate_by_client: Annotated[
        bool,
        typer.Option(
            "--allow-terminate-by-client", help="Clients may end the server by /terminate.", rich_help_panel=CONTROL
        ),
    ] = False,
    enable_abort_handling: Annotated[
        bool,
        typer.Option(
            "--enable-abort-handling", help="Clients may end requests by /abort_request.", rich_help_panel=CONTROL
        ),
    ] = False,
    enable_sleep_mode: Annotated[
        bool,
        typer.Option(
            "--enable-sleep-mode",
            help="Clients may free the model's memory by /sleep, and /wakeup.",
            rich_help_panel=CONTROL,
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info (requests too) or debug.")] = "warning",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="OpenTelemetry collector that gets traces (OTLP over HTTP)."),
    ] = None,
    max_log_len: Annotated[
        int | None, typer.Option(min=0, metavar="<int>", help="Characters of a prompt in the log. Default: all.")
    ] = None,
) -> None:
    """Serve MODEL with OpenAI's API (/v1/chat/completions, /v1/responses and others) and Anthropic's (/v1/messages).

    Example: tool serve api_server demo --server-port 23333
    """
    config = engine.config()
    config.enable_metrics = not disable_metrics
    keys = read_keys("--api-keys", KEYS, api_keys)
    if not keys and KEYS in os.environ:
        raise UsageError(f"{KEYS} is set and empty: expected keys; unset it where none are asked for")
    if not grace_period <= 3600:
        raise UsageError(f"--grace-period: expected at most 3600 seconds, found {grace_period:g}")
    from toolkit.serve import run

    allowed = {
        "--allow-terminate-by-client": allow_terminate_by_client,
        "--enable-abort-handling": enable_abort_handling,
        "--enable-sleep-mode": enable_sleep_mode,
    }
    announcement = None
    if proxy_url is not None:
        from toolkit.serve.announce import Announcement

        announcement = Announcement(proxy_url, proxy_key, node_url)
    keyfile, certfile = run.ssl_files() if ssl else (None, None)
    console = stderr()

    def told(text: str) -> None:
        console.print(text, style="dim", markup=False, soft_wrap=True)

    def ready(url: str, opened: run.AsyncEngine) -> None:
        show_engine(console, opened)
        hint = "listening at " if no_page else "open it in a browser to chat: "
        for _ in range(3):
            console.print(f"HINT:    The server is ready; {hint}{url}", markup=False, soft_wrap=True)
        console.print(f"INFO:    Uvicorn running on {url} (Press CTRL+C to quit)", markup=False, soft_wrap=True)

    settings: dict[str, object] = {
        "api_keys": keys,
        "api_key_file": api_key_file,
        "allow_origins": allow_origins or [],
        "generation_config": generation_config,
        "tool_call_parser": tool_call_parser,
        "reasoning_parser": reasoning_parser,
        "vision_max_batch_size": vision_max_batch_size,
        "allowed_local_media_path": allowed_local_media_path,
        "allowed_media_domains": allowed_media_domains,
        "docs": not disable_fastapi_docs,
        "page": not no_page,
        "metrics": config.enable_metrics,
        "max_concurrent_requests": max_concurrent_requests,
        "max_log_len": max_log_len,
        "otlp_traces_endpoint": otlp_traces_endpoint,
        "pooling": pooling,
        "allowed": [option for option, given in allowed.items() if given],
        "aliases": [entry.partition("=")[0] for entry in alias or ()],
        "limits": limits,
    }
    address = run.Address(server_name, server_port, grace_period, keyfile, certfile)
    if models_dir is not None or len(model or ()) != 1:
        one_model: dict[str, object] = {
            "--model-name": model_name,
            "--proxy-url": proxy_url,
            "--adapters": engine.adapters,
        }
        one_model |= {option: given or None for option, given in allowed.items()}
        if wrong := next((option for option, value in one_model.items() if value is not None), None):
            raise UsageError(f"{wrong}: only for a server of one model")
        from toolkit.commands.serve_fleet import serve_several

        several = {
            "models": model or [],
            "models_dir": models_dir,
            "aliases": alias or [],
            "idle_timeout": idle_timeout,
        }
        serve_several(several, memory, address, config, engine.chat_template, settings, log_level.lower(), log_format)
        return
    if memory is not None or idle_timeout:
        raise UsageError("--memory and --idle-timeout: only for a server of several models")
    run.serve(
        (model or [""])[0],
        address,
        model_name=model_name,
        engine_config=config,
        chat_template=engine.chat_template,
        settings=settings,
        announcement=announcement,
        log_level=log_level.lower(),
        log_format=log_format,
        packed=engine.packed(config, told),
        progress=told,
        ready=ready,
    )


app.command("proxy")(proxy)
app.command("gradio")(gradio)


@app.command("api_client")
@with_answer_flags
def api_client(
    sampling: SamplingFlags,
    url: Annotated[
        str, typer.Argument(help="The server: scheme, host and port, with or without /v1.")
    ] = "http://127.0.0.1:23333",
    api_key: Annotated[str | None, typer.Option(help="Key that the server asks for.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Which of its models. Default: the first.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and leave; the answer alone is on stdout.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System text, instead of the chat template's own.")] = None,
) -> None:
    """Talk to a running server in the terminal. /help shows the commands, exit or Ctrl-D leaves.

    Example: tool serve api_client http://127.0.0.1:23333
    """
    from toolkit.chat import settings
    from toolkit.chat.conversation import Conversation
    from toolkit.commands.chat import answer_once, converse, read_question
    from toolkit.serve.client import APIClient
    from toolkit.serve.remote import RemoteModel

    question = read_question(prompt)
    config = settings.change(settings.GREEDY, **sampling.given())
    model = RemoteModel(APIClient(url, api_key), model_name)
    talk = Conversation(config, system)
    if question is not None:
        answer_once(model, talk, question, SERVERS)
    else:
        converse(model, f"{model.name} at {url}", talk, sampling=SERVERS)
