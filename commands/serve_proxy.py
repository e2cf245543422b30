"""``tool serve proxy``: several servers behind one address."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.commands.options import with_flags
from toolkit.commands.output import stderr
from toolkit.errors import UsageError
from toolkit.serve.limits import Limits

KEYS = "TOOLKIT_API_KEYS"
NODE_KEYS = "TOOLKIT_NODE_KEYS"
NODE_KEY = "TOOLKIT_NODE_KEY"


@with_flags("limits", Limits)
def proxy(
    limits: Limits,
    server_name: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 = reachable from outside.")
    ] = "127.0.0.1",
    server_port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = 8000,
    strategy: Annotated[
        str,
        typer.Option(
            help="Which node gets a request: random, min_expected_latency, min_observed_latency or prefix_cache_aware.",
        ),
    ] = "min_expected_latency",
    node: Annotated[list[str] | None, typer.Option(help="Address of a server to start with; repeatable.")] = None,
    state_file: Annotated[
        Path | None, typer.Option(help="JSON file in which nodes are kept over a restart. Default: none.")
    ] = None,
    heartbeat: Annotated[
        float, typer.Option(min=0.1, metavar="<float>", help="Seconds between two looks at a node.")
    ] = 5.0,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(envvar=KEYS, help="Key that requests must carry; repeat it, or separate keys by commas."),
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="File of keys, one a line; read again as it changes.")
    ] = None,
    node_keys: Annotated[
        list[str] | None,
        typer.Option(envvar=NODE_KEYS, help="Key that /nodes/* asks for, and without which it changes nothing."),
    ] = None,
    allow_nodes_by_client: Annotated[
        bool,
        typer.Option(
            "--allow-nodes-by-client",
            help="Without --node-keys, let whoever may ask the proxy add, remove and end nodes.",
        ),
    ] = False,
    node_key: Annotated[
        str | None,
        typer.Option(envvar=NODE_KEY, help="Key that the operator's nodes ask for. Default: what the client has sent."),
    ] = None,
    allow_origins: Annotated[
        list[str] | None, typer.Option(help="Web origin that may call (CORS), * for any; repeatable. Default: none.")
    ] = None,
    grace_period: Annotated[
        float, typer.Option(min=0, metavar="<float>", help="Seconds that running requests get to finish after SIGTERM.")
    ] = 10.0,
    ssl: Annotated[bool, typer.Option("--ssl", help="HTTPS, by the files in SSL_KEYFILE and SSL_CERTFILE.")] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page to chat at /.")] = False,
    disable_fastapi_docs: Annotated[
        bool, typer.Option("--disable-fastapi-docs", help="No documentation of the API at /docs and /openapi.json.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "warning",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
) -> None:
    """Spread requests over several servers. They join by --node, or with --node-keys by --proxy-url.

    Example: tool serve proxy --server-port 8000 --strategy prefix_cache_aware
    """
    from toolkit.serve.proxy import run
    from toolkit.serve.proxy.nodes import checked
    from toolkit.serve.proxy.state import ProxySettings
    from toolkit.serve.proxy.strategies import strategy as find_strategy
    from toolkit.serve.run import Address, ssl_files

    find_strategy(strategy)
    settings = ProxySettings(
        strategy=strategy,
        nodes=[checked(url) for url in node or ()],
        api_keys=read_keys("--api-keys", KEYS, api_keys),
        api_key_file=api_key_file,
        node_keys=read_keys("--node-keys", NODE_KEYS, node_keys),
        nodes_by_client=allow_nodes_by_client,
        node_key=node_key,
        state_file=state_file,
        heartbeat=heartbeat,
        allow_origins=allow_origins or [],
        docs=not disable_fastapi_docs,
        page=not no_page,
        limits=limits,
    )
    keyfile, certfile = ssl_files() if ssl else (None, None)
    console = stderr()

    def ready(url: str) -> None:
        console.print(f"HINT:    The proxy is ready at {url}", markup=False, soft_wrap=True)

    address = Address(server_name, server_port, grace_period, keyfile, certfile)
    run.serve(address, settings, log_level.lower(), ready, log_format)


def read_keys(option: str, variable: str, entries: list[str] | None) -> list[str]:
    """Keys as an option has them, several in one by commas. Raises UsageError for an empty one."""
    keys = [key.strip() for entry in entries or () for key in entry.split(",")]
    if not all(keys):
        raise UsageError(f"{option} (or {variable}): expected non-empty keys, found an empty one")
    return keys
