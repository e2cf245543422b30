"""Tensors of a draft that its layers do not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.errors import ToolkitError


def check_numbers(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], whole: Collection[str] = ()) -> None:
    """Raise ToolkitError, one line that names file and tensor, where one is missing or of another shape or type: of
    floats, or integers those that are ``whole``."""
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise ToolkitError(f"{checkpoint.path}: expected a tensor {name} {list(shape)}, found none")
        info, kinds = checkpoint.info(name), ("I64", "I32") if name in whole else ("F32", "F16", "BF16")
        if tuple(info.shape) != shape or info.dtype not in kinds:
            told = f"expected {list(shape)} of {', '.join(kinds)}, found {list(info.shape)} of {info.dtype}"
            raise ToolkitError(f"{checkpoint.path}: tensor {name}: {told}")
