"""A request to /v1/responses as one of the chat API, which is what is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolkit.serve.fields.parameters import given_parameters
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.openai.responses.fields import (
    Allowed,
    Called,
    InputTokensRequest,
    Named,
    Part,
    Picture,
    ResponsesRequest,
    Returned,
    Said,
    Thought,
    Tool,
    spelled,
)

Message = dict[str, Any]
CUSTOM = "input"  # the parameter of the function that stands for a custom tool


def conversation(items: Sequence[Any]) -> list[Message]:
    """Items of an input as messages: a thought, a text and calls that follow one another are one message."""
    told: list[Message] = []
    shown: list[Picture] = []  # by tools: templates take images of users alone, behind all results
    for item in (*items, None):
        if shown and not isinstance(item, Returned):
            told.append({"role": "user", "content": _content(shown)})
            shown = []
        if isinstance(item, Said):
            _add(told, item.role, content=_content(item.content))
        elif isinstance(item, Thought):
            thought = "\n".join(_text(part) for part in (item.content or item.summary))
            if thought:
                _add(told, "assistant", reasoning_content=thought)
        elif isinstance(item, Called):
            own = item.type == "function_call"
            arguments = item.arguments if own else json.dumps({CUSTOM: item.input}, ensure_ascii=False)
            named = {"name": spelled(item.name, item.namespace), "arguments": arguments}
            call = {"id": item.call_id, "type": "function", "function": named}
            _add(told, "assistant", tool_calls=[call])
        elif isinstance(item, Returned):
            shown += [part for part in item.output if isinstance(part, Picture)]
            output = "".join(_text(part) for part in item.output if isinstance(part, Part))
            told.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return told


def chat_request(
    request: ResponsesRequest | InputTokensRequest, model: str, talk: Sequence[Message]
) -> ChatCompletionRequest:
    """``talk``: the conversation so far, without the instructions, which hold for one response alone. Raises
    pydantic's ValidationError where the chat API cannot take it."""
    made: dict[str, Any] = {
        "model": model,
        "messages": _led(request.instructions, talk),
        "parallel_tool_calls": request.parallel_tool_calls,
        "chat_template_kwargs": request.chat_template_kwargs,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    if request.text is not None and request.text.format is not None:
        made["response_format"] = request.text.format.as_chat()
    if request.tools:
        made["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
    if request.tool_choice is not None:
        made["tool_choice"] = _choice(request.tool_choice, request.tools or ())
    if isinstance(request, ResponsesRequest):
        made |= {
            "stream": request.stream,
            "max_tokens": request.max_output_tokens,
            **given_parameters(request),
        }
    return ChatCompletionRequest.model_validate(made)


def _led(instructions: str | None, talk: Sequence[Message]) -> list[Message]:
    """``talk`` behind one system message: many templates refuse a second."""
    count = next((i for i, message in enumerate(talk) if message["role"] not in ("system", "developer")), len(talk))
    texts = [text for text in (instructions, *(message["content"] for message in talk[:count])) if text]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*system, *talk[count:]]


def _add(told: list[Message], role: str, **fields: Any) -> None:
    """To the last message, where an assistant's goes on; else as a new one."""
    last = told[-1] if told else {}
    goes_on = role == "assistant" == last.get("role") and not ("content" in fields and last.get("tool_calls"))
    if not goes_on:
        told.append({"role": role, "content": "", **fields})
        return
    for name, value in fields.items():
        last[name] = (last[name] + value) if last.get(name) else value


def _content(parts: Sequence[Part | Picture]) -> str | list[dict[str, Any]]:
    """One text, or parts where there are pictures."""
    if not any(isinstance(part, Picture) for part in parts):
        return "".join(_text(part) for part in parts if isinstance(part, Part))
    return [
        {"type": "text", "text": _text(part)}
        if isinstance(part, Part)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail or "auto"}}
        for part in parts
    ]


def _text(part: Part) -> str:
    return part.refusal if part.type == "refusal" else part.text


def _function(tool: Tool) -> dict[str, Any]:
    name = spelled(tool.name, tool.namespace)
    made: dict[str, Any] = {"name": name, "description": tool.description, "strict": tool.strict}
    if tool.type == "custom":
        made["parameters"] = {
            "type": "object",
            "properties": {CUSTOM: {"type": "string"}},
            "required": [CUSTOM],
            "additionalProperties": False,
        }
        if definition := (tool.format or {}).get("definition"):
            made["description"] = f"{tool.description or ''}\nThe format of {CUSTOM}:\n{definition}"
    else:
        made["parameters"] = tool.parameters
    return {name: value for name, value in made.items() if value is not None}


def _choice(choice: str | Named | Allowed, tools: Sequence[Tool]) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, Named):
        return _named(choice, tools)
    allowed = {"mode": choice.mode, "tools": [_named(tool, tools) for tool in choice.tools]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _named(choice: Named, tools: Sequence[Tool]) -> dict[str, Any]:
    """Where it gives no namespace, a tool of that name in any."""
    given = choice.namespace
    fits = [t.namespace for t in tools if t.name == choice.name and given in (None, t.namespace)]
    namespace = None if None in fits else next(iter(fits), given)
    return {"type": "function", "function": {"name": spelled(choice.name, namespace)}}
