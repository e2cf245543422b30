"""Tokens that a model never draws."""

from __future__ import annotations

from pathlib import Path

from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import ToolkitError


def suppressed_tokens(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """``suppress_tokens`` of a model's generation_config.json, as transformers rules them out of every answer (Gemma 4:
    marks of pictures and sound). Raises ToolkitError for one that is no token id."""
    file = directory / "generation_config.json"
    found = read_json_object(file).get("suppress_tokens") if file.is_file() else None
    found = [] if found is None else found
    if not isinstance(found, list) or any(type(token) is not int for token in found):
        raise ToolkitError(f"{file}: suppress_tokens: expected a list of token ids, found {found!r:.60}")
    return tuple(token for token in dict.fromkeys(found) if 0 <= token < vocab_size)  # others never come anyway
