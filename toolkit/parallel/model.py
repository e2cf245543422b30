"""A model as every rank opens it by itself, from what the first one tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.adapter import LowRank
from toolkit.base.record import read
from toolkit.errors import UsageError
from toolkit.models.registry import from_files
from toolkit.models.spec import DecoderSpec, Unit
from toolkit.parallel.group import Group
from toolkit.parallel.part import PartWeights, Weights, cut_adapter, part_of, units_of, unsupported
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import canonical, open_model, read_adapters
from toolkit.runners.tensor.runner import TensorRunner
from toolkit.runners.weights.new import open_new_weights

NEW = ("hf_overrides", "rope_scaling_factor", "load_format", "blind")  # of ``Model.how``, what new weights are read by


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
    """A model before it is cut: weights are made when they are asked for. ``renewed(model, files)``: what new weights
    in place of them would be."""

    spec: DecoderSpec
    weights: Callable[[], Weights]
    unit: Unit
    adapters: Sequence[Mapping[str, LowRank]]
    renewed: Callable[[Path, Path], Callable[[], Weights]]


def open_whole(model: Model, world: int) -> Whole:
    """Open it, without reading weights. Raises UsageError where it cannot be split over ``world`` ranks."""
    families = from_files(model.family_files)
    opened = open_model(Path(model.path), **model.how, device="cpu", families=families)
    if model.options.dtype == "float16" and not opened.spec.float16:
        raise UsageError("dtype: this model is not stable in float16, its authors say; use bfloat16, float32 or auto")
    weights = canonical(opened)
    unit = units_of(weights())
    if (reason := unsupported(opened.spec, world, unit)) is not None:
        raise UsageError(f"tp={world}: {model.path}: {reason}")
    how = {name: model.how[name] for name in NEW if name in model.how}

    def renewed(named_by: Path, files: Path) -> Callable[[], Weights]:
        return open_new_weights(named_by, files, opened.spec, **how, families=families)

    return Whole(opened.spec, weights, unit, read_adapters(opened, model.options), renewed)


class RankRunner(TensorRunner):
    """One rank's part of a model. ``group``: what it adds up in, which is still to be joined."""

    def __init__(self, whole: Whole, rank: int, world: int, options: RunnerOptions, dense: bool | None) -> None:
        self._whole, self._rank = whole, rank
        self._part = part = part_of(whole.spec, rank, world, whole.unit)
        self.group = Group(rank, world, part)
        adapters = [cut_adapter(adapter, part.cuts) for adapter in whole.adapters]
        options = replace(options, eager=True)
        super().__init__(part.spec, self._cut(whole.weights), options, adapters, split=self.group, dense=dense)

    def renew(self, named_by: str | None, files: str | None) -> None:
        """Load the weights in ``files`` from now on, by the names of the checkpoint ``named_by``; None: its own."""
        whole, own = self._whole, named_by is None or files is None
        self.use_weights(self._cut(whole.weights if own else whole.renewed(Path(str(named_by)), Path(str(files)))))

    def _cut(self, weights: Callable[[], Weights]) -> Callable[[], Weights]:
        part = self._part
        return lambda: PartWeights(weights(), part.cuts, self._rank, part.shapes)
