"""A draft model of DFlash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.engine.load.drafts.beside import flagged
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.runners.base import Runner

if TYPE_CHECKING:
    from toolkit.runners.drafts.dflash import DFlashHead
    from toolkit.runners.drafts.head import F32, Join


def open_dflash_model(path: Path, target: Runner, block: int | None) -> OpenLayers:
    """The draft model of DFlash in a directory, for the model of ``target``; ``block``: tokens of its block, where
    that is not the file's. Raises ToolkitError or UsageError where it is none for it."""
    from toolkit.engine.drafts.block import DraftBlock

    with flagged():
        head = _opened(path, target, block)
    return OpenLayers(path, head, head.spec.taps, "DFlash draft", draft=DraftBlock)


def _opened(path: Path, target: Runner, block: int | None) -> DFlashHead:
    from toolkit.artifacts.drafts.dflash import open_dflash, own_ids
    from toolkit.runners.drafts.dflash import DFlashHead, Own
    from toolkit.runners.weights.checkpoint import CheckpointWeights

    checkpoint, found = open_dflash(path, target.spec)
    spec = replace(found.spec, block=block or found.spec.block)
    weights = CheckpointWeights(checkpoint, found.stored)
    lent: Any
    if target.name == "native":
        from toolkit.runners.native.draft import lent
    else:
        from toolkit.runners.tensor.drafts import lent
    runner = lent.run_with_head(spec.layer, weights, target, own=found.own)
    join, nbytes = lent.join_beside(spec.join, runner)

    def read() -> tuple[Join, F32]:
        matrix, norm = (checkpoint.tensor(f"{name}.weight").float() for name in (spec.join.name, spec.norm.name))
        return join(matrix), norm.numpy()

    lender: Any = getattr(target, "first", target)  # of several ranks
    tokens = target.spec.vocab_size
    own = Own(own_ids(checkpoint, tokens), lambda ids: lender.embed(np.clip(ids, 0, tokens - 1))) if found.own else None
    return DFlashHead(spec, runner, read, nbytes, own)
