"""OpenAI messages as chat templates want them: checked, and every content a plain string."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolkit.errors import UsageError

Message = dict[str, Any]
TOOL_ROLES = ("tool", "ipython")  # of a tool's result; Llama 3 calls it ipython


def normalise(messages: Sequence[Message]) -> list[Message]:
    """Copies with ``content`` as a string (text parts joined by line ends) and tool-call arguments as objects.

    A tool's result may be an object; it becomes JSON text.

    Raises UsageError that names the message for anything a language model cannot take.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UsageError(f"messages: expected a list of at least one message, found {_short(messages)}")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: Message) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f'messages[{i}]: expected {{"role": …, "content": …}}, found {_short(message)}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"messages[{i}].role: expected system, user, assistant or tool, found {_short(role)}")
    made = dict(message)
    calls = message.get("tool_calls")
    if calls is None:
        made.pop("tool_calls", None)
    else:
        made["tool_calls"] = _tool_calls(i, calls)
    made["content"] = _content(i, message, has_calls=bool(calls))
    return made


def _content(i: int, message: Message, *, has_calls: bool) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and (has_calls or message["role"] == "assistant"):
        return ""
    if isinstance(content, dict) and message["role"] in TOOL_ROLES:
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list | tuple):
        raise UsageError(f"messages[{i}].content: expected text or a list of parts, found {_short(content)}")
    texts = []
    for j, part in enumerate(content):
        where = f"messages[{i}].content[{j}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind not in ("text", "input_text"):
            raise UsageError(f"{where}: {kind} is not supported, the models here take text only")
        else:
            raise UsageError(f'{where}: expected {{"type": "text", "text": …}}, found {_short(part)}')
    return "\n".join(texts)


def _tool_calls(i: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise UsageError(f"messages[{i}].tool_calls: expected a list, found {_short(calls)}")
    made = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(
                f'messages[{i}].tool_calls[{j}]: expected {{"function": {{"name": …}}}}, found {_short(call)}'
            )
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return made


def _arguments(value: Any) -> Any:
    """OpenAI sends arguments as JSON text; templates write them with ``tojson`` and so want the object."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value
    return {} if value is None else value


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "…"
