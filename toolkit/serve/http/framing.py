"""Where a request begins and ends. What others on the way may read differently is refused (RFC 9112): behind a proxy
that reads one request where we read two, the second would be somebody else's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

MOST_DIGITS = 18  # of a length, which others have in 64 bits
NO_HTTP = (400, "the request is no valid HTTP")
_BARE = re.compile(rb"\n(?<!\r\n)")
_FOLDED = re.compile(rb"\n[ \t]")
Refusal = tuple[int, str]  # status and message


class _Lines(ReceiveBuffer):
    """Lines end with CR LF. h11 would take a bare LF as well, in heads and trailers, and lines that go on in the next
    one."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        start = max(0, self._multiple_lines_search - 1)  # the end's first three bytes may have been there before
        empty = self._data.startswith(b"\r\n")
        found = -1 if empty else self._data.find(b"\r\n\r\n", start)
        end = 2 if empty else len(self._data) if found < 0 else found + 4
        if _BARE.search(self._data, start, end):
            raise h11.RemoteProtocolError("a line ends with a bare LF")
        if found >= 0 and _FOLDED.search(self._data, 0, end):
            raise h11.RemoteProtocolError("a header goes on in the next line")
        lines: list[bytearray] | None = super().maybe_extract_lines()
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        line: bytearray | None = super().maybe_extract_next_line()
        if line is not None and b"\r" in line[:-2]:
            raise h11.RemoteProtocolError("a chunk's length has a bare CR")
        return line


class HttpState(h11.Connection):
    """h11's, stricter. Frames the pieces of a stream itself: h11 would ask anew of each whether it may come now. Tells
    of the path alone where a target is a whole URL, as proxies send it.

    ``check`` tells of a request's head why it is not to be answered; ``refusal``: what a client is to be told.
    """

    def __init__(self, check: Callable[[h11.Request], Refusal | None]) -> None:
        super().__init__(h11.SERVER)
        self._receive_buffer: ReceiveBuffer = _Lines()
        self._in_chunks = False  # the answer under way
        self._check = check
        self._refused = False
        self.refusal = NO_HTTP

    def next_event(self) -> Any:
        if self._refused:  # whatever comes after such a head
            raise h11.RemoteProtocolError(self.refusal[1])
        event = super().next_event()
        if type(event) is not h11.Request:
            return event
        if (refusal := _misframed(event) or self._check(event)) is not None:
            self._refused, self.refusal = True, refusal
            raise h11.RemoteProtocolError(refusal[1])
        if event.target.lower().startswith((b"http://", b"https://")):
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


def _misframed(request: h11.Request) -> Refusal | None:
    """RFC 9112, 6.1 and 6.3: what has two lengths may be an attempt at smuggling."""
    found = dict(request.headers)
    if len(found.get(b"content-length", b"").lstrip(b"0")) > MOST_DIGITS:
        return 400, f"Content-Length: expected at most {MOST_DIGITS} digits"
    if b"transfer-encoding" in found:
        if b"content-length" in found:
            return 400, "the request has Content-Length beside Transfer-Encoding; send one of them"
        if request.http_version < b"1.1":
            return 400, "Transfer-Encoding: not in HTTP/1.0; send Content-Length"
    return None
