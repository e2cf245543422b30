"""How an answer leaves the server: one JSON object, or server-sent events; ended when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.serve.http.errors import ApiError, from_exception
from toolkit.serve.http.sharing.held import account

logger = logging.getLogger("toolkit.serve")
SILENCE = 10.0  # seconds after which a stream is pinged
DONE = b"data: [DONE]\n\n"
_JSON_HEADER = (b"content-type", b"application/json")
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
EVENTS = b"text/event-stream; charset=utf-8"


def as_json(data: Any) -> bytes:
    """``data`` as JSON text, whatever a client has sent and gets back: integers of any size too."""
    try:
        return orjson.dumps(data)
    except TypeError:
        return json.dumps(data).encode()


async def send_json(send: Send, status: int, data: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send ``data`` as a whole JSON response."""
    body = as_json(data)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON_HEADER, length, *(headers or [])]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, envelope: Any) -> None:
    """Send ``error``, worded as ``envelope``, as a whole response."""
    headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
    await send_json(send, error.status, envelope, headers)


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``data`` as a response for a route to return."""
    return Response(as_json(data), status, headers, "application/json")


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(data) + b"\n\n"


def named_event(data: Any) -> bytes:
    """One server-sent event that is called what ``data`` has as its "type"."""
    return f"event: {data['type']}\n".encode() + event(data)


def event_of_error(told: dict[str, Any]) -> bytes:
    """That of an error in its API's envelope: Anthropic's clients step over one that is not called so."""
    return named_event(told) if "type" in told else event(told)


@dataclass(frozen=True)
class Wire:
    """How an API spells an event and an error, what ends its streams, what is sent while nothing is said, and how a
    stream is called."""

    event: Callable[[Any], bytes]
    error: Callable[[ApiError], dict[str, Any]]
    end: bytes = b""
    ping: bytes = b""
    media: bytes = EVENTS


def line(data: Any) -> bytes:
    """One JSON object a line."""
    return as_json(data) + b"\n"


COMMENT = b": ping\n\n"
OPENAI = Wire(event, ApiError.envelope, DONE, ping=COMMENT)
LINES = Wire(line, ApiError.envelope)


def scraped(metrics: bytes) -> Response:
    """What Prometheus reads."""
    return Response(metrics, media_type="text/plain; version=0.0.4; charset=utf-8")


def for_client(error: Exception) -> ApiError:
    """What a client is told of ``error``; a mistake of ours goes to the log with its traceback."""
    if not isinstance(error, (ApiError, ToolkitError)):
        logger.error("request failed", exc_info=error)
    return from_exception(error)


class Reply(Response):
    """A response that is worked out after the request was read and is cancelled when the client disconnects.

    Cancelling ends the generators underneath, and they abort their requests in the engine.
    """

    def __init__(self) -> None:
        self.background = None
        self.status_code = 200

    async def produce(self, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self.produce(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                logger.info("client disconnected: request cancelled")
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonReply(Reply):
    """The JSON object that ``compute`` returns, or the error it raises."""

    def __init__(self, compute: Callable[[], Awaitable[Any]], wire: Wire = OPENAI) -> None:
        super().__init__()
        self.compute = compute
        self.wire = wire

    async def produce(self, send: Send) -> None:
        try:
            data = await self.compute()
        except Exception as error:
            told = for_client(error)
            await send_error(send, told, self.wire.error(told))
            return
        await send_json(send, 200, data)


class EventReply(Reply):
    """A stream of events. ``chunks`` yields what each of them holds.

    The status line waits for the first chunk, so that a request that fails at once gets a proper status; a later
    error is sent as an event of its own. Where the first chunk takes long and pings are comments, it goes with one.
    """

    def __init__(self, chunks: AsyncGenerator[Any, None], wire: Wire = OPENAI) -> None:
        super().__init__()
        self.chunks = chunks
        self.wire = wire

    async def produce(self, send: Send) -> None:
        account.set(None)  # of this task, and what it starts
        started = False
        clock = asyncio.get_running_loop().time
        spoke = clock()
        turn = asyncio.Lock()  # a ping does not come between the head and the first chunk

        async def write(body: bytes, more: bool = True) -> None:
            nonlocal started, spoke
            spoke = clock()
            async with turn:
                if not started:
                    started = True
                    headers = [(b"content-type", self.wire.media), *_STREAM_HEADERS]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": more})

        async def ping() -> None:
            while True:
                await asyncio.sleep(max(spoke + SILENCE - clock(), SILENCE / 10))
                if (started or self.wire.ping == COMMENT) and clock() - spoke >= SILENCE:
                    await write(self.wire.ping)

        pings = asyncio.create_task(ping()) if self.wire.ping else None
        try:
            async with contextlib.aclosing(self.chunks) as chunks:
                async for chunk in chunks:
                    await write(self.wire.event(chunk))
        except Exception as error:
            told = for_client(error)
            if not started:
                await send_error(send, told, self.wire.error(told))
                return
            await write(self.wire.event(self.wire.error(told)))
        finally:
            if pings is not None:
                pings.cancel()
        await write(self.wire.end, more=False)
