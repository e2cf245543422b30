"""Paths as users type them."""

from __future__ import annotations

from pathlib import Path


def user_path(text: str | Path) -> Path:
    """With the home that ``~`` or ``~name`` stands for; as it stands where there is none, as shells have it: then
    nothing is found there."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)
