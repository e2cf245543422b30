"""Pictures and videos in OpenAI messages: which parts they are, and how a pair of text and pictures becomes one."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.base.user_path import user_path
from toolkit.vision.clip import Clip

PARTS = ("image_url", "image", "image_data")  # types of the parts of a message that are pictures
VIDEOS = ("video_url", "video", "video_data")  # likewise, videos
IMAGE_TOKEN = "<IMAGE_TOKEN>"  # stands in a text where a picture is to stand, as LMDeploy has it
_MEDIA_URL = re.compile(r"(?:https?|file)://\S+\s*\Z|data:(?:image|video)/", re.IGNORECASE)
_LONGEST_PATH = 4096


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
    """The content of a user's message: a text as it is; of (text, pictures) or (pictures, text) the parts in this
    order. Of two strings the first is the text, unless it names a picture and the second does not. Raises ValueError
    for other pairs.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) != 2:
        raise ValueError(f"expected (text, images), found a tuple of {len(prompt)}")
    first, second = prompt
    text_first = isinstance(first, str)
    if text_first and isinstance(second, str):
        text_first = not _names_media(first) or _names_media(second)
    text, pictures = (first, second) if text_first else (second, first)
    if not isinstance(text, str):
        raise ValueError("expected (text, images), found no text")
    said = {"type": "text", "text": text}
    shown = [_part(one) for one in (pictures if isinstance(pictures, list | tuple) else [pictures])]
    return [said, *shown] if text_first else [*shown, said]


def _names_media(text: str) -> bool:
    """Whether it is a URL, a data URL or a path of a picture or video."""
    if _MEDIA_URL.match(text):
        return True
    if len(text) > _LONGEST_PATH or "\n" in text:
        return False
    kind = mimetypes.guess_type(text)[0] or ""
    try:
        return kind.startswith(("image/", "video/")) or user_path(text).is_file()
    except (OSError, ValueError, RuntimeError):  # no name of a file
        return False


def _part(one: Any) -> dict[str, Any]:
    """What the user shows; videos say so themselves."""
    kind = "video_data" if isinstance(one, Clip) else "image_data"
    return {"type": kind, kind: {"data": one}}
