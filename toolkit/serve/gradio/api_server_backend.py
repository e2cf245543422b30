"""LMDeploy's name for a chat through a running server."""

from __future__ import annotations

from toolkit.serve.gradio import app


def run_api_server(
    api_server_url: str, server_name: str = "127.0.0.1", server_port: int = 6006, share: bool = False
) -> None:
    """Chat through the server at ``api_server_url`` until Ctrl-C."""
    app.run(api_server_url, server_name, server_port, share=share)
