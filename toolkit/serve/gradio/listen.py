"""Serves Gradio's page on a socket of ours, however long it takes to start."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

GRACE_S = 2  # that pages which are open get at the end: they hold a stream each


class _Server(uvicorn.Server):
    """uvicorn, except that a signal ends it with exit code 0, and that it says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

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
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with contextlib.closing(sock):
        _Server(config, lambda: ready(url)).run(sockets=[sock])
