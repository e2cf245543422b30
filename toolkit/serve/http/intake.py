"""A request's way in: an ASGI layer that every body passes, and that counts what all of them hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.configs.checks import shown
from toolkit.configs.option import spelled
from toolkit.serve.http.access.users import current_user
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.replies import send_error
from toolkit.serve.http.sharing.held import Held
from toolkit.serve.http.sharing.lanes import Lanes

FORM = 1 << 14  # bytes that a form has besides its file
BYTES_A_SECOND = 1 << 16  # a body may take so much longer as it is larger
UPLOADS = "/v1/files"  # bodies of POST here go to disk as they come
REFUSED = "toolkit.refused"  # in a request's state: it has its answer, though a part of its body is still to come
LINGER = 5.0  # seconds in which the rest of a body that was refused is thrown away


class Intake:
    """Refuses bodies that are too large (413), too slow (408) or too many at once (503), while they arrive, and packed
    ones (415).

    A body counts until its request is answered, unless it goes to disk. Of several keys none may have more beyond one
    body than it leaves to others. What its answer holds has an account. Memory
    that a large one took goes back to the system afterwards.
    """

    def __init__(self, app: ASGIApp, limits: Limits, lanes: Lanes, shared: Callable[[], bool] = lambda: False) -> None:
        """``shared``: whether there may be several keys."""
        self._app = app
        self._limits = limits
        self._lanes = lanes
        self._shared = shared
        self._pending = 0  # bytes of all bodies
        self._of_users: Counter[str] = Counter()  # of those of each key
        self._held = Held(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        to_disk = scope["method"] == "POST" and scope["path"] == UPLOADS
        body = _Body(self._limits, receive, Headers(scope=scope), "max_file_bytes" if to_disk else "max_body_bytes")
        held, whose = 0, ""  # bytes that count, and the key that they count for

        def give_back() -> None:
            nonlocal held
            self._pending -= held
            if whose:
                self._of_users[whose] -= held
                if not self._of_users[whose]:
                    del self._of_users[whose]
            held = 0

        async def counted() -> Message:
            try:
                return await taken()
            except ApiError:  # its answer may wait until the rest is thrown away; nobody keeps what has come
                give_back()
                raise

        async def taken() -> Message:
            nonlocal held, whose
            before = body.size
            try:
                message = await body.next()
            finally:  # one part too many counts too, until it is given back
                more = 0 if to_disk else body.size - before
                held, self._pending = held + more, self._pending + more
                if user := current_user().name and current_user().id:
                    whose = user
                    self._of_users[user] += more
            mine = self._of_users[whose] if whose and more and self._shared() else 0
            if mine > held and mine + self._pending > self._limits.max_pending_bytes:
                full = spelled("max_pending_bytes")
                text = (
                    f"the bodies of this key's requests fill what it may have of the server's {full}; try again later"
                )
                raise ApiError(429, text, code="too_many_requests")
            if self._pending > self._limits.max_pending_bytes:
                full = spelled("max_pending_bytes")
                text = f"the bodies of requests that are being answered fill the server's {full}; try again later"
                raise ApiError(503, text, code="too_many_requests")
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope.get("state", {})[REFUSED] = not body.whole
                if message["status"] == 408:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                else:
                    await body.skip()
            await send(message)

        with self._lanes.request() as used:
            try:
                if (error := body.refusal()) is not None:
                    await send_error(answer, error, error.envelope_at(scope["path"]))
                else:
                    with self._held.answer():
                        await self._app(scope, counted, answer)
            finally:
                give_back()
                used.body = body.size


class _Body:
    """The messages of one request's body, within their time."""

    def __init__(self, limits: Limits, receive: Receive, headers: Headers, limit: str) -> None:
        self.size = 0
        self._limit = limit  # by the name of its option
        self._most = getattr(limits, limit) + (FORM if limit == "max_file_bytes" else 0)
        declared = headers.get("content-length", "")
        self.declared = int(declared[:20]) if declared.isdecimal() else 0
        self._limits = limits
        self._receive = receive
        self._asks_first = "expect" in headers
        self._packed = headers.get("content-encoding", "identity").strip().lower()
        self.whole = not self.declared and "transfer-encoding" not in headers
        self._started = asyncio.get_running_loop().time()

    async def next(self) -> Message:
        """The next part; then the client's leaving, whenever that may be."""
        if self.whole:
            return await self._receive()
        end = self._started + self._limits.read_timeout + self.size / BYTES_A_SECOND
        try:
            async with asyncio.timeout_at(end):
                message = await self._receive()
        except TimeoutError as error:
            text = f"The request's body did not arrive in time (the server's {spelled('read_timeout')})"
            raise ApiError(408, text, code="read_timeout") from error
        self.size += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)
        if self.size > self._most:
            raise self.too_large()
        return message

    async def skip(self) -> None:
        """Throw the rest away: a client that is still sending would not see an answer before a closed connection."""
        if self._asks_first and not self.size:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):
                while not self.whole:
                    self.whole = not (await self._receive()).get("more_body", False)

    def refusal(self) -> ApiError | None:
        """Why it cannot be taken, by the request's head."""
        if self._packed not in ("", "identity"):
            text = f"Content-Encoding: bodies are not unpacked here, found {shown(self._packed)}; send it as it is"
            return ApiError(415, text, code="content_encoding")
        return self.too_large() if self.declared > self._most else None

    def too_large(self) -> ApiError:
        most = getattr(self._limits, self._limit)
        text = f"The request body is larger than {most:,} bytes (the server's {spelled(self._limit)})"
        return ApiError(413, text, code="body_too_large")
