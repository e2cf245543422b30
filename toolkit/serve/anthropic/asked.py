"""Anthropic's requests as requests of the chat API, which are what is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from toolkit.serve.anthropic import fields
from toolkit.serve.anthropic.fields import CountRequest, MessagesRequest
from toolkit.serve.fields.parameters import given_parameters
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.fields.volatile import without_header


def chat_request(request: CountRequest) -> ChatCompletionRequest:
    """Raises pydantic's ValidationError where the chat API cannot take it."""
    made: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if request.tools:
        made["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
    if request.tool_choice is not None:
        made |= _choice(request.tool_choice)
    if request.thinking is not None:
        made["enable_thinking"] = request.thinking.type != "disabled"
        made["thinking_token_budget"] = request.thinking.budget_tokens
    output = request.output_config
    if output is not None and output.effort is not None:
        made["reasoning_effort"] = output.effort
    if (form := (output and output.format) or request.output_format) is not None:
        made["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(request, MessagesRequest):
        made |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            **given_parameters(request),
        }
    return ChatCompletionRequest.model_validate(made)


def _function(tool: fields.Tool) -> dict[str, Any]:
    made = {"name": tool.name, "parameters": tool.input_schema, "description": tool.description, "strict": tool.strict}
    return {name: value for name, value in made.items() if value is not None}


def _choice(choice: fields.ToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": False if choice.disable_parallel_tool_use else None}


def _messages(request: CountRequest) -> list[dict[str, Any]]:
    system = "\n\n".join(filter(None, (without_header(block.text) for block in request.system or ())))
    told: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in request.messages:
        told += _answer(message.content) if message.role == "assistant" else _asked(message.role, message.content)
    return told


def _answer(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    thoughts = [block.thinking for block in blocks if block.type == "thinking"]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    text = "".join(_texts(blocks))
    images = [_image(block.source) for block in blocks if block.type == "image"]  # refused as all of this role are
    message: dict[str, Any] = {
        "role": "assistant",
        "content": [*images, {"type": "text", "text": text}] if images else text,
    }
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _asked(role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Results of tools first, each a message of its own; then what the user says beside them."""
    results = [block for block in blocks if block.type == "tool_result"]
    told = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ("Error: " if block.is_error else "") + "\n".join(_texts(block.content)),
        }
        for block in results
    ]
    shown = [block for result in results for block in result.content]  # templates take images of users alone
    parts = _parts([*(block for block in shown if block.type == "image"), *blocks])
    if any(part["type"] != "text" for part in parts):
        told.append({"role": role, "content": parts})
    elif parts or not results:
        told.append({"role": role, "content": parts[0]["text"] if parts else ""})
    return told


def _parts(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Images and texts in their order; texts that follow one another are one."""
    made: list[dict[str, Any]] = []
    for shown, some in groupby(blocks, lambda block: block.type == "image"):
        if shown:
            made += [_image(block.source) for block in some]
        elif texts := _texts(list(some)):
            made.append({"type": "text", "text": "\n\n".join(texts)})
    return made


def _image(source: fields.ImageData | fields.ImageUrl) -> dict[str, Any]:
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(blocks: Sequence[Any]) -> list[str]:
    found = []
    for block in blocks:
        if block.type == "text":
            found.append(block.text)
        elif block.type == "document":
            found.append("\n".join(filter(None, (block.title, block.source.data))))
        elif block.type == "search_result":
            found.append("\n".join((block.title, block.source, *_texts(block.content))))
    return found
