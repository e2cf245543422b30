"""A conversation and the answer that it got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def with_answer(messages: Sequence[Message], answer: Message) -> list[Message]:
    """``messages``, one at least, and ``answer``: one message where it goes on with an assistant's."""
    *before, last = messages
    if last["role"] != "assistant" or last.get("tool_calls"):
        return [*messages, answer]
    said = last.get("content") or ""
    text = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
    return [*before, {**last, **answer, "content": text + (answer["content"] or "")}]
