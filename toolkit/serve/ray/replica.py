"""One replica: an engine, and the application that ``tool serve api_server`` would serve of it, in an actor of Ray
Serve. Nothing of Ray is imported here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp

from toolkit.base.record import read
from toolkit.chat.renderer import Renderer
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError
from toolkit.serve.adapter_routes import Watch
from toolkit.serve.http.request_ids import HEADER as REQUEST_ID
from toolkit.serve.ray.asked import Asked
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model
from toolkit.serve.run import app_of, check
from toolkit.serve.watch.log import begin as begin_log

Message = MutableMapping[str, Any]
REPLICA = b"x-toolkit-replica"  # in an answer: by which replica it is
PROCESS = b"# TYPE toolkit:replica_process gauge\ntoolkit:replica_process %d\n"
END_S = 5.0  # that an application gets to see that its client has gone


class Replica:
    """``model``, ``settings``: a ``plan.Model`` and ``RaySettings`` as JSON has them; ``tag``: what the replica is
    called. Raises ToolkitError, UsageError."""

    def __init__(self, model: dict[str, Any], settings: dict[str, Any], tag: str = "") -> None:
        told, given = read(Model, model), read(RaySettings, settings)
        begin_log(given.log_level.lower(), given.log_format)
        told.check_files()
        self._tag = (tag or replica_tag()).encode()
        own = given.of_replica(told.name)
        check(own, told.chat_template)
        renderer = Renderer()
        renderer.start()
        self._engine = AsyncEngine.open(
            told.model,
            backend_config=told.engine,
            progress=lambda line: None,
            process=True,
            patience=own.limits.engine_timeout,
            pictures_together=own.vision_max_batch_size,
        )
        try:
            self._app = app_of(self._engine, own, chat_template=told.chat_template, renderer=renderer)
            self._watch = None if own.adapter_dir is None else Watch(self._app.state.server, own.adapter_dir)
            if self._watch is not None:
                self._watch.look()  # so that the first request may name what is there already
        except BaseException:
            self._engine.close()
            raise
        self._watching: asyncio.Task[None] | None = None

    async def answer(self, asked: Asked) -> AsyncGenerator[list[Message], None]:
        """The application's messages, as many at a time as there are."""
        if self._watch is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch.keep())
        async for messages in answered(self._app, asked):
            for message in messages:
                if message["type"] == "http.response.start":  # the front names the request itself
                    kept = [(k, v) for k, v in message["headers"] if k != REQUEST_ID.encode()]
                    message["headers"] = [*kept, (REPLICA, self._tag)]
            yield messages

    async def metrics(self) -> tuple[str, bytes]:
        """(what it is called, what Prometheus scrapes)."""
        return self._tag.decode(), self._app.state.server.metrics.render() + PROCESS % os.getpid()

    def check_health(self) -> None:
        """Called by Ray Serve from time to time. Raises ToolkitError where the engine is gone for good."""
        outage = self._engine.outage
        if outage is not None and not outage.restarting:
            raise ToolkitError(f"the engine ended ({outage.why})")

    def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


def replica_tag() -> str:
    """What Ray Serve calls the replica of this process."""
    from ray.serve import get_replica_context

    return get_replica_context().replica_id.unique_id


async def answered(app: ASGIApp, asked: Asked) -> AsyncGenerator[list[Message], None]:
    """What ``app`` sends in answer, as many messages at a time as there are. Closed early, its client has gone."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=256)
    unread: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(asked.scope(), receive, sent.put)
        finally:
            await sent.put(None)

    task = asyncio.create_task(run())
    try:
        while True:
            messages = [await sent.get()]
            while not sent.empty():
                messages.append(sent.get_nowait())
            over = messages[-1] is None
            if found := [message for message in messages if message is not None]:
                yield found
            if over:
                await task
                return
    finally:
        gone.set()
        with suppress(TimeoutError, asyncio.CancelledError, Exception):
            await asyncio.wait_for(_drained(sent, task), END_S)
        task.cancel()


async def _drained(sent: asyncio.Queue[Message | None], task: asyncio.Task[None]) -> None:
    """What is still sent is nobody's; without this a full queue would hold the application up."""
    while not task.done():
        getting = asyncio.create_task(sent.get())
        await asyncio.wait({getting, task}, return_when=asyncio.FIRST_COMPLETED)
        getting.cancel()
