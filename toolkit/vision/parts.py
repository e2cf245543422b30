"""Pictures in OpenAI messages: which parts they are, and how a pair of text and pictures becomes a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PARTS = ("image_url", "image", "image_data")  # types of the parts of a message that are pictures
IMAGE_TOKEN = "<IMAGE_TOKEN>"  # stands in a text where a picture is to stand, as LMDeploy has it


def parts_of(message: Any) -> Sequence[Any]:
    """The parts of a message's content, where it has parts."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list | tuple) else ()


def is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PARTS


def user_content(prompt: str | tuple[Any, ...]) -> str | list[dict[str, Any]]:
    """The content of a user's message: a text as it is; of (text, pictures) or (pictures, text) the pictures as parts,
    then the text. Of two texts the first is the text, the second names a picture. Raises ValueError for other pairs.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 2:
        raise ValueError(f"expected (text, images), found a tuple of {len(prompt)}")
    first, second = prompt
    text, pictures = (first, second) if isinstance(first, str) else (second, first)
    if not isinstance(text, str):
        raise ValueError("expected (text, images), found no text")
    some = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    parts: list[dict[str, Any]] = [{"type": "image_data", "image_data": {"data": one}} for one in some]
    return [*parts, {"type": "text", "text": text}]
