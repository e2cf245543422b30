"""Draft models of DFlash on disk, checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.drafts.checked import open_checked
from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import ToolkitError
from toolkit.models.drafts.dflash import ARCHITECTURE, IDS, KIND, DFlash, build_dflash
from toolkit.models.spec import DecoderSpec


def is_dflash(path: Path) -> bool:
    """Whether a directory's config says that it is one."""
    try:
        config = read_json_object(path / "config.json")
    except ToolkitError:
        return False
    names = config.get("architectures")
    return config.get("speculators_model_type") == KIND or (isinstance(names, list) and ARCHITECTURE in names)


def open_dflash(path: Path, model: DecoderSpec) -> tuple[Checkpoint, DFlash]:
    """The draft model in a directory, for a model. Raises ToolkitError, one line that names file and field or tensor,
    for one that cannot be; UsageError for one of another model."""
    return open_checked(path, model, build_dflash, whole=(IDS,))


def own_ids(checkpoint: Checkpoint, tokens: int) -> NDArray[np.int64]:
    """Of a draft with a vocabulary of its own the model's ids of its tokens, of which the model has so many. Raises
    ToolkitError for one that it has not."""
    added = checkpoint.tensor(IDS).long().numpy()
    ids: NDArray[np.int64] = np.arange(len(added)) + added
    if int(ids.min()) < 0 or int(ids.max()) >= tokens:
        raise ToolkitError(f"{checkpoint.path}: tensor {IDS}: expected ids below {tokens}, found {int(ids.max())}")
    return ids
