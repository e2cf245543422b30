"""A client for the server on the standard library alone; the ``openai`` package works as well and does more."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

from toolkit.errors import ToolkitError, UsageError


class APIClient:
    """Talks to ``api_server_url`` (scheme, host and port); one without a scheme raises UsageError.

    Each call is a generator: of one whole answer, or with ``stream=True`` of chunks as they come. An error of the
    server raises ToolkitError with its status and message.
    """

    def __init__(self, api_server_url: str, api_key: str | None = None, timeout: float | None = 600) -> None:
        if not api_server_url.startswith(("http://", "https://")):
            raise UsageError(f"{api_server_url}: expected the address of a server, such as http://127.0.0.1:23333")
        self.url = api_server_url.rstrip("/")
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.timeout = timeout

    @property
    def available_models(self) -> list[str]:
        """Names that requests may use."""
        with self._open("/v1/models", None) as reply:
            return [card["id"] for card in json.load(reply)["data"]]

    def chat_completions_v1(
        self, model: str, messages: str | list[dict[str, Any]], stream: bool = False, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """POST /v1/chat/completions; ``fields`` as in the server's ChatCompletionRequest."""
        return self._post("/v1/chat/completions", {"model": model, "messages": messages, "stream": stream, **fields})

    def completions_v1(
        self, model: str, prompt: str | list[Any], stream: bool = False, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """POST /v1/completions; ``fields`` as in the server's CompletionRequest."""
        return self._post("/v1/completions", {"model": model, "prompt": prompt, "stream": stream, **fields})

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, body) as reply:
            if not body["stream"]:
                yield json.load(reply)
                return
            try:
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        yield _checked(json.loads(data))
            except HTTPException as error:
                raise ToolkitError(f"{self.url}: the answer broke off ({error})") from error

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            raise ToolkitError(f"{self.url}{path}: {error.code}: {_message(error.read())}") from error
        except (urllib.error.URLError, OSError) as error:
            raise ToolkitError(f"{self.url}: cannot be reached ({getattr(error, 'reason', error)})") from error


def _checked(chunk: dict[str, Any]) -> dict[str, Any]:
    if "error" in chunk:
        raise ToolkitError(f"the server ended the answer: {chunk['error']['message']}")
    return chunk


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace")[:200]
