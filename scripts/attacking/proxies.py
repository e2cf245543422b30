"""What ``attacks`` fires at proxies, which it starts beside the server: circles, and a node that is hostile."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from attacking import smuggled
from traffic.servers import Served

if TYPE_CHECKING:
    from attacking.target import Target

PATIENCE = 60.0


def ask(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer; 0 where none came."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
    except OSError as error:
        return 0, {"error": {"message": str(error)}}


@contextlib.contextmanager
def proxy() -> Iterator[tuple[str, Any, Path]]:
    """URL, process and log of one."""
    import psutil

    words = ["proxy", "--server-port", "0", "--heartbeat", "0.2", "--allow-nodes-by-client"]
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        with Served(words, Path(folder) / "proxy.log", idle=True) as front:
            yield front.url, psutil.Process(front.process.pid), front.log


def told(what: str, found: Any, expected: Any) -> str:
    return f"{what}: {found}" if found == expected else f"no answer as expected: {what}: {found}, not {expected}"


def complete(url: str, model: str, **headers: str) -> int:
    """Status of a short request."""
    return ask(f"{url}/v1/completions", {"model": model, "prompt": "x", "max_tokens": 4}, **headers)[0]


def circles(target: Target) -> Iterator[str]:
    """A proxy that is its own node, and two that are each other's."""
    with proxy() as (first, process, log), proxy() as (second, _, other_log):
        yield told("itself", ask(f"{first}/nodes/add", {"url": first, "status": {"models": ["dead"]}})[0], 400)
        for at, node, status in ((first, target.url, 200), (first, second, 200), (second, first, 400)):
            time.sleep(1)  # until the one knows of the other
            yield told("a node", ask(f"{at}/nodes/add", {"url": node})[0], status)
        for url, model, status in ((first, "target", 200), (first, "dead", 404), (second, "dead", 503)):
            yield told(model, complete(url, model), status)
        me = ask(f"{first}/health")[1]["proxies"][0]
        yield told("been there", complete(first, "target", Via=f"1.1 toolkit-{me}"), 508)
        left = sum(node["unfinished"] for node in ask(f"{first}/nodes/status")[1].values())
        yield told("unfinished", left, 0)
        yield told("more than 200 descriptors", process.num_fds() > 200, False)
        parts = urlsplit(first)
        yield told("smuggled requests read wrongly", smuggled.wrong(parts.hostname or "", parts.port or 80), [])
        yield told("tracebacks", _tracebacks(log, other_log), 0)


class _Hostile(BaseHTTPRequestHandler):
    """Answers without end, or what no node should."""

    said: bytes = b""  # what it says to /v1/models
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health" and self.said:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        elif self.said:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.said) + self.said)
        else:
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n")
                for _ in range(4_000):
                    self.wfile.write(bytes(1_000_000))

    def do_POST(self) -> None:
        self.wfile.write(b"HTTP/1.1 999 No\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")

    def log_message(self, *told: Any) -> None: ...


def hostile_node(target: Target) -> Iterator[str]:
    """One that says gigabytes of itself, nests without end, has odd names, and answers what is no HTTP."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    names = json.dumps({"data": [{"id": name} for name in ("odd", "a\0b", "a\nb", "a\u202eb", "x" * 100_000)]})
    with contextlib.closing(server.socket), proxy() as (first, process, log):
        before = process.memory_info().rss
        for said, healthy in ((b"", False), (b"[" * 200_000 + b"]" * 200_000, True), (names.encode(), True)):
            _Hostile.said = said
            ask(f"{first}/nodes/add", {"url": url})
            time.sleep(2)  # until it has been looked at
            found = ask(f"{first}/nodes/status")[1][url]
            yield told(f"healthy ({found['reason']})", found["healthy"], healthy)
        yield told("grown by 64 MB", process.memory_info().rss - before > 64 << 20, False)
        yield told("listed", [card["id"] for card in ask(f"{first}/v1/models")[1]["data"]], ["odd"])
        yield told("status 999", complete(first, "odd"), 503)
        yield told("another node", ask(f"{first}/nodes/add", {"url": target.url})[0], 200)
        yield told("target", complete(first, "target"), 200)
        yield told("tracebacks", _tracebacks(log), 0)
        server.shutdown()


def _tracebacks(*logs: Path) -> int:
    return sum(log.read_text(errors="replace").count("Traceback") for log in logs)
