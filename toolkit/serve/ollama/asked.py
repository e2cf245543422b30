"""Ollama's requests as requests of our own API, which are what is run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from toolkit.serve.fields.protocol import ChatCompletionRequest, CompletionRequest
from toolkit.serve.ollama.fields import Answering, ChatRequest, OllamaGenerateRequest, OllamaMessage, Options


def chat_request(request: ChatRequest, model: str) -> ChatCompletionRequest:
    """``model``: the name by which it is served. Raises pydantic's ValidationError for what our API cannot take."""
    made = _common(request, model) | _thinking(request) | {"messages": _messages(request.messages)}
    if request.tools:
        made["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
    return ChatCompletionRequest.model_validate(made)


def prompt_in_chat(request: OllamaGenerateRequest, model: str) -> ChatCompletionRequest:
    """A prompt as a user's message. Raises as ``chat_request``."""
    said = [{"role": "user", "content": request.prompt, "images": request.images}]
    if request.system:
        said.insert(0, {"role": "system", "content": request.system})
    messages = _messages([OllamaMessage.model_validate(message) for message in said])
    made = _common(request, model) | _thinking(request) | {"messages": messages}
    return ChatCompletionRequest.model_validate(made)


def bare_prompt(request: OllamaGenerateRequest, model: str, prompt: str) -> CompletionRequest:
    """``prompt`` as it is. Raises as ``chat_request``."""
    made = _common(request, model) | {"prompt": prompt}
    top = made.pop("top_logprobs")
    return CompletionRequest.model_validate(made | {"logprobs": (top or 0) if request.logprobs else None})


def _common(request: Answering, model: str) -> dict[str, Any]:
    options = request.options or Options.model_validate({})
    form: dict[str, Any] | None = None
    if isinstance(request.format, dict):
        form = {"type": "json_schema", "json_schema": {"schema": request.format}}
    elif request.format:
        form = {"type": "json_object"}
    return {
        "model": model,
        "max_tokens": options.num_predict,
        "response_format": form,
        "logprobs": request.logprobs or None,
        "top_logprobs": request.top_logprobs,
        **options.sampling(),
    }


def _thinking(request: Answering) -> dict[str, Any]:
    if isinstance(request.think, str):
        return {"enable_thinking": True, "reasoning_effort": request.think}
    return {"enable_thinking": request.think}


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """A tool's result goes to the first call of that name that has none yet, for Ollama's calls have no ids."""
    told: list[dict[str, Any]] = []
    waiting = _Waiting([])
    for i, message in enumerate(messages):
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.images:
            text = [{"type": "text", "text": message.content}] if message.content else []
            made["content"] = [*map(_image, message.images), *text]
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{i}_{j}", call.function) for j, call in enumerate(message.tool_calls)]
            waiting = _Waiting([(function.name, id) for id, function in calls])
            functions = [(id, {"name": f.name, "arguments": f.arguments}) for id, f in calls]
            made["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in functions]
        if message.role == "tool":
            name = message.tool_name or message.name
            made |= {"tool_call_id": waiting.take(message.tool_call_id, name), "name": name}
        told.append(made)
    return told


class _Waiting:
    """Calls, (name, id) each, that have no result yet. However many there are, none is looked at for each result."""

    def __init__(self, calls: Sequence[tuple[str, str]]) -> None:
        self._left = {id: name for name, id in calls}
        self._of: dict[str, deque[str]] = {}
        for id, name in self._left.items():
            self._of.setdefault(name, deque()).append(id)

    def take(self, id: str | None, name: str | None) -> str | None:
        """Whose result it is that says ``id``, or the ``name`` of what was called, or neither; the first that fits."""
        if not id and name is None:
            id = next(iter(self._left), None)
        elif not id:
            of_name = self._of.get(name or "", deque())
            while of_name and (id := of_name.popleft()) not in self._left:  # its result has come by its id
                id = None
        self._left.pop(id or "", None)
        return id or None


def _image(data: str) -> dict[str, Any]:
    """Ollama does not say what kind of picture it is; its bytes do."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
