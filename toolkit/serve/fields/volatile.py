"""What clients put before a prompt that is new in every request: it would keep all behind it out of the cache."""

from __future__ import annotations

HEADER = "x-anthropic-"  # Claude Code's, in the first block of system text; routers put it before the rest of the text


def without_header(text: str) -> str:
    """System text without such a first line."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(HEADER) else text
