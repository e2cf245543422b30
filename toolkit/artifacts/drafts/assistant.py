"""Gemma 4's assistants on disk, checked."""

from __future__ import annotations

from pathlib import Path

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.drafts.checked import open_checked
from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import ToolkitError
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
    return open_checked(path, model, build_assistant, whole=(ORDERING,))
