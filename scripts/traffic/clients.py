"""What clients do to a server in ``scripts/traffic/soak``: each function of CASES is one client's visit."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAME = "soak"
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD}}
WORDS = "the river keeper of seven lights wrote down every ship that came past his small grey island in spring".split()


class Client:
    """One who draws from ``random`` what to do. ``told``: how often which status came, or which error."""

    def __init__(self, url: str, seed: int) -> None:
        self.address = url.removeprefix("http://")
        self.random = random.Random(seed)
        self.told: dict[str, int] = {}
        self.first: list[float] = []  # seconds to the first token of its streams
        self.seed = seed
        self.cases = CASES

    def visit(self) -> None:
        """One visit of any kind."""
        case = self.random.choice(self.cases)
        try:
            outcome = case(self)
        except (OSError, http.client.HTTPException) as error:
            outcome = type(error).__name__
        key = f"{case.__name__}: {outcome}"
        self.told[key] = self.told.get(key, 0) + 1

    def text(self, words: int) -> str:
        return " ".join(self.random.choices(WORDS, k=words))

    def chat(self, words: int = 12, **fields: Any) -> dict[str, Any]:
        talk = [{"role": "user", "content": self.text(words)}]
        return {"model": NAME, "messages": talk, "max_tokens": self.random.randint(1, 24), **fields}

    @contextmanager
    def asked(self, path: str, body: Any, method: str = "POST") -> Iterator[http.client.HTTPResponse]:
        """The answer's head; the connection is closed at the end, whatever is left of the answer."""
        connection = http.client.HTTPConnection(self.address, timeout=120)
        try:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def ask(self, path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
        with self.asked(path, body, method) as reply:
            return reply.status, reply.read()


class Greedy(Client):
    """One who asks for as much as fits into a request."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url, seed)
        self.cases = GREEDY


def whole(client: Client) -> Any:
    return client.ask("/v1/chat/completions", client.chat(temperature=1, seed=client.random.randrange(9)))[0]


def stream(client: Client) -> Any:
    body, began, data = client.chat(stream=True, stream_options={"include_usage": True}), time.monotonic(), b""
    with client.asked("/v1/chat/completions", body) as reply:
        status = reply.status
        for line in reply:
            if not data and b'"content":"' in line.replace(b'"content":""', b""):
                client.first.append(time.monotonic() - began)
                data = line
            data += line if b"[DONE]" in line else b""
    return status if b"[DONE]" in data else f"{status} without an end"


def several(client: Client) -> Any:
    body = {"model": NAME, "prompt": [client.text(5), client.text(9)], "n": 3, "logprobs": 2, "max_tokens": 6}
    return client.ask("/v1/completions", {**body, "echo": client.random.random() < 0.5})[0]


def message(client: Client) -> Any:
    return client.ask("/v1/messages", client.chat(stream=client.random.random() < 0.5))[0]


def response(client: Client) -> Any:
    body = {"model": NAME, "input": client.text(8), "max_output_tokens": 6}
    status, data = client.ask("/v1/responses", body)
    if status == 200:
        before = json.loads(data)["id"]
        status, _ = client.ask("/v1/responses", {**body, "previous_response_id": before, "stream": True})
        client.ask(f"/v1/responses/{before}", None, "DELETE")
    return status


def tool(client: Client) -> Any:
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    return client.ask("/v1/chat/completions", client.chat(tools=tools, tool_choice="required"))[0]


def guided(client: Client) -> Any:
    return client.ask("/v1/chat/completions", client.chat(response_format=FORM, max_tokens=32))[0]


def vectors(client: Client) -> Any:
    if client.random.random() < 0.5:
        return client.ask("/v1/embeddings", {"model": NAME, "input": [client.text(6)] * 3})[0]
    return client.ask("/v1/rerank", {"model": NAME, "query": client.text(3), "documents": [client.text(9)] * 2})[0]


def interactive(client: Client) -> Any:
    body = {"prompt": client.text(6), "session_id": client.seed % 8, "interactive_mode": True, "request_output_len": 6}
    return client.ask("/v1/chat/interactive", {**body, "interactive_mode": client.random.random() < 0.7})[0]


def long_prompt(client: Client) -> Any:
    return client.ask("/v1/chat/completions", client.chat(words=client.random.randint(200, 900)))[0]


def too_long(client: Client) -> Any:
    return client.ask("/v1/chat/completions", client.chat(words=6000))[0]


def nonsense(client: Client) -> Any:
    bodies = [b"{", b"[]", {"model": "other", "messages": "hi"}, client.chat(mystery=1), client.chat(n=-1)]
    bodies.append(client.chat(response_format={"type": "regex_schema", "regex_schema": "(("}))
    return client.ask("/v1/chat/completions", client.random.choice(bodies))[0]


def leaves(client: Client) -> Any:
    """Goes away while the answer streams, or before it has begun."""
    with client.asked("/v1/chat/completions", client.chat(stream=True, max_tokens=400, ignore_eos=True)) as reply:
        reply.read(client.random.randint(1, 2000))
    connection = socket.create_connection(client.address.split(":"), timeout=60)  # type: ignore[arg-type]
    with connection:
        body = json.dumps(client.chat(n=2, max_tokens=300, temperature=1, ignore_eos=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body[: client.random.randint(1, len(body)) if client.seed % 2 else None])
        time.sleep(client.random.random() * 0.2)
    return "left"


def slow(client: Client) -> Any:
    """Reads a long stream bit by bit."""
    body = client.chat(stream=True, max_tokens=120, ignore_eos=True, logprobs=True, top_logprobs=5)
    with client.asked("/v1/chat/completions", body) as reply:
        while reply.read(512):
            time.sleep(0.02)
        return reply.status


def cancels(client: Client) -> Any:
    """Another connection ends the answer."""
    name = client.random.randrange(1 << 40)
    with client.asked("/v1/chat/completions", client.chat(stream=True, max_tokens=400, session_id=name)) as reply:
        status, _ = client.ask("/abort_request", {"session_id": name})
        with suppress(OSError):
            reply.read()
        return status


def looks(client: Client) -> Any:
    return client.ask(client.random.choice(["/health", "/metrics", "/v1/models", "/docs", "/"]), None, "GET")[0]


CASES: list[Callable[[Client], Any]] = [
    *(whole, stream, several, message, response, tool, guided, vectors, interactive),
    *(long_prompt, too_long, nonsense, leaves, slow, cancels, looks),
]


def many_vectors(client: Client) -> Any:
    return client.ask("/v1/embeddings", {"model": NAME, "input": [client.text(600) for _ in range(20)]})[0]


def many_prompts(client: Client) -> Any:
    body = {"model": NAME, "prompt": [client.text(300) for _ in range(20)], "max_tokens": 16, "ignore_eos": True}
    return client.ask("/v1/completions", body)[0]


def many_choices(client: Client) -> Any:
    body = {"model": NAME, "prompt": client.text(50), "n": 128, "max_tokens": 32, "temperature": 1, "ignore_eos": True}
    return client.ask("/v1/completions", body)[0]


GREEDY: list[Callable[[Client], Any]] = [many_vectors, many_prompts, many_choices]
