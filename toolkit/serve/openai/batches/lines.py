"""Lines of a batch as they come in: read one at a time, and what each of them asks for."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import BaseModel
from pydantic_core import from_json

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import shown
from toolkit.serve.fields.protocol import ChatCompletionRequest, CompletionRequest
from toolkit.serve.generation.read import SMALL
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.json_values import count_values
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches.urls import (
    CHAT,
    CLASSIFY,
    EMBEDDINGS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    TEXT,
    URLS,
)
from toolkit.serve.openai.label_routes import ClassifyRequest, PoolingRequest
from toolkit.serve.openai.pooling_routes import EmbeddingsRequest, RerankRequest, ScoreRequest
from toolkit.serve.openai.responses.fields import ResponsesRequest

# The body that is read at each url.
ENDPOINTS: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletionRequest,
    TEXT: CompletionRequest,
    EMBEDDINGS: EmbeddingsRequest,
    RESPONSES: ResponsesRequest,
    RERANK: RerankRequest,
    SCORE: ScoreRequest,
    CLASSIFY: ClassifyRequest,
    POOLING: PoolingRequest,
}
OTHER_NAMES = {"/rerank": RERANK, "/v2/rerank": RERANK, "/score": SCORE}
MOST_NAME = 512  # characters of a custom_id
PIECE = 1 << 20  # bytes in which the rest of a line that is too long is stepped over


class LineFault(Exception):
    """A line that is no request; ``code`` and the message are what its answer says."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True)
class Line:
    """``number``: from 1, that of a file's line or of a row. ``length``: bytes that it had where ``data`` is cut."""

    number: int
    data: bytes
    length: int


@dataclass(frozen=True)
class Asked:
    """The request that a line is."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass
class Bounds:
    """What a line may be, as the bodies of requests. ``session_len``: 0 while no model is loaded."""

    limits: Limits
    session_len: int = 0

    @property
    def most(self) -> int:
        """Bytes."""
        return self.limits.max_body_bytes


class Source(Protocol):
    """Lines that can be gone through several times. ``name``: for messages."""

    name: str

    def __iter__(self) -> Iterator[Line]: ...

    def request(self, line: Line) -> Asked:
        """Raises LineFault."""
        ...


def split(file: IO[bytes], keep: int) -> Iterator[tuple[bytes, int, bool]]:
    """Each line of ``file``: its first ``keep`` bytes, how many it has, and whether it is ended by a newline, which
    counts in neither."""
    while part := file.readline(keep + 1):
        length, last = len(part), part
        while not last.endswith(b"\n") and (more := file.readline(PIECE)):
            length, last = length + len(more), more
        whole = last.endswith(b"\n")
        yield part.removesuffix(b"\n")[:keep], length - whole, whole


class JsonLines:
    """OpenAI's form of a batch: a JSON object a line. ``only``: the one url that lines may have."""

    def __init__(self, path: Path, bounds: Bounds, name: str | None = None, only: str | None = None) -> None:
        self.name = str(path) if name is None else name
        self._path = path
        self._bounds = bounds
        self._only = only

    def __iter__(self) -> Iterator[Line]:
        number = 0
        with self._path.open("rb") as file:
            for data, length, _ in split(file, self._bounds.most):
                number += 1
                if number == 1:
                    data = data.removeprefix(BOM_UTF8)
                if data.strip():
                    yield Line(number, data, length)
                else:
                    number += _skip_empty(file)

    def request(self, line: Line) -> Asked:
        """Raises LineFault."""
        asked = read_request(line, self._bounds)
        if self._only not in (None, asked.url):
            raise LineFault(
                "mismatched_url", f"url: expected {self._only} as the batch has it, found {asked.url}", asked.custom_id
            )
        return asked


def _skip_empty(file: BufferedReader) -> int:
    """Step over empty lines, and say how many: many at a time, for a file may have nothing else."""
    found = 0
    while ahead := file.peek():
        empty = ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip())) + 1
        if not empty:
            break
        found += ahead.count(b"\n", 0, empty)
        file.read(empty)
    return found


def read_object(line: Line, bounds: Bounds) -> dict[str, Any]:
    """Raises LineFault where a line is too much, or no JSON object."""
    if line.length > bounds.most:
        expected = f"at most {bounds.most:,} (--max-body-bytes)"
        raise LineFault("line_too_long", f"found {line.length:,} bytes, expected {expected}")
    try:
        if line.length > SMALL:
            bounds.limits.check_values(count_values(line.data), bounds.session_len)
        data = from_json(line.data, allow_inf_nan=False)
    except ApiError as error:
        raise LineFault("line_too_long", error.message) from error
    except ValueError as error:
        raise LineFault("invalid_json", f"not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise LineFault("invalid_json", f"expected a JSON object, found {shown(data, 60)}")
    return data


def read_request(line: Line, bounds: Bounds) -> Asked:
    """A line of OpenAI's form. Raises LineFault."""
    data = read_object(line, bounds)
    name = custom_id(data.get("custom_id"))
    method, url, body = data.get("method"), data.get("url"), data.get("body")
    if method != "POST":
        raise LineFault("invalid_method", f"method: expected 'POST', found {shown(method)}", name)
    url = OTHER_NAMES.get(url, url) if isinstance(url, str) else None
    if url not in URLS:
        raise LineFault("invalid_url", f"url: expected {' or '.join(URLS)}, found {shown(data.get('url'))}", name)
    if not isinstance(body, dict):
        raise LineFault("invalid_body", f"body: expected an object, found {shown(body, 60)}", name)
    if body.get("stream"):
        raise LineFault("invalid_body", "body.stream: a batch's answers come whole; leave it out", name)
    return Asked(name, url, body)


def custom_id(found: Any) -> str:
    """``found`` as the name of a line. Raises LineFault."""
    if not isinstance(found, str) or not 0 < len(found) <= MOST_NAME:
        expected = f"a text of 1 to {MOST_NAME} characters"
        raise LineFault("invalid_custom_id", f"custom_id: expected {expected}, found {shown(found, 60)}")
    return found
