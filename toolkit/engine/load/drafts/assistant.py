"""A small model that drafts for a Gemma 4 and reads its cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.engine.load.drafts.beside import flagged
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.runners.base import Runner

if TYPE_CHECKING:
    from toolkit.runners.drafts.assistant import AssistantHead


def open_assistant_model(path: Path, target: Runner) -> OpenLayers:
    """The assistant in a directory, which reads the cache of ``target``. Raises ToolkitError or UsageError where it is
    none for it."""
    from toolkit.engine.drafts.assistant import DraftAssistant

    with flagged():
        head = _opened(path, target)
    return OpenLayers(path, head, (len(target.spec.layers),), "assistant", draft=DraftAssistant)


def _opened(path: Path, target: Runner) -> AssistantHead:
    from toolkit.artifacts.drafts.assistant import open_assistant
    from toolkit.runners.drafts.assistant import AssistantHead, outer_bytes, outer_of
    from toolkit.runners.weights.checkpoint import CheckpointWeights

    checkpoint, found = open_assistant(path, target.spec)
    weights = CheckpointWeights(checkpoint, found.stored)
    if target.name == "native":
        from toolkit.runners.native.draft import assistant as native

        runner: Runner
        runner, norm = native.run_beside(found.spec, weights, target)
    else:
        from toolkit.runners.tensor.drafts import assistant as tensor

        runner, norm = tensor.run_beside(found.spec, weights, target)
    outer, nbytes = lambda: outer_of(found, checkpoint, norm()), outer_bytes(found, checkpoint)
    return AssistantHead(found.spec, runner, target, outer, nbytes)
