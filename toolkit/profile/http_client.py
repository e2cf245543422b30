"""Requests to a server that speaks OpenAI's API, and when which token of the answer came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

import h11
import httpx2 as httpx

from toolkit.base.address import split_address
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.tls import checking, why
from toolkit.errors import ToolkitError, UsageError
from toolkit.profile.exchange import Exchange, post
from toolkit.profile.metrics import RequestRecord

Endpoint = Literal["completions", "chat"]
CONNECT_S = 10.0
MOST_TOKENS = 1 << 24  # of one answer or prompt, beyond which no server tells the truth


@dataclass(frozen=True)
class TextAsk:
    """A prompt, and how many tokens to generate from it. ``images``: URLs, for the endpoint "chat"."""

    text: str
    output_len: int
    images: tuple[str, ...] = ()


@dataclass
class Client:
    """One server. ``extra``: fields for every request besides the usual ones. ``timeout``: seconds without a byte after
    which a request has failed. ``insecure``: whatever certificate it has."""

    url: str
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    insecure: bool = False

    def __post_init__(self) -> None:
        parts = split_address(self.url)
        if "@" in parts.netloc:
            raise UsageError(f"{parts.hostname}: expected an address without user and password; use --api-key")
        # Made once: it takes longer than many a first token.
        self._tls = checking(self.insecure) if self.url.startswith("https://") else None
        self.url = self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    async def choose_model(self) -> str:
        """The model that is asked: the one given, else the server's first. Raises ToolkitError."""
        timeout = httpx.Timeout(self.timeout, connect=CONNECT_S)
        try:
            verify = self._tls or True
            async with httpx.AsyncClient(
                headers=self._headers, timeout=timeout, trust_env=False, verify=verify
            ) as http:
                reply = await http.get(f"{self.url}/v1/models")
            served = [card["id"] for card in reply.raise_for_status().json()["data"]]
        except httpx.HTTPStatusError as error:
            refused = _refusal(error.response.status_code, error.response.content)
            raise ToolkitError(f"{self.url}/v1/models: {refused}") from error
        except (httpx.HTTPError, OSError) as error:
            raise ToolkitError(f"{self.url}: cannot be reached ({why(_why(error))})") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ToolkitError(f"{self.url}/v1/models: expected OpenAI's list of models") from error
        if not served or (self.model is not None and self.model not in served):
            raise ToolkitError(f"{self.url}: --model {self.model}: found {', '.join(served) or 'no models'} there")
        self.model = self.model or served[0]
        return self.model

    def _body(self, ask: TextAsk) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": ask.text}
        if self.endpoint == "chat":
            shown = [{"type": "image_url", "image_url": {"url": url}} for url in ask.images]
            content = [*shown, {"type": "text", "text": ask.text}] if shown else ask.text
            prompt = {"messages": [{"role": "user", "content": content}]}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt, "max_tokens": ask.output_len, **usage, **self.extra}

    async def run(self, ask: TextAsk) -> Exchange:
        """Send one request and write its stream down, for ``record``."""
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        headers = {"Content-Type": "application/json", "User-Agent": "toolkit", **self._headers}
        body = json.dumps(self._body(ask)).encode()
        return await post(self.url + path, body, headers, self.timeout, CONNECT_S, self._tls)

    def record(self, exchange: Exchange) -> RequestRecord:
        """What a request's exchange was. A failure is noted in the record."""
        record = RequestRecord(0, exchange.start, error=exchange.error)
        pieces: list[tuple[float, int]] = []  # when, and how many characters
        usage: dict[str, Any] = {}
        try:
            for when, chunk in _events(exchange):
                if chunk.get("error"):  # some servers have the field in each, null
                    record.error = str(chunk["error"])[:200]
                    return record
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    if text := _text(choice):
                        pieces.append((when, len(text)))
        except (_Refused, h11.RemoteProtocolError, ValueError, TypeError, AttributeError) as error:
            record.error = record.error or _why(error)
        record.input_tokens = _count(usage, "prompt_tokens") or 0
        record.arrivals = spread(pieces, _count(usage, "completion_tokens") or len(pieces))
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


def _count(usage: Any, field: str) -> int | None:
    """A number of tokens that a server tells, None where it tells none that can be."""
    found = usage.get(field) if isinstance(usage, dict) else None
    return found if isinstance(found, int) and 0 <= found <= MOST_TOKENS else None


class _Refused(Exception):
    """The server answered with another status than 200."""


def _events(exchange: Exchange) -> Iterator[tuple[float, dict[str, Any]]]:
    """What the events of a stream hold, and when they came. Raises _Refused."""
    rest, status = b"", 200
    for when, event in exchange.read():
        if isinstance(event, h11.Response):
            status = event.status_code
        if not isinstance(event, h11.Data):
            continue
        if status != 200:
            rest += event.data
            continue
        *lines, rest = (rest + event.data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield when, json.loads(payload)
    if status != 200:
        raise _Refused(_refusal(status, rest))


def _text(choice: dict[str, Any]) -> str:
    """What a chunk adds to the answer: text, thoughts or a call."""
    delta = choice.get("delta") or {}
    found = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return found or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else "")


def _refusal(status: int, body: bytes) -> str:
    try:
        told = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        told = body.decode(errors="replace")
    return f"HTTP {status}: {str(told).strip()[:200]}"


def _why(error: Exception) -> str:
    if isinstance(error, _Refused):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
