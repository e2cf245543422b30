"""Requests that two servers in a row may read differently, so that the second sees one more (RFC 9112, 11.2).

The classes are those of the public collections (CL.TE, TE.CL, TE.TE, line ends, white space, numbers, chunks,
trailers, versions); the cases are our own. Behind each stands a request of ``GET /smuggled``.
"""

from __future__ import annotations

import contextlib
import re
import socket

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
SECOND = b"GET /smuggled HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
BODY = b'{"prompt": {}}'  # refused at once: an answer may take as long as it likes
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def _head(*lines: bytes) -> bytes:
    return HEAD + b"".join(lines) + b"\r\n"


def _coded(value: bytes) -> bytes:
    return _head(b"Transfer-Encoding:" + value + b"\r\n") + CHUNKS


def _long(value: bytes) -> bytes:
    return _head(b"Content-Length:" + value + b"\r\n") + BODY


def _in_chunks(body: bytes) -> bytes:
    return _head(CHUNKED) + body


# To be refused (4xx or 501), and the connection closed.
REFUSED: dict[str, bytes] = {
    "CL.TE": _head(b"Content-Length: %d\r\n" % len(CHUNKS), CHUNKED) + CHUNKS,
    "TE.CL": _head(CHUNKED, b"Content-Length: 4\r\n") + CHUNKS,
    "CL.TE, empty": _head(b"Content-Length: 0\r\n", CHUNKED) + b"0\r\n\r\n",
    "CL.TE, odd spelling": _head(LENGTH, b"tRANSFER-eNCODING: CHUNKED\r\n") + CHUNKS,
    "TE.TE, twice": _head(CHUNKED, CHUNKED) + CHUNKS,
    "TE.TE, then identity": _head(CHUNKED, b"Transfer-Encoding: identity\r\n") + CHUNKS,
    "TE list, identity": _coded(b" chunked, identity"),
    "TE list, twice": _coded(b" chunked, chunked"),
    "TE identity": _head(b"Transfer-Encoding: identity\r\n", LENGTH) + BODY,
    "TE gzip": _coded(b" gzip, chunked"),
    "TE unknown": _coded(b" xchunked"),
    "TE quoted": _coded(b' "chunked"'),
    "TE parameter": _coded(b" chunked;q=1"),
    "TE vertical tab": _coded(b" \x0bchunked"),
    "TE NUL": _coded(b" chunked\x00"),
    "TE letter alike": _coded(b" chun\xe2\x84\xaaed"),
    "TE no value": _coded(b""),
    "TE folded": _coded(b"\r\n chunked"),
    "TE folded by a tab": _coded(b"\r\n\tchunked"),
    "TE blank before the colon": _head(b"Transfer-Encoding : chunked\r\n", LENGTH) + BODY,
    "TE tab before the colon": _head(b"Transfer-Encoding\t: chunked\r\n", LENGTH) + BODY,
    "TE NUL in its name": _head(b"Transfer\x00-Encoding: chunked\r\n", LENGTH) + BODY,
    "TE behind a bare LF": _head(LENGTH, b"X: y\nTransfer-Encoding: chunked\r\n") + CHUNKS,
    "TE behind a bare CR": _head(LENGTH, b"X: y\rTransfer-Encoding: chunked\r\n") + BODY,
    "TE behind CR CR LF": _head(LENGTH, b"X: y\r\r\nTransfer-Encoding: chunked\r\n") + BODY,
    "TE of HTTP/1.0": _head(CHUNKED).replace(b"1.1", b"1.0") + CHUNKS,
    "CL twice": _head(LENGTH, b"Content-Length: 0\r\n") + BODY,
    "CL list": _long(b" %d, 0" % len(BODY)),
    "CL plus": _long(b" +%d" % len(BODY)),
    "CL minus": _long(b" -0"),
    "CL hexadecimal": _long(b" 0xe"),
    "CL underscore": _long(b" 1_4"),
    "CL point": _long(b" 14.0"),
    "CL blank inside": _long(b" 1 4"),
    "CL other digits": _long(b" \xd9\xa1\xd9\xa4"),
    "CL no value": _long(b""),
    "CL beyond 64 bits": _long(b" 36893488147419103246"),
    "CL folded": _long(b"\r\n %d" % len(BODY)),
    "CL blank before the colon": _head(b"Content-Length : %d\r\n" % len(BODY)) + BODY,
    "bare LF, all": _head(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "bare LF, first line": _head(LENGTH).replace(b"1.1\r\n", b"1.1\n") + BODY,
    "bare LF, one header": _head(LENGTH).replace(b"x\r\n", b"x\n") + BODY,
    "bare LF, the end": HEAD + LENGTH + b"\n" + BODY,
    "bare LF, LF LF": HEAD + LENGTH[:-2] + b"\n\n" + BODY,
    "bare LF before the first line": b"\n" + _head(LENGTH) + BODY,
    "bare CR, all": _head(LENGTH).replace(b"\r\n", b"\r") + BODY + b"\r\n\r\n",
    "no name": _head(b": y\r\n", LENGTH) + BODY,
    "no colon": _head(b"Transfer-Encoding\r\n", LENGTH) + BODY,
    "blank in a name": _head(b"Content Length: 0\r\n", LENGTH) + BODY,
    "blank before the first header": _head(LENGTH).replace(b"Host", b" Host") + BODY,
    "blank before the method": b" " + _head(LENGTH) + BODY,
    "no host": _head(LENGTH).replace(b"Host: x\r\n", b"") + BODY,
    "two hosts": _head(b"Host: y\r\n", LENGTH) + BODY,
    "two blanks": _head(LENGTH).replace(b" HTTP", b"  HTTP") + BODY,
    "a fourth word": _head(LENGTH).replace(b" HTTP", b" HTTP/1.1 HTTP") + BODY,
    "tab": _head(LENGTH).replace(b" HTTP", b"\tHTTP") + BODY,
    "version 1.10": _head(LENGTH).replace(b"1.1", b"1.10") + BODY,
    "version 3": _head(LENGTH).replace(b"HTTP/1.1", b"HTTP/3") + BODY,
    "version, small letters": _head(LENGTH).replace(b"HTTP", b"http") + BODY,
    "no version": _head(LENGTH).replace(b" HTTP/1.1", b"") + BODY,
    "chunk of bare LF": _in_chunks(CHUNKS.replace(b"\r\n", b"\n")),
    "chunk, length ends with LF": _in_chunks(b"e\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, extension with LF": _in_chunks(b"e;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, extension with CR": _in_chunks(b"e;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, plus": _in_chunks(b"+e\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, minus": _in_chunks(b"-e\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, 0x": _in_chunks(b"0xe\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, underscore": _in_chunks(b"0_e\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, blank first": _in_chunks(b" e\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, no length": _in_chunks(b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, beyond 64 bits": _in_chunks(b"1000000000000000000000e\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, too long": _in_chunks(b"d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk, ends with other two": _in_chunks(b"e\r\n" + BODY + b"XX0\r\n\r\n"),
    "chunk, ends with LF": _in_chunks(b"e\r\n" + BODY + b"\n0\r\n\r\n"),
    "last chunk ends with LF": _in_chunks(b"e\r\n" + BODY + b"\r\n0\r\n\n"),
    "trailer of bare LF": _in_chunks(b"e\r\n" + BODY + b"\r\n0\r\nX: y\n\r\n"),
    "trailer, no colon": _in_chunks(b"e\r\n" + BODY + b"\r\n0\r\nXy\r\n\r\n"),
}
# To be read as one request.
ONE: dict[str, bytes] = {
    "CL": _head(LENGTH) + BODY,
    "TE": _head(CHUNKED) + CHUNKS,
    "CL, the same twice": _head(LENGTH, LENGTH) + BODY,
    "CL, zeros": _long(b" 0014"),
    "TE, large letters": _coded(b" Chunked"),
    "TE, tabs": _coded(b"\tchunked\t"),
    "chunk, large letter": _in_chunks(CHUNKS.replace(b"e\r\n", b"E\r\n", 1)),
    "chunk, zeros": _in_chunks(b"000" + CHUNKS),
    "chunk, extension": _in_chunks(b'e;a="b"\r\n' + BODY + b"\r\n0\r\n\r\n"),
    "trailer": _in_chunks(b"e\r\n" + BODY + b"\r\n0\r\nX: y\r\n\r\n"),
    "trailer named as a length": _in_chunks(b"e\r\n" + BODY + b"\r\n0\r\nContent-Length: 99\r\n\r\n"),
    "GET with a body": _head(LENGTH).replace(b"POST", b"GET") + BODY,
    "a name alike": _head(b"Transfer_Encoding: chunked\r\n", b"Content_Length: 0\r\n", LENGTH) + BODY,
    "a request in a body": _head(b"Content-Length: %d\r\n" % len(SECOND)) + SECOND,
}


def answers(host: str, port: int, message: bytes) -> list[int]:
    """Statuses of all answers on a connection of its own, until the server closes it."""
    seen = b""
    with socket.create_connection((host, port), timeout=60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(message)
        while part := connection.recv(65536):
            seen += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", seen)]


def wrong(host: str, port: int) -> list[str]:
    """The cases that a server reads as it should not."""
    found = []
    for name, message in REFUSED.items():
        told = answers(host, port, message + SECOND)
        if len(told) != 1 or told[0] not in (400, 501):
            found.append(f"{name}: expected one answer, 400 or 501, and the end, found {told}")
    for name, message in ONE.items():
        told = answers(host, port, message + SECOND)
        if len(told) != 2 or told[1] not in (401, 404):
            found.append(f"{name}: expected two answers, the last 404, found {told}")
    return found
