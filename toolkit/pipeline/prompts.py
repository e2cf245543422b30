"""The forms in which a prompt may come, told apart."""

from __future__ import annotations

from typing import Any

from toolkit.configs.checks import shown
from toolkit.errors import UsageError
from toolkit.vision.parts import user_content

Prompt = str | list[dict[str, Any]]


def as_batch(prompts: Any) -> tuple[list[Prompt], bool]:
    """(prompts, whether it was a single one) from a string, a pair of text and images, OpenAI messages, or a list of
    these. A pair becomes a message.

    Raises UsageError for anything else.
    """
    if isinstance(prompts, str | tuple) or _is_messages(prompts):
        return [_one(prompts, "prompts")], True
    if not isinstance(prompts, list):
        raise UsageError(f"prompts: expected text, OpenAI messages or a list of these, found {type(prompts).__name__}")
    return [_one(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)], False


def _one(prompt: Any, where: str) -> Prompt:
    if isinstance(prompt, tuple):
        try:
            return [{"role": "user", "content": user_content(prompt)}]
        except ValueError as e:
            raise UsageError(f"{where}: {e}") from e
    if not isinstance(prompt, str) and not _is_messages(prompt):
        raise UsageError(f"{where}: expected text, OpenAI messages or (text, images), found {shown(prompt, 60)}")
    return prompt


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) for m in prompt)
