"""Draft models of DFlash on disk, checked."""

from __future__ import annotations

from pathlib import Path

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.drafts.checked import open_checked
from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import ToolkitError
from toolkit.models.drafts.dflash import ARCHITECTURE, DFlash, build_dflash
from toolkit.models.spec import DecoderSpec


def is_dflash(path: Path) -> bool:
    """Whether a directory's config says that it is one."""
    try:
        names = read_json_object(path / "config.json").get("architectures")
    except ToolkitError:
        return False
    return isinstance(names, list) and ARCHITECTURE in names


def open_dflash(path: Path, model: DecoderSpec) -> tuple[Checkpoint, DFlash]:
    """The draft model in a directory, for a model. Raises ToolkitError, one line that names file and field or tensor,
    for one that cannot be; UsageError for one of another model."""
    return open_checked(path, model, build_dflash)
