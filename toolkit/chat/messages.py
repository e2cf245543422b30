"""OpenAI messages as chat templates want them: checked, and every content a plain string."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolkit.configs.checks import shown
from toolkit.errors import UsageError
from toolkit.vision.parts import IMAGE_TOKEN, is_picture

Message = dict[str, Any]
PICTURE = "\ue0a9"  # a private character that stands for a picture; it never reaches a prompt
TOOL_ROLES = ("tool", "ipython")  # of a tool's result; Llama 3 calls it ipython
BLIND_ROLES = ("system", "developer", "assistant")  # whose messages are text alone: models are not trained on others


def normalise(messages: Sequence[Message], sees: bool = False) -> list[Message]:
    """Copies with ``content`` as a string (text parts joined by line ends) and tool-call arguments as objects.

    A tool's result may be an object; it becomes JSON text. ``sees``: pictures may be parts, for which PICTURE stands
    then where they stood, or where the message's texts say IMAGE_TOKEN.

    Raises UsageError that names the message for anything a language model cannot take.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UsageError(f"messages: expected a list of at least one message, found {shown(messages, 60)}")
    return [_message(i, message, sees) for i, message in enumerate(messages)]


def _message(i: int, message: Message, sees: bool) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f'messages[{i}]: expected {{"role": …, "content": …}}, found {shown(message, 60)}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UsageError(f"messages[{i}].role: expected system, user, assistant or tool, found {shown(role, 60)}")
    made = dict(message)
    calls = message.get("tool_calls")
    if calls is None or calls == []:  # no call is none: some templates refuse an empty list
        made.pop("tool_calls", None)
    else:
        made["tool_calls"] = _tool_calls(i, calls)
    made["content"] = _content(i, message, bool(calls), sees)
    return made


def _content(i: int, message: Message, has_calls: bool, sees: bool) -> str:
    text = _text(i, message, has_calls, sees)
    if not sees or IMAGE_TOKEN not in text:
        return text
    if (named := text.count(IMAGE_TOKEN)) != (found := text.count(PICTURE)):
        raise UsageError(
            f"messages[{i}].content: expected one {IMAGE_TOKEN} an image, found {named} for {found} images"
        )
    return text.replace(PICTURE, "").replace(IMAGE_TOKEN, PICTURE)


def _text(i: int, message: Message, has_calls: bool, sees: bool) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content.replace(PICTURE, "") if sees else content
    if content is None and (has_calls or message["role"] == "assistant"):
        return ""
    if isinstance(content, dict) and message["role"] in TOOL_ROLES:
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list | tuple):
        raise UsageError(f"messages[{i}].content: expected text or a list of parts, found {shown(content, 60)}")
    whole = ""
    for j, part in enumerate(content):
        where = f"messages[{i}].content[{j}]"
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in ("text", "input_text") else part
        if is_picture(part):
            _check_picture(f"{where}: {kind}", message["role"], sees)
            whole += PICTURE
        elif isinstance(text, str):
            text = text.replace(PICTURE, "") if sees else text
            whole += text if not whole or whole.endswith(PICTURE) else f"\n{text}"
        elif isinstance(kind, str) and kind not in ("text", "input_text"):
            raise UsageError(f"{where}: {kind} is not supported, models here take text, and images where they see")
        else:
            raise UsageError(f'{where}: expected {{"type": "text", "text": …}}, found {shown(part, 60)}')
    return whole


def _check_picture(where: str, role: str, sees: bool) -> None:
    if not sees:
        told = "leave it out, or load a model that sees (and without --disable-vision-encoder)"
        raise UsageError(f"{where}: this model reads text alone; {told}")
    if role in BLIND_ROLES:
        raise UsageError(f"{where}: only a user's message takes images, found one of role {role}")


def _tool_calls(i: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise UsageError(f"messages[{i}].tool_calls: expected a list, found {shown(calls, 60)}")
    made = []
    for j, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(
                f'messages[{i}].tool_calls[{j}]: expected {{"function": {{"name": …}}}}, found {shown(call, 60)}'
            )
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return made


def _arguments(value: Any) -> Any:
    """OpenAI sends arguments as JSON text; templates write them with ``tojson`` and so want the object."""
    if isinstance(value, str):
        return object_or_text(value)
    return {} if value is None else value


def object_or_text(text: str) -> Any:
    """The JSON object that ``text`` is, else itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def with_arguments_as_text(turns: Sequence[Message]) -> list[Message]:
    """What ``normalise`` made, with the arguments of calls as the JSON text that they came as."""
    return [
        {**turn, "tool_calls": [_told(c) for c in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in turns
    ]


def _told(call: dict[str, Any]) -> dict[str, Any]:
    given = call["function"]["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}
