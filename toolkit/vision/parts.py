"""Pictures and videos in OpenAI messages: which parts they are, and how a pair of text and pictures becomes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.vision.clip import Clip

PARTS = ("image_url", "image", "image_data")  # types of the parts of a message that are pictures
VIDEOS = ("video_url", "video", "video_data")  # likewise, videos
IMAGE_TOKEN = "<IMAGE_TOKEN>"  # stands in a text where a picture is to stand, as LMDeploy has it


def parts_of(message: Any) -> Sequence[Any]:
    """The parts of a message's content, where it has parts."""
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list | tuple) else ()


def is_picture(part: Any) -> bool:
    """Whether it is something to look at: a picture or a video."""
    return isinstance(part, dict) and part.get("type") in (*PARTS, *VIDEOS)


def is_video(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in VIDEOS


def source_of(part: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """(what names the picture, its options): OpenAI's ``image_url``, transformers' ``image``, LMDeploy's
    ``image_data``."""
    given = _given(part)
    if not isinstance(given, Mapping):
        return given, {}
    options = {name: value for name, value in given.items() if name not in ("url", "data")}
    return given.get("url", given.get("data")), options


def naming(part: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The part with another picture, which ``source_of`` then gives."""
    given = _given(part)
    return {**part, part["type"]: {**given, "url": source} if isinstance(given, Mapping) else source}


def _given(part: Mapping[str, Any]) -> Any:
    return part.get(part["type"], part.get("url"))


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
    return [*(_part(one) for one in some), {"type": "text", "text": text}]


def _part(one: Any) -> dict[str, Any]:
    """What the user shows; videos say so themselves."""
    kind = "video_data" if isinstance(one, Clip) else "image_data"
    return {"type": kind, kind: {"data": one}}
