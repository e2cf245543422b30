"""Drafts of two kinds on disk, opened and checked alike: their layers, and tensors that these do not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.weights import check_stored
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import DecoderSpec, StoredTensor


class Described(Protocol):
    """``stored``: what the layers read; ``numbers``: shapes of what stands beside them, by tensor."""

    @property
    def stored(self) -> list[StoredTensor]: ...

    @property
    def numbers(self) -> dict[str, tuple[int, ...]]: ...


Draft = TypeVar("Draft", bound=Described)


@contextmanager
def of_path(path: Path) -> Iterator[None]:
    """What is said of a draft begins with its path."""
    try:
        yield
    except UsageError as e:
        raise UsageError(f"{path} {e}") from e


def open_checked(
    path: Path,
    model: DecoderSpec,
    build: Callable[[dict[str, Any], str, DecoderSpec], Draft],
    whole: Collection[str] = (),
) -> tuple[Checkpoint, Draft]:
    """The draft in a directory, for a model, as ``build`` describes it by its config.json. ``whole``: tensors that are
    integers. Raises ToolkitError, one line that names file and field or tensor, for one that cannot be; UsageError for
    one of another model."""
    checkpoint = open_checkpoint(path)
    with of_path(path):
        found = build(checkpoint.config, str(path / "config.json"), model)
    check_stored(checkpoint, found.stored)
    _check_numbers(checkpoint, found.numbers, whole)
    return checkpoint, found


def _check_numbers(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], whole: Collection[str]) -> None:
    """Raise ToolkitError, one line that names file and tensor, where one is missing or of another shape or type: of
    floats, or integers those that are ``whole``."""
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise ToolkitError(f"{checkpoint.path}: expected a tensor {name} {list(shape)}, found none")
        info, kinds = checkpoint.info(name), ("I64", "I32") if name in whole else ("F32", "F16", "BF16")
        if tuple(info.shape) != shape or info.dtype not in kinds:
            told = f"expected {list(shape)} of {', '.join(kinds)}, found {list(info.shape)} of {info.dtype}"
            raise ToolkitError(f"{checkpoint.path}: tensor {name}: {told}")
