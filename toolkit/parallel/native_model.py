"""One rank's part of a model for the native runner: opened by each rank itself, and told apart from another model."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.artifacts.alike import files_of_all
from toolkit.models.registry import from_files
from toolkit.parallel.group import Event
from toolkit.parallel.model import Model
from toolkit.runners.choose import Opened, changes_of, check_dtype, native_unsupported, open_model
from toolkit.runners.native.arrays import Arrays
from toolkit.runners.native.packing.artifact import of_first_alone
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.share import Share, unsupported
from toolkit.runners.step import StepOutput
from toolkit.runners.weights.info import info_of
from toolkit.runners.weights.new import open_new_weights


def open_native(model: Model, world: int, rank: int = 0) -> tuple[Opened, str | None]:
    """The model as ``rank`` has it, without reading weights, and why the native runner does not split it over ``world``
    ranks, or None. Raises ToolkitError or UsageError where it cannot be opened."""
    families, options = from_files(model.family_files), replace(model.options, device="cpu")
    opened = open_model(Path(model.path), **model.how, device="cpu", families=families, rank=(rank, world))
    check_dtype(opened, options)
    return opened, native_unsupported(opened, options) or unsupported(opened.spec, world)


class NativeRank(NativeRunner):
    """The runner of one rank."""

    def __init__(self, opened: Opened, model: Model, share: Share) -> None:
        options = replace(model.options, device="cpu")
        super().__init__(opened.spec, opened.weights, options, None, share, changes_of(opened))
        self._opened, self._path, self._how = opened, Path(model.path), model.new_weights_by()
        self._steps: list[Event] | None = None

    def renew(self, named_by: str | None, files: str | None) -> None:
        """Load the weights in ``files`` from now on, None: its own, by the names of the checkpoint ``named_by``, None:
        the model's."""
        by = self._path if named_by is None else Path(named_by)
        self.use_weights(
            self._opened.weights if files is None else open_new_weights(by, Path(files), self.spec, **self._how)
        )

    def trace(self, on: bool) -> list[Event]:
        """What it has done since this was last called; from now on that is kept where ``on``."""
        self._stepper.finish()
        steps, self._steps = self._steps or [], [] if on else None
        return [*steps, *(["gather", *found] for found in self.traced(on))]

    def traced(self, on: bool) -> list[list[float]]:
        """Of each meeting since this was last called from when until when, seconds of the monotonic clock, and how many
        bytes it has handed over; from now on they are kept where ``on``. Between steps."""
        count = 0 if self._model is None else int(self._library.tk_model_traced(self._model, None, 0))
        found = np.zeros((count, 3))
        if self._model is not None:
            self._library.tk_model_traced(self._model, found.ctypes.data, count)
            self._library.tk_model_trace(self._model, int(on))
        return [[*times, int(size)] for *times, size in found.tolist()]

    def lose(self) -> None:
        """No rank waits for others any more; steps that would fail. From any thread."""
        if self._model is not None:
            self._library.tk_model_lose(self._model)

    @property
    def lost(self) -> bool:
        """Whether a rank is lost, here or on another machine."""
        return self._model is not None and bool(self._library.tk_model_lost(self._model))

    def _run(self, arrays: Arrays, *results: Any) -> StepOutput:
        begun = time.monotonic()
        try:
            return super()._run(arrays, *results)
        finally:
            if self._steps is not None:
                self._steps.append(["step", begun, time.monotonic(), arrays.structure.tokens])


def signature(opened: Opened, path: Path, times: bool = True) -> int:
    """Of the model's spec, and of the names, forms and files of its weights: alike where ranks have opened the same.
    ``times``: also where the files were last written, which copies on other machines need not be."""
    weights: Mapping[str, Any] = opened.weights()
    forms = sorted((name, str(_form(info_of(weights, name)))) for name in weights if not of_first_alone(name))
    found = [
        opened.spec.to_json(),
        forms,
        [(file.name, file.stat().st_size, file.stat().st_mtime_ns if times else 0) for file in files_of_all(path)],
    ]
    return zlib.crc32(json.dumps(found, sort_keys=True, default=str).encode())


def _form(value: Any) -> Any:
    meta = getattr(value, "meta", None)
    return meta if meta is not None else (type(value).__name__, tuple(value.shape))
