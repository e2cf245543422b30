"""``tool serve``: an OpenAI-compatible server."""

from __future__ import annotations

from toolkit.commands.app.groups import new_app
from toolkit.commands.serve import api_client, api_server, dynamo, gradio, proxy, ray

app = new_app(help="Serve a model over HTTP.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Serve a model over HTTP."""


for name, command in {
    "api_server": api_server,
    "proxy": proxy,
    "ray": ray,
    "dynamo": dynamo,
    "gradio": gradio,
    "api_client": api_client,
}.items():
    app.command(name)(command.run)
