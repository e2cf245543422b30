"""LMDeploy's name for a chat with a model of one's own."""

from __future__ import annotations

from typing import Any

from toolkit.serve.gradio import app


def run_local(model_path: str, **options: Any) -> None:
    """Chat with ``model_path`` until Ctrl-C; ``options`` (``server_name`` and others) as ``app.run`` has them."""
    app.run(model_path, **options)
