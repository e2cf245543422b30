"""Items of an input as OpenAI's API gives them back: each with an id and a status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from toolkit.configs.checks import shown
from toolkit.serve.http.errors import bad_field
from toolkit.serve.openai.responses.fields import AnyItem, Called, Part, Picture, Referred, Returned, Said, Thought

Item = dict[str, Any]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyItem, config=ConfigDict(defer_build=True))
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}  # of ids, by type


def input_items(response_id: str, items: Sequence[Any]) -> list[Item]:
    """Those that were read, in order; ``items``: as ``ResponsesRequest`` has them. Ids follow from the response's."""
    known = [fields for item in items if (fields := _fields(item))]
    base = response_id.removeprefix("resp_")
    return [
        {"id": f"{PREFIXES[fields['type']]}_{base}_in{i}", **fields, "status": "completed"}
        for i, fields in enumerate(known)
    ]


def response_of(item_id: str) -> str:
    """The id of the response that an item is of, by the item's own."""
    return f"resp_{''.join(item_id.split('_')[1:2])}"


def resolve(items: list[Any], known: Iterable[Item]) -> None:
    """Put those of ``known`` in the places of what refers to them. Raises ApiError for one that is not there, or is
    referred to twice: a request is to hold no more than what is kept."""
    by_id = {item["id"]: item for item in known}
    for i, item in enumerate(items):
        if isinstance(item, Referred):
            found = by_id.pop(item.id, None)
            if found is None:
                told = f"item {i}: {shown(item.id, 60)} is of no response that is kept here, or is referred to twice"
                raise bad_field("input", told, "item_not_found")
            items[i] = _ADAPTER.validate_python(found)


def _fields(item: Any) -> Item:
    """Empty for what was stepped over."""
    if isinstance(item, Said):
        answered = item.role == "assistant"
        return {"type": "message", "role": item.role, "content": [_part(part, answered) for part in item.content]}
    if isinstance(item, Called):
        text = {"arguments": item.arguments} if item.type == "function_call" else {"input": item.input}
        space = {} if item.namespace is None else {"namespace": item.namespace}
        return {"type": item.type, "call_id": item.call_id, "name": item.name, **space, **text}
    if isinstance(item, Returned):
        parts = [_part(part, False) for part in item.output]
        plain = len(parts) == 1 and parts[0]["type"] == "input_text"
        return {"type": item.type, "call_id": item.call_id, "output": parts[0]["text"] if plain else parts}
    if isinstance(item, Thought):
        told: Item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": p.text} for p in item.summary]}
        if item.content is not None:
            told["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
        return told
    return {}


def _part(part: Part | Picture, answered: bool) -> Item:
    if isinstance(part, Picture):
        return {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
    if answered and part.type == "refusal":
        return {"type": "refusal", "refusal": part.refusal}
    if answered:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.refusal if part.type == "refusal" else part.text}
