"""Errors as OpenAI's API words them, ``{"error": {message, type, param, code}}``, or Anthropic's or Ollama's, and their
status."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from toolkit.configs.checks import did_you_mean, shown
from toolkit.errors import BusyError, ToolkitError, UsageError
from toolkit.serve.fields.strict import fields_at

# Fields whose HTTP name differs from GenerationConfig's, so that an error names what the client sent.
HTTP_FIELD = {"max_new_tokens": "max_tokens", "random_seed": "seed", "stop_words": "stop"}
_FIELD = re.compile(r"[a-z_]+(\[\d+\]|\.[a-z_]+)*")  # how our own messages name a field: messages[0].role
RETRY_S = 2
# Codes of a 503 that holds for all requests. Any other has this header: it is of one request, or of one moment.
UNWELL = frozenset(("shutting_down", "sleeping", "updating", "engine_unavailable", "no_node"))
BUSY = "x-toolkit-busy"
MANY_FAULTS = 1000  # pydantic tells all or none, in a time that grows with them
TYPE_OF_STATUS = {  # of others below 500 "invalid_request_error", then "server_error"
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    503: "service_unavailable_error",
}
ANTHROPIC = "/v1/messages"  # its routes begin so
OLLAMA = "/api/"  # likewise
RESPONSES = "/v1/responses"  # likewise
# What fields of our requests are called by APIs whose own requests become ours: an error names what the client sent.
ANTHROPIC_FIELDS = {"response_format": "output_config.format"}
OLLAMA_FIELDS = {"response_format": "format"}
RESPONSES_FIELDS = {"response_format": "text.format", "messages": "input"}  # of other numbers
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request that is answered with ``status`` and the envelope of its API. ``retry_after``: seconds after which a
    client whose request came too early may ask again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after or RETRY_S
        self.type = TYPE_OF_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")

    @property
    def headers(self) -> dict[str, str] | None:
        """Clients of both APIs ask again after so many seconds, proxies another server at once."""
        if self.status not in (429, 503):
            return None
        busy = {BUSY: "1"} if self.status == 503 and self.code not in UNWELL else {}
        return {"retry-after": str(self.retry_after), **busy}

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The envelope of Anthropic's API."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._naming(ANTHROPIC_FIELDS)[1]}}

    def ollama(self) -> dict[str, Any]:
        """The envelope of Ollama's API."""
        return {"error": self._naming(OLLAMA_FIELDS)[1]}

    def responses(self) -> dict[str, Any]:
        """The envelope of the Responses API."""
        told = self.envelope()
        told["error"]["param"], told["error"]["message"] = self._naming(RESPONSES_FIELDS)
        return told

    def _naming(self, names: Mapping[str, str]) -> tuple[str | None, str]:
        """(param, message) for an API that has other ``names`` for some of our fields, and none for what is in them."""
        field, colon, rest = self.message.partition(":")
        called = names.get(_top(field)) if colon else None
        param = self.param and names.get(_top(self.param), self.param)
        return param, self.message if called is None else f"{called}:{rest}"

    def envelope_at(self, path: str) -> dict[str, Any]:
        """The envelope of the API that ``path`` belongs to."""
        if path.startswith(OLLAMA):
            return self.ollama()
        if path.startswith(RESPONSES):
            return self.responses()
        return self.anthropic() if path.startswith(ANTHROPIC) else self.envelope()


def _top(field: str) -> str:
    """The first name of a dotted path."""
    return field.partition(".")[0].partition("[")[0]


class TooLong(ApiError):
    """400 for a prompt of ``found`` tokens (or more, as ``text`` says) where there may be ``most``. ``longer``: what
    whoever runs the server can do."""

    def __init__(self, param: str, found: int, most: int, text: str, longer: str) -> None:
        message = (
            f"{param}: found {text}, expected at most {most} (the session length less one to generate);"
            f" shorten it, or for the server: {longer}"
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.found = found
        self.most = most

    def anthropic(self) -> dict[str, Any]:
        """In Anthropic's own words, by which its clients know that they have to shorten a conversation."""
        words = f"prompt is too long: {self.found} tokens > {self.most} maximum"
        return ApiError(self.status, words).anthropic()


class NoThreads(ApiError):
    """400 for a conversation that is to be kept here, as Anthropic's server does. Its clients know by the ``details``
    that they have to send all of it."""

    def __init__(self) -> None:
        message = "thread: conversations are not kept here; send all messages, the prefix cache knows the earlier ones"
        super().__init__(400, message, param="thread", code="thread_unsupported_request")

    def anthropic(self) -> dict[str, Any]:
        told = super().anthropic()
        told["error"]["details"] = {"error_code": self.code, "unsupported": ["thread"]}
        return told


def not_served(model: str | None, names: Iterable[str]) -> ApiError:
    """404 for a model that is none of ``names``, which this server has."""
    message = f"model: {shown(model)} is not served here; this server has {', '.join(map(repr, names))}"
    return ApiError(404, message, param="model", code="model_not_found")


def bad_field(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400 for the field ``param`` (dotted path, list positions as numbers)."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unless_json(raw: Request) -> ApiError | None:
    """415 for a request that does not say that its body is JSON. No page of somebody else can send one that does: its
    browser would first ask this server, which does not answer such questions."""
    kind = raw.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() == "application/json":
        return None
    text = f"{raw.url.path}: expected the header 'Content-Type: application/json', found {kind or 'none'!r:.100}"
    return ApiError(415, text, code="not_json")


def from_validation(error: ValidationError, model: type[BaseModel] | None = None) -> ApiError:
    """The first complaint of pydantic as one line that names the field and what was found. ``model``: what the body was
    to be, by which the field may be named that was meant."""
    if (count := error.error_count()) > MANY_FAULTS:
        return ApiError(400, f"The request body has {count:,} wrong or unknown fields")
    first = error.errors(include_url=False)[0]
    param = " ".join(".".join(str(part) for part in first["loc"]).split())[:200] or None  # a name may be any text
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON ({message.removeprefix('Invalid JSON: ')})")
    if kind == "model_type" and param is None:
        return ApiError(400, "The request body must be a JSON object")
    if kind == "extra_forbidden":
        near = "" if model is None else did_you_mean(str(first["loc"][-1])[:100], fields_at(model, first["loc"]))
        return bad_field(param, f"unknown field; this server does not know it{near}", "unknown_field")
    if kind == "missing":
        return bad_field(param, "required, but missing", "missing_field")
    if kind == "none_required" or (kind == "too_long" and first["ctx"]["max_length"] == 0):
        message = f"not supported here; leave it out, found {shown(first['input'], 60)}"
    elif kind != "value_error":
        message = f"{message}, found {shown(first['input'], 60)}"
    elif param is None:  # a check over several fields names its field itself
        param, _, message = message.partition(": ")
    return bad_field(param, message)


def from_exception(error: Exception) -> ApiError:
    """What a client is told about any exception raised while answering."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, UsageError):
        name, _, rest = str(error).partition(": ")
        if rest and _FIELD.fullmatch(name):
            name = name.replace("[", ".").replace("]", "")
            return bad_field(HTTP_FIELD.get(name, name), rest)
        return ApiError(400, str(error))
    if isinstance(error, BusyError):
        return ApiError(503, str(error))
    if isinstance(error, ToolkitError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "Internal error; the server's log has the details", code="internal_error")
