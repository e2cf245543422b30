"""A client for the server on the standard library alone; the ``openai`` package works as well and does more."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from typing import Any

from toolkit.base.address import split_address
from toolkit.base.tls import checking, why
from toolkit.errors import ToolkitError

Piece = tuple[str, int, str | None]  # text, tokens so far (pieces until the server has told), finish_reason at the end


class APIClient:
    """Talks to ``api_server_url`` (scheme, host and port, with or without /v1); another raises UsageError.
    ``insecure``: over HTTPS, to whoever is there, whatever certificate it has. It goes by the proxies that the
    environment names (``http_proxy`` …), but where it is ``direct``.

    Each ``…_v1`` call is a generator: of one whole answer, or with ``stream=True`` of chunks as they come. An error of
    the server raises ToolkitError with its status and message.
    """

    direct = False

    def __init__(
        self, api_server_url: str, api_key: str | None = None, timeout: float | None = 600, insecure: bool = False
    ) -> None:
        split_address(api_server_url)
        self.url = api_server_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._talks: dict[int, list[dict[str, Any]]] = {}
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.timeout = timeout
        self.tls = checking(insecure) if self.url.startswith("https://") else None

    @property
    def available_models(self) -> list[str]:
        """Names that requests may use."""
        with self._open("/v1/models", None) as reply:
            told = reply.read()
        try:
            return [card["id"] for card in self._parsed(told)["data"]]
        except (LookupError, TypeError) as error:
            raise self._odd(told) from error

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

    def chat_interactive_v1(
        self,
        prompt: str | list[dict[str, Any]],
        session_id: int = -1,
        interactive_mode: bool = False,
        stream: bool = False,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """POST /v1/chat/interactive: the server keeps the conversation; ``fields`` as in its GenerateRequest."""
        talk = {"session_id": session_id, "interactive_mode": interactive_mode}
        return self._post("/v1/chat/interactive", {"prompt": prompt, "stream": stream, **talk, **fields})

    def encode(
        self, input: str | list[str], do_preprocess: bool = False, add_bos: bool = True
    ) -> tuple[list[Any], int | list[int]]:
        """(token ids, their number), of one text or as lists of several; ``do_preprocess``: of user messages."""
        with self._open("/v1/encode", {"input": input, "do_preprocess": do_preprocess, "add_bos": add_bos}) as reply:
            told = json.load(reply)
        return told["input_ids"], told["length"]

    def chat(self, prompt: str, session_id: int = 1, **fields: Any) -> Iterator[Piece]:
        """One turn of conversation ``session_id``, whose history is kept here: pieces of the answer as they come.

        ``fields`` as in the server's ChatCompletionRequest; ``model`` is its first by default. The turn enters the
        history when its answer ends.
        """
        messages = [*self._talks.get(session_id, ()), {"role": "user", "content": prompt}]
        answer = ""
        for piece in self._pieces("/v1/chat/completions", {"messages": messages, **fields}):
            answer += piece[0]
            yield piece
        self._talks[session_id] = [*messages, {"role": "assistant", "content": answer}]

    def end_session(self, session_id: int) -> None:
        """Forget what was said in a conversation."""
        self._talks.pop(session_id, None)

    def completion(self, prompt: str, **fields: Any) -> Iterator[Piece]:
        """Continue a text: pieces as they come. ``fields`` as in the server's CompletionRequest."""
        return self._pieces("/v1/completions", {"prompt": prompt, **fields})

    def _pieces(self, path: str, fields: dict[str, Any]) -> Iterator[Piece]:
        model = fields.pop("model", None) or next(iter(self.available_models), None)
        if model is None:  # as of a proxy that has no nodes yet
            raise ToolkitError(f"{self.url}: found no models there")
        body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        tokens, reason = 0, None
        for chunk in self._post(path, body):
            for choice in chunk.get("choices") or []:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                reason = choice.get("finish_reason") or reason
                tokens += bool(text)
                if text:
                    yield text, tokens, None
            if usage := chunk.get("usage"):
                tokens = usage["completion_tokens"]
        yield "", tokens, reason

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        ended = False
        with self._open(path, body) as reply:
            try:
                if not body["stream"]:
                    yield self._parsed(reply.read())
                    return
                for line in reply:
                    data = line.removeprefix(b"data: ").strip()
                    if data.startswith(b":"):  # a sign of life, where nothing is said for long
                        continue
                    if data == b"[DONE]":
                        return
                    if data:
                        chunk = _checked(self._parsed(data))
                        ended = ended or _ends(chunk)
                        yield chunk
            except (HTTPException, OSError) as error:
                raise ToolkitError(f"{self.url}: the answer broke off ({error})") from error
        if not ended:  # as when the server dies: urllib takes that for the end
            raise ToolkitError(f"{self.url}: the answer broke off (the connection was closed)")

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        ways = [urllib.request.ProxyHandler({})] if self.direct else []
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=self.tls), *ways)

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            reply: HTTPResponse = self._opener.open(request, timeout=self.timeout)
            return reply
        except urllib.error.HTTPError as error:
            raise ToolkitError(f"{self.url}{path}: {error.code}: {_message(error.read())}") from error
        except (HTTPException, OSError) as error:
            raise ToolkitError(f"{self.url}: cannot be reached ({why(getattr(error, 'reason', error))})") from error

    def _parsed(self, told: bytes) -> Any:
        try:
            return json.loads(told)
        except (ValueError, RecursionError) as error:
            raise self._odd(told) from error

    def _odd(self, told: bytes) -> ToolkitError:
        """For what another program says."""
        return ToolkitError(f"{self.url}: no server of OpenAI's API answers there, found {told[:80]!r}")


def client(
    api_server_url: str = "http://127.0.0.1:23333",
    api_key: str | None = None,
    timeout: float | None = 600,
    insecure: bool = False,
) -> APIClient:
    """A client of a running server; the arguments are those of ``APIClient``."""
    return APIClient(api_server_url, api_key, timeout, insecure)


def _checked(chunk: dict[str, Any]) -> dict[str, Any]:
    if "error" in chunk:
        raise ToolkitError(f"the server ended the answer: {chunk['error']['message']}")
    return chunk


def _ends(chunk: Any) -> bool:
    """Whether it tells why the answer is over; of LMDeploy's own API the chunk itself does."""
    told = [chunk, *(chunk.get("choices") or ())] if isinstance(chunk, dict) else []
    return any(isinstance(one, dict) and one.get("finish_reason") for one in told)


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace")[:200]
