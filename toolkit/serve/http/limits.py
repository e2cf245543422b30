"""Every limit of the server, once: ``tool serve api_server --help`` and docs/limits.md show this table.

A request is measured before anything is done whose cost grows with it. What is refused is told the limit and the option
that sets it. What a request's single fields may be stands in ``toolkit/configs/generation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import option, option_of, spelled
from toolkit.engine.process.outage import PATIENCE

if TYPE_CHECKING:
    from toolkit.serve.fields.protocol import SampledRequest
    from toolkit.serve.http.errors import ApiError


def _limit(default: float, help: str) -> Any:
    return option(default, help, min=1 if isinstance(default, int) else 0)


@dataclass(frozen=True)
class Limits:
    """Sizes are counts unless their name says bytes or chars; times are seconds. Each is an option of its name."""

    max_body_bytes: int = _limit(16 << 20, "Bytes of a request's body.")
    max_pending_bytes: int = _limit(256 << 20, "Bytes of the bodies of all requests that are being answered.")
    max_held_bytes: int = _limit(1 << 30, "Bytes that answers hold until they are sent whole: tokens x logprobs.")
    max_values: int = _limit(1 << 17, "JSON values in a body; a prompt of token ids may always fill the session.")
    max_prompt_chars: int = _limit(1 << 22, "Characters of a request's prompts or messages together.")
    max_messages: int = _limit(4096, "Messages of a request.")
    max_choices: int = _limit(2048, "Prompts x n (or best_of) of a request.")
    max_total_tokens: int = _limit(
        1 << 24, "Prompts x n (or best_of) x max_tokens of a request; tokens of texts to embed or rank."
    )
    max_format_bytes: int = _limit(1 << 16, "Bytes of response_format as JSON.")
    max_tools: int = _limit(128, "Tools of a request.")
    max_tools_bytes: int = _limit(1 << 18, "Bytes of tools as JSON.")
    max_kwargs_bytes: int = _limit(1 << 16, "Bytes of chat_template_kwargs as JSON.")
    max_images: int = _limit(32, "Images and videos of a request.")
    max_image_bytes: int = _limit(16 << 20, "Bytes of an image's file.")
    max_image_pixels: int = _limit(64 << 20, "Pixels of an image, or of a frame of a video.")
    image_timeout: float = _limit(10.0, "Seconds for a request's images and videos to be fetched by their URLs.")
    max_video_bytes: int = _limit(64 << 20, "Bytes of a video's file.")
    max_video_seconds: float = _limit(3600.0, "Seconds that a video lasts.")
    max_video_frames: int = _limit(128, "Frames of a video that a request may ask for.")
    max_decoding_bytes: int = _limit(
        768 << 20, "Bytes that images and videos hold while they are decoded, of all requests."
    )
    max_fetched_bytes: int = _limit(256 << 20, "Bytes of fetched images and videos that wait to be decoded.")
    max_prepared_bytes: int = _limit(
        1 << 30, "Bytes of images and videos prepared for the model: of requests under way, and kept for the next turn."
    )
    max_sessions: int = _limit(256, "Conversations of /v1/chat/interactive that are kept.")
    session_timeout: float = _limit(3600.0, "Seconds without a turn after which such a conversation is forgotten.")
    max_stored_responses: int = _limit(1024, "Responses kept for previous_response_id.")
    max_stored_bytes: int = _limit(64 << 20, "Bytes of the conversations kept for previous_response_id.")
    stored_response_seconds: float = _limit(3600.0, "Seconds for which a response is kept.")
    max_file_bytes: int = _limit(200 << 20, "Bytes of a file for a batch.")
    max_files: int = _limit(1000, "Files that are kept, batches' answers too; as many batches that have ended.")
    max_files_bytes: int = _limit(1 << 30, "Bytes of all these files together.")
    file_seconds: float = _limit(2592000.0, "Seconds for which such a file, and a batch, is kept.")
    max_batches: int = _limit(100, "Batches that wait or run.")
    max_batch_lines: int = _limit(50000, "Lines of a batch.")
    batch_lines_at_once: int = _limit(
        64, "Lines of batches that are answered at once; a quarter of the places for requests is left to others."
    )
    max_queue: int = _limit(
        1024, "Requests that wait for a place in the batch; more are rejected with 429 and Retry-After."
    )
    max_connections: int = _limit(2048, "Open connections.")
    read_timeout: float = _limit(30.0, "Seconds for a request's head to arrive; for its body, and one more a 64 KiB.")
    write_timeout: float = _limit(30.0, "Seconds for an answer to be taken by its client, and one more a 64 KiB of it.")
    prompt_timeout: float = _limit(60.0, "Seconds for a request to be checked, rendered and tokenized.")
    engine_timeout: float = _limit(
        PATIENCE, "Seconds without a sign of life, while requests wait, after which the engine is restarted; 0 = never."
    )

    def check_body(self, data: Any) -> None:
        """Raise ApiError where a field of the body (as JSON has it, not validated yet) is beyond its limit."""
        if not isinstance(data, dict):
            return
        for name, param, unit, size in _SIZES:
            if (value := data.get(param)) and (found := size(value)) > getattr(self, name):
                raise self.refusal(name, param, found, unit)
        for param in _TEXTS:
            if (chars := _characters(data.get(param))) > self.max_prompt_chars:
                raise self.refusal("max_prompt_chars", param, chars, "characters")

    def check_counts(self, messages: int, tools: int) -> None:
        """Raise ApiError where a request that another API's became has too many of them."""
        if messages > self.max_messages:
            raise self.refusal("max_messages", "messages", messages, "messages")
        if tools > self.max_tools:
            raise self.refusal("max_tools", "tools", tools, "tools")

    def check_work(self, request: SampledRequest, prompts: int, token_limit: int | None, session_len: int) -> None:
        """Raise ApiError where a valid request asks for too many tokens; one full session is never too much."""
        choices = prompts * request.drawn
        if choices > self.max_choices:
            several = "n" if request.drawn == (request.n or 1) else "best_of"
            found = f"choices (prompts x {several})"
            raise self.refusal("max_choices", "prompt" if prompts > 1 else several, choices, found)
        tokens = choices * (session_len if token_limit is None else min(token_limit, session_len))
        if tokens > max(self.max_total_tokens, session_len):
            raise self.refusal("max_total_tokens", "max_tokens", tokens, "tokens (prompts x answers x max_tokens)")

    def check_prompts(self, param: str, found: int) -> None:
        """Raise ApiError where a request has too many prompts that nothing is generated from."""
        if found > self.max_choices:
            raise self.refusal("max_choices", param, found, "prompts")

    def check_read(self, tokens: int, session_len: int) -> None:
        """Raise ApiError where the prompts of a request are too many tokens; one full session is never too much."""
        if tokens > max(self.max_total_tokens, session_len):
            raise self.refusal("max_total_tokens", None, tokens, "tokens of prompts")

    def check_values(self, found: int, session_len: int) -> None:
        """Raise ApiError (413) for a body of ``found`` JSON values where that is too many."""
        if found > max(self.max_values, session_len + _OTHER_VALUES):
            raise self.refusal("max_values", None, found, "JSON values in the body", 413)

    def refusal(self, name: str, param: str | None, found: int, unit: str, status: int = 400) -> ApiError:
        """What a request beyond the limit ``name`` is told."""
        from toolkit.serve.http.errors import ApiError  # loads pydantic, for which no command's help should wait

        text = f"found {found:,} {unit}, expected at most {getattr(self, name):,} (the server's {spelled(name)})"
        return ApiError(status, f"{param}: {text}" if param else text, param=param, code="limit_exceeded")


# Fields that hold a request's texts.
_TEXTS = (
    "messages system instructions prompt input query queries documents text_1 text_2 suffix content input_prefix "
    "input_suffix input_extra"
).split()
_OTHER_VALUES = 1 << 12  # a request has besides its prompt


def rows() -> list[tuple[str, str, str]]:
    """(option, default, what it limits) of every limit, for people."""
    return [(spelled(f.name), f"{f.default:,}", told.help) for f in fields(Limits) if (told := option_of(f))]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 0


def _json_bytes(value: Any) -> int:
    from pydantic_core import to_json  # which writes whatever its own reader reads: integers of any size too

    return len(to_json(value))


def _objects(value: Any) -> int:
    return sum(isinstance(item, dict) for item in value) if isinstance(value, list) else 0


def _object_bytes(value: Any) -> int:
    return _json_bytes(value) if isinstance(value, dict) else 0


def _characters(value: Any) -> int:
    """Characters of all strings in a JSON value but images and videos, which have limits of their own."""
    found, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, list):
            left += [i for i in item if not isinstance(i, int)]
        elif isinstance(item, dict):
            image = _image_field(item)
            left += (value for name, value in item.items() if name != image)
    return found


def _image_field(part: dict[str, Any]) -> str | None:
    """The field that holds images, where this is a part of OpenAI's, a block of Anthropic's or a message of Ollama's
    that has some."""
    if "role" in part and "images" in part:
        return "images"
    kind = part.get("type")
    if kind in ("image_url", "input_image"):
        return "image_url"
    if kind == "video_url":
        return kind
    source = part.get("source") if kind == "image" else None
    return "source" if isinstance(source, dict) and source.get("type") == "base64" else None


_FORMATS = (
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar format json_schema "
    "grammar"
).split()
# (limit, field of the request, what is counted, how)
_SIZES: tuple[tuple[str, str, str, Callable[[Any], int]], ...] = (
    ("max_messages", "messages", "messages", _count),
    ("max_messages", "input", "items", _objects),
    ("max_messages", "prompt", "messages", _objects),
    ("max_messages", "system", "blocks", _count),
    *(("max_format_bytes", name, "bytes", _json_bytes) for name in _FORMATS),
    *(("max_format_bytes", name, "bytes", _object_bytes) for name in ("output_config", "output_format", "text")),
    ("max_tools", "tools", "tools", _count),
    ("max_tools_bytes", "tools", "bytes", _json_bytes),
    ("max_kwargs_bytes", "chat_template_kwargs", "bytes", _json_bytes),
)
