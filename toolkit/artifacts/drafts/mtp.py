"""The layer for multi-token prediction of an open checkpoint, checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.weights import check_stored
from toolkit.errors import ToolkitError
from toolkit.models.drafts.mtp import Mtp, find_mtp
from toolkit.models.spec import DecoderSpec, StoredTensor

if TYPE_CHECKING:
    from toolkit.artifacts.checkpoint import Checkpoint
    from toolkit.models.family import Family

Built = tuple[DecoderSpec, list[StoredTensor]]
log = logging.getLogger(__name__)


def read_mtp(
    checkpoint: Checkpoint, built: Built, config: dict[str, Any] | None = None, own: Sequence[Family] = ()
) -> Mtp | None:
    """As ``find_mtp``, checked. Raises ToolkitError, one line that names file and tensor, where the layer is of a kind
    that is not known, or a tensor is missing or of another shape."""
    if built[0].encodes:
        return None
    found = find_mtp(checkpoint, built, config, own)
    if found is not None:
        check_stored(checkpoint, found.stored)
    return found


def mtp_or_none(checkpoint: Checkpoint, built: Built) -> Mtp | None:
    """The same; the model does without one that cannot be read, and the log says why."""
    try:
        return read_mtp(checkpoint, built)
    except ToolkitError as error:
        log.warning("the layer for multi-token prediction is left out: %s", error)
        return None
