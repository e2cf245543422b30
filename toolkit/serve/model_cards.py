"""Models as /v1/models tells of them: OpenAI's fields with Anthropic's beside them, for clients of both; and what other
lists of models have too."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.artifacts.gguf.parts import part_names
from toolkit.artifacts.weight_files.find import pickled_weights

MOST_NAME = 256  # characters


def good_name(name: Any) -> bool:
    """Whether it can stand in lists, logs and metrics: nothing in it is invisible, breaks a line or turns its way."""
    return isinstance(name, str) and 0 < len(name) <= MOST_NAME and name.isprintable() and name == name.strip()


def weight_files(path: Path | None) -> list[Path]:
    """The files of weights of a directory, by name, or the file itself with its further parts; none where there is
    nothing."""
    if path is None or not path.is_dir():
        return [] if path is None else [file for file in map(path.with_name, part_names(path)) if file.is_file()]
    found = [file for file in sorted(path.iterdir()) if file.suffix in (".safetensors", ".gguf") and file.is_file()]
    return found or pickled_weights(path)


def utc(seconds: float) -> str:
    """Seconds since 1970 as a date and a time, as ISO 8601 has them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def card(name: str, created: int, **more: Any) -> dict[str, Any]:
    """One model; ``created``: seconds since 1970; ``more``: what is ours."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "toolkit",
        "type": "model",
        "display_name": name,
        "created_at": utc(created),
        **more,
    }


def listed(cards: Sequence[dict[str, Any]], more: bool = False) -> dict[str, Any]:
    """Things on a page, which other pages follow where there are ``more``."""
    ends = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
    return {"object": "list", "data": list(cards), "has_more": more, "first_id": ends[0], "last_id": ends[1]}
