"""Requests to a server that speaks OpenAI's API, and when which token of the answer came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2 as httpx

from toolkit.errors import ToolkitError, UsageError
from toolkit.profile.metrics import RequestRecord

Endpoint = Literal["completions", "chat"]
CONNECT_S = 10.0


@dataclass(frozen=True)
class TextAsk:
    """A prompt, and how many tokens to generate from it."""

    text: str
    output_len: int


@dataclass
class Client:
    """One server. ``extra``: fields for every request besides the usual ones. ``timeout``: seconds without a byte after
    which a request has failed. Use it as an async context manager."""

    url: str
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"{self.url}: expected the address of a server, such as http://127.0.0.1:23333")
        self.url = self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    async def __aenter__(self) -> Client:
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(self.timeout, connect=CONNECT_S, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def choose_model(self) -> str:
        """The model that is asked: the one given, else the server's first. Raises ToolkitError."""
        try:
            reply = await self._http.get("/v1/models")
            served = [card["id"] for card in reply.raise_for_status().json()["data"]]
        except httpx.HTTPStatusError as error:
            raise ToolkitError(f"{self.url}/v1/models: {_refusal(error.response)}") from error
        except (httpx.HTTPError, OSError) as error:
            raise ToolkitError(f"{self.url}: cannot be reached ({_why(error)})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ToolkitError(f"{self.url}/v1/models: expected OpenAI's list of models") from error
        if not served or (self.model is not None and self.model not in served):
            raise ToolkitError(f"{self.url}: --model {self.model}: found {', '.join(served) or 'no models'} there")
        self.model = self.model or served[0]
        return self.model

    def _body(self, ask: TextAsk) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": ask.text}
        if self.endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": ask.text}]}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt, "max_tokens": ask.output_len, **usage, **self.extra}

    async def run(self, ask: TextAsk) -> RequestRecord:
        """Send one request and read its stream. A failure is noted in the record."""
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        record = RequestRecord(0, time.perf_counter())
        pieces: list[tuple[float, int]] = []  # when, and how many characters
        usage: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", path, json=self._body(ask)) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    record.error = _refusal(reply)
                    return record
                async for chunk in _events(reply):
                    now = time.perf_counter()
                    if "error" in chunk:
                        record.error = str(chunk["error"])[:200]
                        return record
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or ():
                        if text := _text(choice):
                            pieces.append((now, len(text)))
        except (httpx.HTTPError, ValueError, TypeError, AttributeError) as error:
            record.error = _why(error)
        record.input_tokens = int(usage.get("prompt_tokens") or 0)
        record.arrivals = spread(pieces, int(usage.get("completion_tokens") or len(pieces)))
        if not record.arrivals and record.error is None:
            record.error = "the answer was empty"
        return record


def spread(pieces: list[tuple[float, int]], tokens: int) -> list[tuple[float, int]]:
    """(time, tokens) of each piece of an answer of ``tokens`` in all: one each, the rest by their characters.

    Servers join tokens that are ready at once, and say only at the end how many there were.
    """
    left, chars = tokens - len(pieces), sum(count for _, count in pieces)
    if left <= 0:
        return [(when, 1) for when, _ in pieces]
    found, given, seen = [], 0, 0
    for when, count in pieces:
        seen += count
        share = round(left * seen / chars) - given
        given += share
        found.append((when, 1 + share))
    return found


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """What the events of a stream hold."""
    rest = b""
    async for data in reply.aiter_raw():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield json.loads(payload)


def _text(choice: dict[str, Any]) -> str:
    """What a chunk adds to the answer: text, thoughts or a call."""
    delta = choice.get("delta") or {}
    found = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return found or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else "")


def _refusal(reply: httpx.Response) -> str:
    try:
        told = reply.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        told = reply.text
    return f"HTTP {reply.status_code}: {str(told).strip()[:200]}"


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
