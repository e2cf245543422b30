"""Reading a request: its body within a limit, its fields checked, its prompt as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from toolkit.serve.errors import ApiError, bad_field, from_validation
from toolkit.serve.protocol import ChatCompletionRequest, Strict
from toolkit.serve.state import ServerState

M = TypeVar("M", bound=Strict)


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError 413 as soon as it is known to pass ``limit`` bytes."""
    too_large = ApiError(413, f"The request body is larger than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(499, "The client went away before the request was read") from error
    return b"".join(parts)


async def parse(request: Request, model: type[M], limit: int) -> M:
    """The body as ``model``. Raises ApiError 400 that names the first bad field."""
    body = await read_body(request, limit)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from error


def vocab_size(state: ServerState) -> int:
    """Token ids below this exist in the model."""
    return state.engine.tokenizer.vocab_size


async def encode_chat(state: ServerState, request: ChatCompletionRequest) -> list[int]:
    """The messages as the model's template renders them, tokenized. Raises ApiError 400 if they cannot be."""
    messages = [message.for_template() for message in request.messages]
    add_prompt = request.add_generation_prompt is not False

    variables = dict(request.chat_template_kwargs or {})
    if tools := request.callable_tools:
        if state.template.tool_format is None:
            what = "this model's chat template has no place for them, or a way of calling that is not read here"
            raise bad_field("tools", f"{what}; describe them in a message and use response_format")
        variables["tools"] = tools

    def work() -> list[int]:
        return state.template.encode(messages, add_generation_prompt=add_prompt, **variables)

    # In a thread: a long prompt would hold up every other stream, and the tokenizer lets go of the GIL.
    return check_prompt(state, await asyncio.to_thread(work), "messages")


async def encode_prompt(state: ServerState, prompt: str | Sequence[int], param: str) -> list[int]:
    """A completion's prompt as token ids."""
    if isinstance(prompt, str):
        return check_prompt(state, await asyncio.to_thread(state.engine.tokenizer.encode, prompt), param)
    limit = vocab_size(state)
    for token in prompt:
        if not 0 <= token < limit:
            raise bad_field(param, f"expected token ids from 0 to {limit - 1}, found {token}")
    return check_prompt(state, list(prompt), param)


def check_prompt(state: ServerState, token_ids: list[int], param: str) -> list[int]:
    """``token_ids`` if there are some and one more fits into the session. Raises ApiError 400 otherwise."""
    if not token_ids:
        raise bad_field(param, "expected at least one token, found an empty prompt")
    limit = state.engine.session_len
    if len(token_ids) >= limit:
        raise bad_field(
            param,
            f"found {len(token_ids)} tokens, expected at most {limit - 1} (the session length less one to generate);"
            " shorten it or start the server with a larger --session-len",
            "context_length_exceeded",
        )
    return token_ids
