"""The forms in which a prompt may come, told apart."""

from __future__ import annotations

from typing import Any

from toolkit.errors import UsageError

Prompt = str | list[dict[str, Any]]


def as_batch(prompts: Any) -> tuple[list[Prompt], bool]:
    """(prompts, whether it was a single one) from a string, OpenAI messages, or a list of either.

    Raises UsageError for anything else; pairs with images among them.
    """
    if isinstance(prompts, str) or _is_messages(prompts):
        return [prompts], True
    if isinstance(prompts, tuple):
        raise _images(prompts)
    if not isinstance(prompts, list):
        raise UsageError(f"prompts: expected text, OpenAI messages or a list of these, found {type(prompts).__name__}")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, tuple):
            raise _images(prompt)
        if not isinstance(prompt, str) and not _is_messages(prompt):
            raise UsageError(f"prompts[{i}]: expected text or OpenAI messages, found {repr(prompt)[:60]}")
    return list(prompts), False


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) for m in prompt)


def _images(prompt: tuple[Any, ...]) -> UsageError:
    return UsageError(
        f"prompts: a tuple pairs a text with images, which no model here takes yet; pass the text alone "
        f"(found {repr(prompt)[:60]})"
    )
