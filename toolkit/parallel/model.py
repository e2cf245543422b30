"""A model as every rank opens it by itself, from what the first one tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.base.record import read
from toolkit.errors import UsageError
from toolkit.models.registry import from_files
from toolkit.models.spec import DecoderSpec, Unit
from toolkit.parallel.group import Group
from toolkit.parallel.part import PartWeights, Weights, part_of, units_of, unsupported
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import canonical, open_model
from toolkit.runners.tensor.runner import TensorRunner


@dataclass(frozen=True)
class Model:
    """What to open, and how: ``how`` are ``open_model``'s arguments, ``family_files`` Python files of families."""

    path: str
    options: RunnerOptions
    how: dict[str, Any]
    family_files: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another process."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Model:
        return read(Model, data)


@dataclass(frozen=True)
class Whole:
    """A model before it is cut: weights are made when they are asked for."""

    spec: DecoderSpec
    weights: Callable[[], Weights]
    unit: Unit


def open_whole(model: Model, world: int) -> Whole:
    """Open it, without reading weights. Raises UsageError where it cannot be split over ``world`` ranks."""
    opened = open_model(Path(model.path), **model.how, device="cpu", families=from_files(model.family_files))
    if model.options.dtype == "float16" and not opened.spec.float16:
        raise UsageError("dtype: this model is not stable in float16, its authors say; use bfloat16, float32 or auto")
    weights = canonical(opened)
    unit = units_of(weights())
    if (reason := unsupported(opened.spec, world, unit)) is not None:
        raise UsageError(f"tp={world}: {model.path}: {reason}")
    return Whole(opened.spec, weights, unit)


def runner_of(whole: Whole, rank: int, world: int, options: RunnerOptions, dense: bool | None) -> tuple[Any, Group]:
    """(the runner of one rank's part, the group that it adds up in, which is still to be joined)."""
    part = part_of(whole.spec, rank, world, whole.unit)
    group = Group(rank, world, part)
    runner = TensorRunner(
        part.spec,
        lambda: PartWeights(whole.weights(), part.cuts, rank),
        replace(options, eager=True),
        split=group,
        dense=dense,
    )
    return runner, group
