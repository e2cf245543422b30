"""Serves Gradio's page on a socket of ours, however long it takes to start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from toolkit.serve.run import EndedBySignal, url_of

GRACE_S = 2  # that pages which are open get at the end: they hold a stream each


class _Server(EndedBySignal):
    """It says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def listen(blocks: Any, sock: socket.socket, ready: Callable[[str], None]) -> None:
    """Show ``blocks`` on ``sock`` until SIGINT or SIGTERM. ``ready`` gets the URL once it can be opened."""
    import gradio

    host, port = sock.getsockname()[:2]
    app = gradio.mount_gradio_app(FastAPI(), blocks.queue(), path="/", server_name=host, server_port=port)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S)
    with contextlib.closing(sock):
        _Server(config, lambda: ready(url_of(host, port))).run(sockets=[sock])
