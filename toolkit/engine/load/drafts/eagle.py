"""An EAGLE head, the first of the name."""

from __future__ import annotations

from pathlib import Path

from toolkit.engine.load.drafts.beside import FLAG, flagged
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.engine.load.drafts.mtp import head_of
from toolkit.errors import UsageError
from toolkit.runners.base import Runner


def open_eagle_layer(path: Path, target: Runner) -> OpenLayers:
    """The EAGLE head in a directory, for the model of ``target``. Raises ToolkitError or UsageError where it is none
    for it."""
    from toolkit.artifacts.drafts.eagle import open_eagle
    from toolkit.runners.weights.checkpoint import CheckpointWeights

    if (norm := target.spec.final_norm).kind != "rms":
        raise UsageError(f"{FLAG}: {path}: reads a model with an RMS norm at its end, this one has {norm.kind}")
    with flagged():
        checkpoint, found = open_eagle(path, target.spec)
    try:
        head = head_of(found.spec, CheckpointWeights(checkpoint, found.stored), target, "eagle")
    except UsageError as e:
        raise UsageError(f"{FLAG}: {path}: {e}") from e
    return OpenLayers(path, head, (len(target.spec.layers),), "EAGLE layer")
