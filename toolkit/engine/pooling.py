"""One vector for a text: which hidden state a model's embeddings are, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.side_files import pooling_config
from toolkit.errors import ToolkitError, UsageError

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def choose(wanted: str, model_dir: Path | None) -> Pooling:
    """``wanted``, or for "auto" what the model's own sentence-transformers config says (None: not known yet), else
    "last".

    Raises UsageError for a name that is none, ToolkitError for a model that pools in a way not built here.
    """
    for known in POOLINGS:
        if wanted == known:
            return known
    if wanted != "auto":
        raise UsageError(f"pooling: expected auto, {' or '.join(POOLINGS)}, found {wanted!r}")
    file = None if model_dir is None else pooling_config(model_dir)
    if file is None:
        return "last"
    modes = [name for name, on in read_json_object(file).items() if name.startswith("pooling_mode_") and on is True]
    found: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
    if len(modes) != 1 or modes[0] not in found:
        raise ToolkitError(f"{file}: expected {' or '.join(found)}, found {', '.join(modes) or 'none'}")
    return found[modes[0]]


def vector(hidden: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """The first ``dimensions`` (None: all) of a pooled hidden state [hidden], of length 1 if ``normalize``.

    Raises UsageError for more dimensions than there are, ToolkitError for values that are no numbers.
    """
    if dimensions is not None and dimensions > len(hidden):
        raise UsageError(f"dimensions: expected at most {len(hidden)}, found {dimensions}")
    found = hidden[:dimensions].astype(np.float64)
    if not np.isfinite(found).all():
        raise ToolkitError("the hidden states are NaN or infinite: check the model's weights and dtype")
    length = float(np.sqrt(found @ found)) if normalize else 1.0
    return (found / (length or 1.0)).astype(np.float32)
