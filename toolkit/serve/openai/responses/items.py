"""Items of an input as OpenAI's API gives them back: each with an id and a status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.serve.openai.responses.fields import Called, Part, Picture, Returned, Said, Thought

Item = dict[str, Any]
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
