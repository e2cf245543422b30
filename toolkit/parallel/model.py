"""A model as every rank opens it by itself, from what the first one tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.artifacts.adapters.adapter import LowRank
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.errors import UsageError
from toolkit.models.registry import from_files
from toolkit.models.spec import DecoderSpec, Unit
from toolkit.parallel.group import Event, Group
from toolkit.parallel.layout import Layout
from toolkit.parallel.micro import in_a_row, joined, select
from toolkit.parallel.part import PartWeights, Weights, cut_adapter, part_of, units_of, unsupported
from toolkit.parallel.wire import digest
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import canonical, check_dtype, open_model, read_adapters
from toolkit.runners.step import StepBatch, StepOutput, Views
from toolkit.runners.tensor.runner import TensorRunner
from toolkit.runners.weights.new import open_new_weights

NEW = ("hf_overrides", "rope_scaling_factor", "load_format", "blind")  # of ``Model.how``, what new weights are read by


@dataclass(frozen=True)
class Model:
    """What to open, and how: ``how`` are ``open_model``'s arguments, ``family_files`` Python files of families,
    ``devices`` numbers of devices for this machine's ranks, none: the first."""

    path: str
    options: RunnerOptions
    how: dict[str, Any]
    family_files: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another process."""
        return asdict(self)

    def new_weights_by(self) -> dict[str, Any]:
        """Arguments of ``open_new_weights``."""
        told = {name: self.how[name] for name in NEW if name in self.how}
        return told | {"families": from_files(self.family_files)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Model:
        return read(Model, data)


@dataclass(frozen=True)
class Whole:
    """A model before it is cut: weights are made when they are asked for. ``renewed(model, files)``: what new weights
    in place of them would be."""

    path: Path
    spec: DecoderSpec
    weights: Callable[[], Weights]
    unit: Unit
    adapters: Sequence[Mapping[str, LowRank]]
    renewed: Callable[[Path, Path], Callable[[], Weights]]


def open_whole(model: Model, layout: Layout) -> Whole:
    """Open it, without reading weights. Raises UsageError where it cannot be split so."""
    families = from_files(model.family_files)
    opened = open_model(Path(model.path), **model.how, device="cpu", families=families)
    check_dtype(opened, model.options)
    weights = canonical(opened)
    unit = units_of(weights())
    if (reason := unsupported(opened.spec, layout, unit)) is not None:
        raise UsageError(f"{layout}: {model.path}: {reason}")
    how = model.new_weights_by()

    def renewed(named_by: Path, files: Path) -> Callable[[], Weights]:
        return open_new_weights(named_by, files, opened.spec, **how)

    return Whole(Path(model.path), opened.spec, weights, unit, read_adapters(opened, model.options), renewed)


class RankRunner(TensorRunner):
    """One rank's part of a model. ``group``: what it adds up in, which is still to be joined. ``options`` name a
    device of its own; ``here``: how many ranks this machine has, None: all."""

    def __init__(
        self,
        whole: Whole,
        rank: int,
        layout: Layout,
        options: RunnerOptions,
        dense: bool | None,
        here: int | None = None,
    ) -> None:
        self._whole, self._rank, self._number = whole, layout.part(rank), rank
        self._part = part = part_of(whole.spec, rank, layout, whole.unit)
        self.group = Group(rank, layout, part, here or layout.world, torch.device(options.device))
        adapters = [cut_adapter(adapter, part.cuts) for adapter in whole.adapters]
        options = replace(options, eager=True)
        super().__init__(part.spec, self._cut(whole.weights), options, adapters, split=self.group, dense=dense)

    def renew(self, named_by: str | None, files: str | None) -> None:
        """Load the weights in ``files`` from now on, None: its own, by the names of the checkpoint ``named_by``, None:
        the model's."""
        whole = self._whole
        by = whole.path if named_by is None else Path(named_by)
        self.use_weights(self._cut(whole.weights if files is None else whole.renewed(by, Path(files))))

    def chosen_experts(self) -> list[list[Any]]:
        """``chosen`` as a list."""
        return [[layer, load] for layer, load in self.chosen().items()]

    def move_experts(self, held: list[list[Any]]) -> None:
        """Have the experts that ``held`` says from now on: [layer, those of each seat] of some layers."""
        group = self.group
        group.held |= {layer: seats for layer, seats in held}
        self._part = part_of(self._whole.spec, self._number, group.layout, self._whole.unit, group.held)
        self.place_experts(self._part.spec, [layer for layer, _ in held])

    def need(self) -> list[int]:
        """``memory()`` of this rank as numbers: weights, activations of a token, free, and blocks of each group."""
        need = self.memory()
        return [need.weights, need.activations_per_token, need.free, *need.block_bytes]

    def check(self, batch: StepBatch) -> None:
        """Raise RunnerError for a step that cannot be; all ranks find the same."""
        with torch.inference_mode(), self._on.working():
            self._ready().check(batch)

    def copy_blocks(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Blocks ``pairs`` [C, 2], from the first to the second."""
        with torch.inference_mode(), self._on.working():
            self._ready().copy_blocks(group, pairs)

    def keep_pictures(self, views: Views) -> None:
        """Keys and values of those that are new in ``views``, for steps to come; none of those that are gone."""
        with torch.inference_mode(), self._on.working():
            self._ready().keep_pictures(views)

    def run(self, batch: StepBatch | None, parts: int) -> StepOutput | None:
        """A step, in as many parts as there are stages: while one is at work on a part, those before it are on the
        next. ``parts``: those of the copy of the model that has most, which all take part in where they share experts;
        None: no sequence of the step is of this copy."""
        begun = self.group.since = time.monotonic()
        try:
            return self._run(batch, parts)
        finally:
            self.group.since = None
            if self.group.trace is not None:
                tokens = 0 if batch is None else len(batch.token_ids)
                self.group.trace.append(["step", begun, time.monotonic(), tokens])

    def _run(self, batch: StepBatch | None, parts: int) -> StepOutput | None:
        shares = [] if batch is None else in_a_row(batch, self.group.layout.pp)
        found = [] if batch is None else [self.submit(select(batch, s, s[0] == 0)).result() for s in shares]
        if self.group.seats > 1:
            for _ in range(parts - len(shares)):
                self._idle()
        return None if batch is None else joined(batch, found, shares)

    def step(self, told: list[Any]) -> int | StepOutput | None:
        """``run`` for the first rank: the digest of what was drawn, or where this is the first of the ranks that draw
        the same, all of it."""
        output = self.run(*told)
        return output if output is None or self.group.part == 0 else digest(output)

    def trace(self, on: bool) -> list[Event]:
        """What it has done since this was last called; from now on that is kept where ``on``."""
        found, self.group.trace = self.group.trace or [], [] if on else None
        return found

    def _idle(self) -> None:
        try:
            with torch.inference_mode(), self._on.working():
                self._ready().idle()
        except RuntimeError as e:
            raise RunnerError(f"the step failed: {e}") from e

    def _cut(self, weights: Callable[[], Weights]) -> Callable[[], Weights]:
        return lambda: PartWeights(weights(), self._part, self._rank)
