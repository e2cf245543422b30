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
from toolkit.serve.http.framing import HttpState, Refusal
from toolkit.serve.http.intake import BYTES_A_SECOND, LINGER, REFUSED
from toolkit.serve.http.limits import Limits

logger = logging.getLogger("toolkit.serve")
# That a connection may rest: longer than clients and load balancers keep one, lest they ask on a closed one.
REST_S = 75
SHORT_REST_S = 5  # where more than half of the connections that may be open are
SHORT_HEAD_S = 5.0  # likewise, for a request's head to arrive
HEALTH = (b"/health", b"/v1/health")
HEALTH_PLACES = 16  # connections beyond the most, which may ask for HEALTH alone


class Connection(H11Protocol):
    """Closes itself where the head of a request does not arrive within ``read_timeout``, the rest of one that was
    answered early within ``LINGER``, or where the client does not take its answer within ``write_timeout``; answers
    what is no HTTP with 400. One too many takes the place of the one that has waited longest for a head, else of one
    whose request was refused before its body had come, or whose body has been coming for ``SHORT_HEAD_S``; where there
    is none, it may ask for HEALTH alone, or is refused. Half-done TLS handshakes count as connections.

    A connection that rests between requests is uvicorn's to end; it costs a timer.
    """

    limits: Limits  # set in a subclass, one for each server
    heads: dict[Connection, None]  # likewise; those that wait for a request's head, the longest first
    bodies: dict[Connection, float]  # likewise; those whose request has a head but no whole body, and since when
    handshakes: dict[asyncio.Task[Any], asyncio.TimerHandle]  # likewise; TLS that is still agreed on, and their ends

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.conn = self._http = HttpState(self._refusal)
        self._accepting = asyncio.current_task(self.loop) if self.config.is_ssl else None
        if self._accepting is not None:
            self._begin_handshake(self._accepting)

    def _begin_handshake(self, task: asyncio.Task[Any]) -> None:
        """Count a connection that is none before TLS is agreed on: to end it, end the ``task`` that accepts it. One too
        many takes the place of the one that has taken longest."""
        while len(self.handshakes) >= max(HEALTH_PLACES, self.limits.max_connections - len(self.connections)):
            oldest = next(iter(self.handshakes))
            self.handshakes.pop(oldest).cancel()
            oldest.cancel()
        seconds = min(self.limits.read_timeout, SHORT_HEAD_S) if self._crowded() else self.limits.read_timeout
        self.handshakes[task] = self.loop.call_later(seconds, task.cancel)
        task.add_done_callback(self._end_handshake)

    def _end_handshake(self, task: asyncio.Task[Any]) -> None:
        if (deadline := self.handshakes.pop(task, None)) is not None:
            deadline.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_for = ""
        self._unread: asyncio.TimerHandle | None = None
        self._spare = False  # for HEALTH alone
        if self._accepting is not None:
            self._end_handshake(self._accepting)
        super().connection_made(transport)
        beyond = len(self.connections) - self.limits.max_connections
        if beyond > 0 and not self._make_room():
            if beyond > HEALTH_PLACES:
                self._refuse(*self._full())
                return
            self._spare = True
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        self.bodies.pop(self, None)
        self._stop_waiting_for_reader()
        self._quietly(super().connection_lost, exc)

    def data_received(self, data: bytes) -> None:
        self._quietly(super().data_received, data)
        self._watch()

    def on_response_complete(self) -> None:
        if self._spare:
            self.timeout_keep_alive = 0
        elif self._crowded():
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
        self._refuse(*self._http.refusal)

    def _crowded(self) -> bool:
        return (len(self.connections) + len(self.handshakes)) * 2 > self.limits.max_connections

    def _full(self) -> Refusal:
        most = self.limits.max_connections
        return 503, f"{most:,} connections are open already (the server's {spelled('max_connections')})"

    def _make_room(self) -> bool:
        """End the connection that has waited longest for a head, else for a body; whether there was one."""
        old = self.loop.time() - SHORT_HEAD_S
        late = (one for one, since in self.bodies.items() if since < old or one._is_refused)
        if (longest := next(iter(self.heads), None) or next(late, None)) is None:
            return False
        if longest in self.bodies:
            longest._refuse(*self._full())
        else:
            longest._give_up(*self._full())
        longest.transport.abort()  # what is written is on its way; TLS would wait for the other side
        return True

    @property
    def _is_refused(self) -> bool:
        return self.cycle is not None and (
            self.cycle.response_complete or self.scope.get("state", {}).get(REFUSED, False)
        )

    def _refusal(self, request: h11.Request) -> Refusal | None:
        if self._spare and len(self.connections) <= self.limits.max_connections:
            self._spare = False
        asked = request.target.partition(b"?")[0]
        return self._full() if self._spare and asked not in HEALTH else None

    def _watch(self) -> None:
        """Set or stop the clocks, by what the client has yet to send, or to take before the connection can close."""
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self.bodies.setdefault(self, self.loop.time())
        else:
            self.bodies.pop(self, None)
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
        self.heads.pop(self, None)
        if what == "head":
            self.heads[self] = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if what:
            seconds = self.limits.read_timeout if what == "head" else LINGER
            if what == "head" and self._crowded():
                seconds = min(seconds, SHORT_HEAD_S)
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
        self._give_up(408, f"the request did not arrive in time (the server's {spelled('read_timeout')})")

    def _give_up(self, status: int, message: str) -> None:
        """Close; tell a client why that has sent a part of a head."""
        if self._waits_for == "head" and self.conn.trailing_data[0]:
            self._refuse(status, message)
        else:
            self.transport.close()
            self._watch()

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where that can still be done, and close."""
        error = ApiError(status, message)
        body = orjson.dumps(error.envelope())
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
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
    return type("LimitedConnection", (Connection,), {"limits": limits, "heads": {}, "bodies": {}, "handshakes": {}})
