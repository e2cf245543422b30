"""What quantizers fold into the linears of a model, kept beside its weights for adapters of the original model.

A site's scale multiplies the columns of what reads it and divides the rows of the linear before
(``models/sites.py``): a stored W' is W · columns / divisors. An adapter's B · A adds to W, so A is multiplied by
``columns``, and B is divided by ``divisors``; the rows whose lengths DoRA tells are those of W.

``folded.scales`` in a model's directory (``NAME.gguf.scales`` beside a GGUF file) is a safetensors file under another
ending, because vLLM and others take every ``*.safetensors`` for weights. It holds ``LINEAR.columns`` [in] and
``LINEAR.rows`` [out] (the divisors), float32, by canonical names; what is all ones is left out, and linears that read
one input share a tensor: ``shared`` in the metadata says whose. Without the file nothing is known: others have made the
model, or an older version.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.artifacts.manifest import scales_file
from toolkit.artifacts.weight_files.safetensors_file import map_arrays, read_metadata, write_tensors
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "toolkit-scales"
_KEYS = ("columns", "rows")


@dataclass(frozen=True)
class Scales:
    """What a linear's columns are multiplied by, [in], and its rows divided by, [out, 1]; None for ones. Called, it
    changes some rows of a matrix: a ``Change`` of ``rounding.to_group_int``."""

    columns: Tensor | None = None
    divisors: Tensor | None = None

    def __call__(self, rows: Tensor, part: slice = slice(None)) -> Tensor:
        rows = rows if self.columns is None else rows * self.columns
        return rows if self.divisors is None else rows / self.divisors[part]

    def __bool__(self) -> bool:
        return self.columns is not None or self.divisors is not None

    def inverse(self) -> Scales:
        """Those that take these out again."""
        return Scales(*(None if x is None else 1 / x for x in (self.columns, self.divisors)))

    def after(self, before: Scales) -> Scales:
        """These folded into what ``before`` was folded into already."""
        pairs = ((self.columns, before.columns), (self.divisors, before.divisors))
        return Scales(*(a if b is None else b if a is None else a * b for a, b in pairs))


UNSCALED = Scales()
AllScales = Mapping[str, Scales]
"""By canonical names of linears; of others both are ones."""


def write_scales(model: Path, scales: AllScales) -> None:
    """Write those of ``model``. OSError passes through."""
    held: dict[bytes, str] = {}
    shared: dict[str, str] = {}
    metadata: dict[str, str] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, found in scales.items():
            for key, tensor in zip(_KEYS, (found.columns, found.divisors), strict=True):
                if tensor is None:
                    continue
                flat = tensor.detach().float().cpu().reshape(-1).contiguous()
                if (first := held.setdefault(flat.numpy().tobytes(), f"{name}.{key}")) == f"{name}.{key}":
                    yield first, flat
                else:
                    shared[f"{name}.{key}"] = first
        metadata.update(format=FORMAT, shared=json.dumps(shared))

    write_tensors(scales_file(model), tensors(), metadata)


def read_scales(model: Path) -> StoredScales | None:
    """Those of a model that lie beside its weights, None where nothing is known of them."""
    file = scales_file(model)
    return StoredScales(file) if file.is_file() else None


def check_scales_target(file: Path) -> None:
    """Raises UsageError where something lies in the place of scales that this tool did not write."""
    if not os.path.lexists(file):
        return
    try:
        ours = not file.is_symlink() and read_metadata(file).get("format") == FORMAT
    except (OSError, ToolkitError):
        ours = False
    if not ours:
        raise UsageError(f"{file}: never replaced, for it is not a file of scales that this tool wrote; move it")


def copy_scales(model: Path, target: Path) -> None:
    """Where ``model`` has any, ``target`` has the same. OSError passes through."""
    if scales_file(model).is_file():
        shutil.copyfile(scales_file(model), scales_file(target))


class StoredScales(Mapping[str, Scales]):
    """Those of a file, which is opened when one is asked for; that raises ToolkitError for a file that is damaged."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @cached_property
    def _found(self) -> dict[str, Scales]:
        import torch

        arrays = map_arrays(self._file)
        if any(array.dtype != "float32" or array.ndim != 1 for array in arrays.values()):
            raise ToolkitError(f"{self._file}: expected vectors of F32 alone; make the model again")
        if not all(np.isfinite(array).all() and array.all() for array in arrays.values()):
            raise ToolkitError(f"{self._file}: expected finite numbers other than 0; make the model again")
        # a copy: a mapped file is not writable, and vectors are small
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        try:
            shared = json.loads(read_metadata(self._file).get("shared", "{}"))
            tensors |= {name: tensors[place] for name, place in shared.items()}
        except (ValueError, AttributeError, KeyError, TypeError):
            raise ToolkitError(f"{self._file}: metadata: expected names of tensors; make the model again") from None
        found: dict[str, Scales] = {}
        for name in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
            columns, rows = (tensors.get(f"{name}.{key}") for key in _KEYS)
            found[name] = Scales(columns, None if rows is None else rows[:, None])
        return found

    def __getitem__(self, name: str) -> Scales:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
