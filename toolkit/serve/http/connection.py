"""One connection: uvicorn's, with an end to patience, and without tracebacks for what clients do wrong."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from toolkit.configs.option import spelled
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.intake import BYTES_A_SECOND, LINGER
from toolkit.serve.http.limits import Limits

logger = logging.getLogger("toolkit.serve")
REST_S = (
    75  # that a connection may rest: longer than clients and load balancers keep one, lest they ask on a closed one
)
SHORT_REST_S = 5  # where more than half of the connections that may be open are


class HttpState(h11.Connection):
    """Frames the pieces of a stream itself: h11 would ask anew of each whether it may come now. Tells of the path alone
    where a target is a whole URL, as proxies send it.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._in_chunks = False  # the answer under way

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request and event.target.lower().startswith((b"http://", b"https://")):
            path = b"/" + event.target.split(b"/", 3)[3] if event.target.count(b"/") > 2 else b"/"
            version = event.http_version
            return h11.Request(method=event.method, headers=list(event.headers), target=path, http_version=version)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._in_chunks and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        written = super().send(event)
        if type(event) is h11.Response:
            self._in_chunks = b"\r\nTransfer-Encoding: chunked\r\n" in (written or b"")
        return written


class Connection(H11Protocol):
    """Closes itself where the head of a request does not arrive within ``read_timeout``, the rest of one that was
    answered early within ``LINGER``, or where the client does not take its answer within ``write_timeout``; answers
    what is no HTTP with 400; refuses to be one too many.

    A connection that rests between requests is uvicorn's to end; it costs a timer.
    """

    limits: Limits  # set in a subclass, one for each server

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = HttpState(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_for = ""
        self._unread: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            most = self.limits.max_connections
            self._refuse(503, f"{most:,} connections are open already (the server's {spelled('max_connections')})")
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        self._stop_waiting_for_reader()
        self._quietly(super().connection_lost, exc)

    def data_received(self, data: bytes) -> None:
        self._quietly(super().data_received, data)
        self._watch()

    def on_response_complete(self) -> None:
        if len(self.connections) * 2 > self.limits.max_connections:
            self.timeout_keep_alive = min(self.timeout_keep_alive, SHORT_REST_S)
        self._quietly(super().on_response_complete)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is no valid HTTP")

    def _watch(self) -> None:
        """Set or stop the clocks, by what the client has yet to send, or to take before the connection can close."""
        if self.transport.is_closing():
            self._wait_for("")
            if self.transport.get_write_buffer_size():
                self._wait_for_reader()
        elif self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._wait_for("rest")
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._wait_for("head")
        else:
            self._wait_for("")

    def _wait_for(self, what: str) -> None:
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if what:
            seconds = self.limits.read_timeout if what == "head" else LINGER
            self._deadline = self.loop.call_later(seconds, self._too_late)

    def _wait_for_reader(self) -> None:
        """What is written and not taken may wait so much longer as there is more of it."""
        if self._unread is None:
            seconds = self.limits.write_timeout + self.transport.get_write_buffer_size() / BYTES_A_SECOND
            self._unread = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_late(self) -> None:
        if self._waits_for == "head" and self.conn.trailing_data[0]:
            self._refuse(408, f"the request did not arrive in time (the server's {spelled('read_timeout')})")
        else:
            self.transport.close()
            self._watch()

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where that can still be done, and close."""
        body = orjson.dumps(ApiError(status, message).envelope())
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        try:
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer is under way, or done
            logger.debug("%s: %s", self.client, message)
        self.transport.close()
        self._watch()

    def _quietly(self, work: Any, *arguments: Any) -> None:
        """Do uvicorn's work; where h11 finds that a connection is beyond use, close it."""
        try:
            work(*arguments)
        except (h11.ProtocolError, RuntimeError, ValueError) as error:
            logger.debug("%s: connection closed: %s", self.client, error)
            self.transport.abort()


def connection_class(limits: Limits) -> type[Connection]:
    """For uvicorn's ``http``: it makes the connections itself."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
