"""What no client's HTTP library would send: half of a request, drops of one, none at all, too many at once."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import h11
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.serve.http import connection as connection_module
from toolkit.serve.http import intake
from toolkit.serve.http.limits import Limits

pytestmark = pytest.mark.alone  # servers of little patience
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
BODY = json.dumps({"model": "echo", "prompt": "hi"}).encode()


def address(server: Any) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: Any) -> socket.socket:
    return socket.create_connection(address(server), timeout=60)


def answer_to(server: Any, message: bytes) -> bytes:
    """What comes on a connection of its own."""
    connection = connect(server)
    connection.sendall(message)
    return everything(connection)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    seen = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            seen += part
    connection.close()
    return seen


def open_connections(server: Any) -> int:
    return len(server.server_state.connections)


def well(server: Any) -> bool:
    """Whether it answers; it may be hastier than a machine that stands still for a while."""
    for _ in range(20):
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=60) as reply:
                return reply.status == 200
        except (urllib.error.HTTPError, ConnectionError, http.client.HTTPException):
            continue
    return False


@pytest.fixture(scope="module")
def hasty(request: Any, tmp_path_factory: Any) -> Any:
    """A server with little patience."""
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine = conftest.FakeEngine(conftest.ByteTokenizer(tmp_path_factory.mktemp("model")))
    options = conftest.ServerSettings(model_name="echo", limits=Limits(read_timeout=1.0, max_body_bytes=300_000))
    app = conftest.create_app(engine, conftest.PlainTemplate(), options)
    with pytest.MonkeyPatch.context() as patch, conftest.running(app, engine, keep_alive=1) as it:
        patch.setattr(intake, "LINGER", 1.0)
        patch.setattr(connection_module, "LINGER", 1.0)
        yield it


HALVES = [
    (b"", b""),
    (b"POST /v1/comp", b" 408 "),
    (HEAD, b" 408 "),
    (HEAD + b"Content-Length: 40\r\n\r\n", b" 408 "),
    (HEAD + b"Content-Length: 40\r\n\r\n" + BODY[:10], b" 408 "),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab", b" 408 "),
    (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"GET /hea", b" 200 "),  # then half of a second one
]


def test_half_of_a_request_is_waited_for_once(start: Any) -> None:
    server, held = start(keep_alive=3, limits=Limits(read_timeout=3.0)), []
    for sent, answer in HALVES * 20:
        connection = connect(server)
        connection.sendall(sent)
        held.append((connection, sent, answer))
    assert well(server)
    for connection, sent, answer in held:
        got = everything(connection)
        assert answer in got[:20] if answer else got == b"", (sent, got)
    server.wait(lambda: open_connections(server) == 0)


def test_a_connection_may_rest_longer_than_clients_keep_one(start: Any) -> None:
    """Clients and load balancers keep one for 5 to 60 seconds; where it is closed as they use it, they see an error."""
    server, held = start(keep_alive=connection_module.REST_S, limits=Limits(max_connections=4)), []
    for _ in range(3):
        held.append(connect(server))
        held[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in held[-1].recv(4096)[:20]
    open_now = list(server.server_state.connections)
    server.wait(lambda: all(one.timeout_keep_alive_task is not None for one in open_now))
    rest = sorted(one.timeout_keep_alive_task.when() - one.loop.time() for one in open_now)
    assert rest[0] <= 5 and 30 < rest[1] <= rest[2]


@pytest.mark.parametrize("head", [b"", HEAD + b"Content-Length: 200\r\n\r\n"])
def test_drops_do_not_extend_the_wait(hasty: Any, head: bytes) -> None:
    connection = connect(hasty)
    started = time.monotonic()
    connection.sendall(head or HEAD)
    answer = b""
    connection.settimeout(0.1)
    while b"408" not in answer:
        assert time.monotonic() - started < 60, "a drop now and then kept the connection open"
        with contextlib.suppress(TimeoutError):
            answer += connection.recv(1000)
        with contextlib.suppress(OSError):
            connection.sendall(b"x" if head else b"X-A: b\r\n")
    connection.close()


def test_a_connection_that_rests_between_requests_stays(start: Any) -> None:
    server = start(limits=Limits(read_timeout=1.0))
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    for _ in range(2):
        connection.request("POST", "/v1/completions", BODY)
        assert connection.getresponse().read()
        assert connection.sock is not None
        time.sleep(1.2)  # more than read_timeout
    connection.close()


def test_256_connections_that_rested_all_answer_again(start: Any) -> None:
    """Each answer is read to its end: what is left of one would be taken for the next."""
    server = start()
    resting = [http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60) for _ in range(256)]
    for _ in range(2):
        for connection in resting:
            connection.request("GET", "/health")
        assert [json.load(connection.getresponse()) for connection in resting] == [{"status": "healthy"}] * 256
        assert all(connection.sock is not None for connection in resting) and open_connections(server) == 256
    for connection in resting:
        connection.close()
    server.wait(lambda: open_connections(server) == 0)


def test_a_client_whose_connection_was_closed_meanwhile_opens_another(start: Any) -> None:
    server = start(keep_alive=1)
    client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    for _ in range(3):
        assert client.completions.create(model="echo", prompt="abc").choices[0].text == "abc"
        server.wait(lambda: open_connections(server) == 0)


def test_an_answer_takes_as_long_as_it_takes(start: Any) -> None:
    server = start(engine={"delay": 0.1}, limits=Limits(read_timeout=1.0))
    connection = connect(server)
    body = json.dumps({"model": "echo", "prompt": "x" * 12, "stream": True}).encode()
    connection.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert b"[DONE]" in everything(connection)


def test_streams_are_framed_as_http_has_it(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, one answer behind the other on a connection; to clients of HTTP/1.0 as they are."""
    server, sent, send = start(), [], h11.Connection.send
    monkeypatch.setattr(h11.Connection, "send", lambda self, event: sent.append(type(event)) or send(self, event))
    body = json.dumps({"model": "echo", "prompt": "häus", "stream": True}).encode()
    rest = b"Content-Length: %d\r\n\r\n" % len(body) + body
    connection, events = http.client.HTTPConnection(*address(server), timeout=60), []
    for path in ("/v1/completions", "/v1/completions", "/health"):
        connection.request("GET" if path == "/health" else "POST", path, None if path == "/health" else body)
        events.append(connection.getresponse().read().split(b"data: "))
        assert sent.count(h11.Data) == (path == "/health")  # the pieces of a stream go another way
    connection.close()
    assert [len(told) for told in events] == [7, 7, 1] and all(told[-1] == b"[DONE]\n\n" for told in events[:2])
    raw = answer_to(server, HEAD.replace(b"1.1", b"1.0") + rest)
    head, _, plain = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and plain.count(b"data: ") == 6 and plain.endswith(b"[DONE]\n\n")


@pytest.mark.parametrize(("stream", "length"), [(True, 400), (False, 400), (False, 6)])  # the last is written at once
def test_who_does_not_read_its_answer_is_ended(
    start: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, length: int
) -> None:
    """And gives back its slot, its place among the bodies and its connection."""
    monkeypatch.setattr(connection_module, "BYTES_A_SECOND", 1 << 30)
    server = start(max_concurrent_requests=1, limits=Limits(write_timeout=0.5, max_pending_bytes=50_000))
    asked = {"model": "echo", "prompt": "x" * length, "n": 12, "logprobs": 20, "stream": stream, "user": "y" * 30_000}
    body = json.dumps(asked).encode()
    message = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.settimeout(60)
    deaf.connect(address(server))
    server.wait(lambda: open_connections(server) == 1)
    for connection in server.server_state.connections:  # or the system would hold all of the answer
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    deaf.sendall(message)
    server.wait(lambda: len(server.engine.seen) > 0)
    server.wait(lambda: not server.engine.running and open_connections(server) == 0)
    assert b" 200 " in answer_to(server, message)[:20]
    deaf.close()


@pytest.mark.parametrize("method", ["requests", "chunks"])
def test_a_body_that_is_refused_is_read_to_its_end(start: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Or the client's system would drop the answer that came while it was sending."""
    monkeypatch.setattr(intake, "LINGER", 60.0)
    monkeypatch.setattr(connection_module, "LINGER", 60.0)
    server = start(limits=Limits(max_body_bytes=300_000))
    body = b"x" * 3_000_000
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    data: Any = body if method == "requests" else (body[:100_000] for _ in range(30))
    connection.request("POST", "/v1/completions", data, {"Connection": "close"}, encode_chunked=method == "chunks")
    reply = connection.getresponse()
    assert reply.status == 413 and b"--max-body-bytes" in reply.read()
    connection.close()


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br", "gzip, identity"])
def test_a_packed_body_is_refused_as_such(start: Any, coding: str) -> None:
    connection = http.client.HTTPConnection(start().url.removeprefix("http://"), timeout=60)
    for path in ("/v1/completions", "/v1/messages"):
        connection.request("POST", path, gzip.compress(BODY), {"Content-Encoding": coding})
        reply = connection.getresponse()
        told = json.loads(reply.read())["error"]
        assert reply.status == 415 and told["message"].startswith("Content-Encoding: ") and coding in told["message"]
    connection.request("POST", "/v1/completions", BODY, {"Content-Encoding": "identity"})
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    ("before", "path"), [("http://x:1", "/v1/models"), ("HTTPS://x", "/v1/models/echo?a=1"), ("http://x", "")]
)
def test_a_whole_url_asks_for_its_path(start: Any, before: str, path: str) -> None:
    server = start()
    found = [
        answer_to(server, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        for target in (before + path, path or "/")
    ]
    assert found[0].startswith(b"HTTP/1.1 200 ") and len({reply.split(b"\r\n\r\n")[1] for reply in found}) == 1


def test_the_longest_half_head_makes_room(start: Any) -> None:
    """However many there are, who sends a whole request is answered; a request under way is never ended for it."""
    server = start(limits=Limits(max_connections=5))
    server.engine.held = True
    working = connect(server)
    working.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
    server.wait(lambda: len(server.engine.running) == 1)
    held = []
    for number in range(12):
        held.append(connect(server))
        held[-1].sendall(b"GET /half" if number % 2 else b"")
        server.wait(lambda: heads(server) == {b"GET /half" if i % 2 else b"" for i in range(len(held))[-4:]})
        assert well(server)
    told = [everything(connection) for connection in held[:7]]
    assert told[::2] == [b""] * 4
    assert all(b" 503 " in text[:20] and b"--max-connections" in text for text in told[1::2])
    server.engine.held = False
    assert b" 200 " in everything(working)[:20]
    for connection in held[7:]:
        connection.close()
    server.wait(lambda: open_connections(server) == 0)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_half_tls_handshakes_are_connections(start: Any, said: bytes) -> None:
    """The one that has taken longest makes room; who agrees on TLS is answered meanwhile."""
    server = start(certificate=Path(__file__).parent / "localhost.pem", limits=Limits(max_connections=20))
    held = []
    for _ in range(60):
        held.append(connect(server))
        held[-1].sendall(said)
    assert [everything(connection) for connection in held[:35]] == [b""] * 35  # 20 may be open, and some time passes
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = server.url.replace("http:", "https:") + "/health"
    with urllib.request.urlopen(url, timeout=60, context=context) as reply:
        assert reply.status == 200
    for connection in held[35:]:
        connection.close()


def test_a_tls_handshake_has_an_end(start: Any) -> None:
    server = start(certificate=Path(__file__).parent / "localhost.pem", limits=Limits(read_timeout=0.3))
    assert everything(connect(server)) == b""


def heads(server: Any) -> set[bytes]:
    """What of a head has come on each connection that waits for one."""
    return {c.conn.trailing_data[0] for c in server.server_state.connections if c._waits_for == "head"}


def test_one_connection_too_many_may_ask_for_health(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEALTH_PLACES", 2)
    server = start(limits=Limits(max_connections=3), max_concurrent_requests=9)
    server.engine.held = True
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    working = [connect(server) for _ in range(3)]
    for connection in working:
        connection.sendall(request)
    server.wait(lambda: len(server.engine.running) == 3)
    for path in (b"/health", b"/v1/health?x=1", b"/health"):
        assert b" 200 " in answer_to(server, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)[:20], "and it closes"
        server.wait(lambda: open_connections(server) == 3)
    for message in (request, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", request.replace(b"POST /", b"GET /health")):
        refused = answer_to(server, message)
        assert b" 503 " in refused[:20] and b"--max-connections" in refused
        server.wait(lambda: open_connections(server) == 3)
    halves = [connect(server) for _ in range(20)]  # of the places for /health: they make room for one another
    assert well(server) and open_connections(server) <= 3 + 2 + 1
    for connection in halves:
        connection.close()
    late = connect(server)
    late.sendall(b"POST /v1/")
    server.wait(lambda: heads(server) == {b"POST /v1/"})
    server.engine.held = False
    assert all(b" 200 " in everything(connection)[:20] for connection in working)
    server.wait(lambda: open_connections(server) == 1)
    late.sendall(request.removeprefix(b"POST /v1/"))
    assert b" 200 " in everything(late)[:20], "there is room by now"


def test_heads_have_less_time_where_many_connections_are_open(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "SHORT_HEAD_S", 0.2)
    server = start(limits=Limits(max_connections=6))
    early = [connect(server) for _ in range(3)]
    server.wait(lambda: open_connections(server) == 3)
    late = [connect(server) for _ in range(2)]
    assert all(everything(connection) == b"" for connection in late)
    assert open_connections(server) == 3, "these may take as long as ever"
    for connection in early:
        connection.close()


def test_bodies_of_all_requests_together(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its answer counts; when it has it, there is room again."""
    monkeypatch.setattr(intake, "LINGER", 0.2)
    server = start(limits=Limits(max_pending_bytes=100_000, max_body_bytes=80_000))
    for _ in range(3):
        refused = answer_to(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n186a0\r\n" + b"x" * 100_000)
        assert b" 413 " in refused[:20], "and it leaves the count as it was"
    large = json.dumps({"model": "echo", "prompt": "x" * 100, "user": "y" * 60_000}).encode()
    message = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(large) + large
    server.engine.held = True
    first = connect(server)
    first.sendall(message)
    server.wait(lambda: len(server.engine.running) == 1)
    second = connect(server)
    second.sendall(message)
    got = everything(second)
    assert b" 503 " in got[:20] and b"--max-pending-bytes" in got
    server.engine.held = False
    assert b" 200 " in everything(first)[:20]
    third = connect(server)
    third.sendall(message)
    assert b" 200 " in everything(third)[:20]


JUNK = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",  # no host
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA" + b"b" * 100_000,
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 9\r\nContent-Length: 10\r\n\r\n123456789",
    HEAD + b"Content-Length: 9" + b"9" * 5000 + b"\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
    HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"\x00\x01 junk\r\n\r\n",
    HEAD + b"Content-Length: 999999999\r\n\r\n" + b"\r\n" * 9,
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\nrest",
    b"\r\n\r\n\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
CHUNKED = b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LATE_JUNK = [(b"GET /health" + CHUNKED, b"zz\r\n"), (b"POST /nowhere" + CHUNKED, b"5\r\nab", b"junk")]


@pytest.mark.parametrize("junk", [*((junk,) for junk in JUNK), *LATE_JUNK])
def test_what_is_no_http_leaves_no_traceback(
    hasty: Any, junk: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for half_close in (False, True):
            connection = connect(hasty)
            with contextlib.suppress(OSError):
                for part in junk:
                    connection.sendall(part)
                    time.sleep(0.1 * (len(junk) > 1))  # for an answer in between
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            everything(connection)
        assert well(hasty)
    said = [r for r in caplog.records if r.levelno >= logging.WARNING and r.name != "uvicorn.error"]
    assert not said and not any(r.exc_info for r in caplog.records)


def test_junk_behind_an_answer(start: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "LINGER", 0.05)
    server = start()
    connection = connect(server)
    connection.sendall(b"GET /health" + CHUNKED)
    assert b"200 OK" in connection.recv(1000)
    connection.sendall(b"zz\r\n")
    everything(connection)
    assert well(server)
    assert not any(r.exc_info for r in caplog.records)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.one_of(st.sampled_from([*JUNK, HEAD, BODY, b"\r\n", b"0\r\n\r\n"]), st.binary(max_size=30)), max_size=6
    )
)
def test_any_bytes(hasty: Any, pieces: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    connection = connect(hasty)
    with contextlib.suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
    connection.close()
    assert well(hasty)
    assert not any(r.exc_info for r in caplog.records)


def test_200_that_hang_cost_others_nothing(start: Any) -> None:
    server = start(limits=Limits(read_timeout=1.0))
    before = threading.active_count()
    held = [connect(server) for _ in range(200)]
    for i, connection in enumerate(held):
        connection.sendall(
            (HEAD, HEAD + b"Content-Length: 100\r\n\r\n", b"", HEAD + b"Expect: 100-continue\r\n")[i % 4]
        )
    assert well(server) and threading.active_count() <= before + 1
    server.wait(lambda: open_connections(server) == 0)
    for connection in held:
        connection.close()
    assert well(server)
