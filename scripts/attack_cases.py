"""What ``scripts/attacks`` fires at a server. An attack gets a ``Target`` and yields what it was told, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LONG = 120.0  # seconds after which an answer is given up
GREEDY_S = 3.0  # seconds that greedy requests run before somebody else's
LATE_S = 5.0  # seconds for the first token of a chat, after which it is told; 25 and more where one waits for all


@dataclass(frozen=True)
class Target:
    """``worker``: process id of the engine; ``model``: the directory that is served, a copy that may be spoilt."""

    url: str
    worker: int
    model: Path

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> str:
        """Status and beginning of the answer."""
        data = json.dumps({"model": "target", "max_tokens": 8, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LONG) as reply:
                return f"{reply.status}"
        except urllib.error.HTTPError as error:
            with contextlib.suppress(ValueError, LookupError):
                return f"{error.code}: {json.loads(error.read())['error']['message']}"
            return f"{error.code}"
        except OSError as error:
            return f"no answer ({error})"

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=LONG)

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=LONG) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait(self, status: int, seconds: float, restarting: bool | None = None) -> str:
        """Until ``/health`` has this status; what it said last, and after how long."""
        started = time.monotonic()
        while True:
            found, said = self.health()
            took = time.monotonic() - started
            if found == status and restarting in (None, said.get("restarting")):
                return f"/health {found} after {took:.1f} s: {said.get('reason', said['status'])}"
            if took > seconds:
                return f"/health still {found} after {took:.0f} s"
            time.sleep(0.1)


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    rule = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "x", "response_format": rule}


def _regex(pattern: str) -> dict[str, Any]:
    return {"prompt": "x", "response_format": {"type": "regex_schema", "regex_schema": pattern}}


def tiny_temperature(target: Target) -> Iterator[str]:
    for temperature in (1e-7, 1e-30, 1e-45, 5e-324):
        for field in ({"top_p": 0.5}, {"min_p": 0.5}):
            yield target.post({"prompt": "x", "temperature": temperature, "top_k": 0, **field})


def nested_pattern(target: Target) -> Iterator[str]:
    for depth in (60_000, 15_000, 2_000):
        pattern = "(" * depth + "a" + ")" * depth
        yield target.post(_schema({"type": "string", "pattern": pattern}))
        yield target.post(_schema({"type": "object", "patternProperties": {pattern: {}}}))


def tiny_penalty(target: Target) -> Iterator[str]:
    for value in (1e-46, 1e-38, 0.01):
        yield target.post({"prompt": "x", "repetition_penalty": value})


def many_bad_words(target: Target) -> Iterator[str]:
    words = [f"word{i:05d}" for i in range(30_000)]
    for count in (3_000, 4_096, 30_000):
        yield target.post({"prompt": "x", "bad_words": words[:count]})


def long_stops(target: Target) -> Iterator[str]:
    for count, length, n in ((16, 100_000, 32), (64, 4_096, 32)):
        yield target.post(
            {"prompt": "x", "stop": ["ab" * (length // 2) + f"{i:02d}"[:2] for i in range(count)], "n": n}
        )


def long_text(target: Target) -> Iterator[str]:
    draw = random.Random(1)
    words = [draw.choice(("the", "quick", "brown", "fox", "jumps", "over")) for _ in range(1_200_000)]
    for characters in (6_000_000, 3_000_000, 300_000):
        yield target.post({"prompt": " ".join(words)[:characters]})
    yield target.post({"prompt": "a" * 4_000_000})


def many_ids(target: Target) -> Iterator[str]:
    for count in (5_000_000, 1_000_000, 100_000):
        yield target.post({"prompt": [7] * count})


def long_message(target: Target) -> Iterator[str]:
    for characters in (20_000_000, 4_000_000):
        yield target.post({"messages": [{"role": "user", "content": "x" * characters}]}, "/v1/chat/completions")


def many_messages(target: Target) -> Iterator[str]:
    for count in (200_000, 4_096):
        yield target.post({"messages": [{"role": "user", "content": "x"}] * count}, "/v1/chat/completions")


def slow_grammars(target: Target) -> Iterator[str]:
    yield target.post(_regex("((a{1,300}){1,300}){1,300}"))
    yield target.post(_regex("[^x]{1,8000}"))
    yield target.post(_schema({"type": "string", "maxLength": 10**6}))
    yield target.post(_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(990)}}))
    yield target.post({"prompt": "x", "guided_grammar": 'root ::= root root | "a" | ""'})
    yield target.post(_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}))
    for seed in range(4):
        draw = random.Random(seed)
        yield target.post(_regex("|".join(f"{draw.randrange(10**9)}[a-z]{{1,9}}" for _ in range(2_800))))


def abandoned_grammars(target: Target) -> Iterator[str]:
    """The client leaves while they are compiled."""
    body = {"model": "target", "max_tokens": 8, **_regex("((a{1,200}){1,200}){1,200}b")}
    data = json.dumps(body).encode()
    for _ in range(4):
        with target.connect() as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            time.sleep(0.3)
    yield "left"


def half_requests(target: Target) -> Iterator[str]:
    held = [target.connect() for _ in range(200)]
    for i, connection in enumerate(held):
        connection.sendall(
            (b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n")[i % 4]
        )
    time.sleep(2)
    for connection in held:
        with contextlib.suppress(OSError):
            connection.sendall(b"X")
    ended = 0
    for connection in held:
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                pass
            ended += 1
        connection.close()
    yield f"{ended} of {len(held)} ended by the server"


def no_http(target: Target) -> Iterator[str]:
    draw = random.Random(3)
    junk = [b"\x16\x03\x01", b"GET\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n", HEAD + b"A" * 100_000]
    for i in range(200):
        time.sleep(0.005)  # it is the junk that is tried, not how many connections a second there can be
        with contextlib.suppress(OSError), target.connect() as connection:
            connection.sendall(
                b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" if i % 2 else b""
            )
            connection.sendall(junk[i % len(junk)] + draw.randbytes(40))
    yield "sent"


def stopped_engine(target: Target) -> Iterator[str]:
    """A large request waits for an engine that stands still; then it is found out and restarted."""
    os.kill(target.worker, signal.SIGSTOP)
    yield target.post({"prompt": [7] * 1000, "bad_words": [f"word{i:05d}" * 20 for i in range(4000)]})
    yield target.wait(200, 60)


def killed_engine(target: Target) -> Iterator[str]:
    os.kill(target.worker, signal.SIGKILL)
    yield target.wait(503, 5)
    yield target.wait(200, 60)


def truncated_file(target: Target) -> Iterator[str]:
    file = max(target.model.iterdir(), key=lambda f: f.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    yield target.post({"prompt": "x", "max_tokens": 50})
    with contextlib.suppress(ProcessLookupError):
        os.kill(target.worker, signal.SIGKILL)  # what it has read already it could go on with
    yield target.wait(503, 90, restarting=False)
    yield target.post({"prompt": "x"})


# name -> (numbers in the list of what was seen, attack, whether the engine does not outlive it)
def greedy_requests(target: Target) -> Iterator[str]:
    """All within limits, each with work for minutes; the client leaves after a while. A chat has its first token."""
    draw = random.Random(3)
    texts = [" ".join(draw.choice(("the", "quick", "brown", "fox")) + str(i) for i in range(1_000)) for _ in range(100)]
    for path, body in (
        ("/v1/embeddings", {"input": texts[:40]}),
        ("/v1/completions", {"prompt": texts, "max_tokens": 16}),
        ("/v1/completions", {"prompt": "x", "n": 128, "max_tokens": 512, "ignore_eos": True}),
    ):
        data = json.dumps({"model": "target", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for connection in [stack.enter_context(target.connect()) for _ in range(8)]:
                connection.sendall(head.encode() + data)
            time.sleep(GREEDY_S)
            began = time.monotonic()
            told = target.post(
                {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, "/v1/chat/completions"
            )
            late = f" only after {time.monotonic() - began:.0f} s" if time.monotonic() - began > LATE_S else ""
            yield told + late


ATTACKS: dict[str, tuple[str, Callable[[Target], Iterator[str]], bool]] = {
    "tiny temperature": ("1", tiny_temperature, False),
    "nested pattern": ("2", nested_pattern, False),
    "tiny penalty": ("3", tiny_penalty, False),
    "bad words": ("4", many_bad_words, False),
    "stop strings x n": ("5", long_stops, False),
    "long text": ("7", long_text, False),
    "token ids": ("7", many_ids, False),
    "long message": ("7", long_message, False),
    "slow grammars": ("8", slow_grammars, False),
    "abandoned grammars": ("8", abandoned_grammars, False),
    "many messages": ("11", many_messages, False),
    "half requests": ("12", half_requests, False),
    "no HTTP": ("17", no_http, False),
    "greedy requests": ("", greedy_requests, False),
    "engine stopped": ("6, 10", stopped_engine, True),
    "engine killed": ("", killed_engine, True),
    "file truncated": ("15", truncated_file, True),
}
