"""Gemma 4's assistants on disk, checked."""

from __future__ import annotations

from pathlib import Path

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.drafts.numbers import check_numbers
from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.weights import check_stored
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.drafts.assistant import ORDERING, TYPES, Assistant, build_assistant
from toolkit.models.spec import DecoderSpec


def is_assistant(path: Path) -> bool:
    """Whether a directory's config says that it is one."""
    try:
        kind = read_json_object(path / "config.json").get("model_type")
    except ToolkitError:
        return False
    return isinstance(kind, str) and kind in TYPES


def open_assistant(path: Path, model: DecoderSpec) -> tuple[Checkpoint, Assistant]:
    """The assistant in a directory, for a model. Raises ToolkitError, one line that names file and field or tensor, for
    one that cannot be; UsageError for one of another model."""
    checkpoint = open_checkpoint(path)
    try:
        found = build_assistant(checkpoint.config, str(path / "config.json"), model)
    except UsageError as e:
        raise UsageError(f"{path} {e}") from e
    check_stored(checkpoint, found.stored)
    check_numbers(checkpoint, found.numbers, whole=(ORDERING,))
    return checkpoint, found
