"""Engine artifacts packed for target ``cpu``: written by ``convert``, mapped and checked by the native runner.

One array a parameter (uint8, as ``kernels/cpu/ops.h`` lays tiles out), and ``NAME.perm`` where columns are reordered;
``params`` holds the ``PackedMeta`` of each. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.artifacts.engine.artifact import ENGINE_JSON, Arrays, EngineArtifact
from toolkit.artifacts.scales import AllScales, read_scales
from toolkit.base.record import read
from toolkit.errors import ToolkitError
from toolkit.models.eyes.vision import PREFIX, sizes
from toolkit.models.routed import ROUTED
from toolkit.models.spec import DecoderSpec
from toolkit.runners.native.packing.packed import (
    DENSE,
    F16,
    F32,
    INT,
    ITEM_BYTES,
    LAYOUT_VERSION,
    TRELLIS,
    VECTOR,
    PackedMeta,
    PackedTensor,
)
from toolkit.runners.native.towers.tower import matrices

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight

CPU_TARGET = "cpu"
_INT_ONLY = ("bits", "group", "minima", "turned", "trellis")


def pack_cpu(
    spec: DecoderSpec,
    weights: Iterable[tuple[str, Weight | Tensor]],
    params: dict[str, dict[str, Any]],
    *,
    head_bits: int | None = 8,
    vision_bits: int = 16,
    notes: list[str] | None = None,
) -> Arrays:
    """The arrays of an artifact, one parameter at a time; fills ``params``. Bits: see ``pack.pack_model``."""
    from toolkit.runners.native.packing.pack_model import pack_model

    return arrays_of(pack_model(spec, weights, head_bits, [] if notes is None else notes, vision_bits), params)


def arrays_of(packed_ones: Iterable[tuple[str, PackedTensor]], params: dict[str, dict[str, Any]]) -> Arrays:
    """The arrays of packed parameters as they come; fills ``params``."""
    from toolkit.runners.native.packing.pack import Unpacked

    for name, packed in packed_ones:
        params[name] = _describe(packed.meta)
        yield name, packed if isinstance(packed, Unpacked) else packed.data, None
        if packed.perm is not None:
            yield f"{name}.perm", packed.perm, None


def _describe(meta: PackedMeta) -> dict[str, Any]:
    """The meta, and what a reader that knows no tiles shows of it."""
    shape = [meta.rows] if meta.kind == VECTOR else [meta.rows, meta.cols]
    entry = {"layout": LAYOUT_VERSION, "form": meta.origin.get("form", "tensor"), "shape": shape}
    if meta.kind == INT:
        return entry | {"group_size": meta.origin.get("group_size", meta.group)} | meta.to_json()
    return entry | {k: v for k, v in meta.to_json().items() if k not in _INT_ONLY}


class MappedWeights(dict[str, PackedTensor]):
    """Packed parameters by name. ``path``: of their artifact."""

    def __init__(self, found: Mapping[str, PackedTensor], path: Path) -> None:
        super().__init__(found)
        self._path = path

    def scales(self) -> AllScales | None:
        """Those that the artifact holds."""
        return read_scales(self._path)


def open_packed(artifact: EngineArtifact) -> MappedWeights:
    """The artifact's parameters over the mapped file, or what one rank's file has of them.

    Raises ToolkitError for one that is missing, misshapen or of another layout: nothing of it is used then.
    """
    arrays = artifact.arrays()
    absent = of_first_alone if artifact.rank else lambda name: False
    own = {} if artifact.rank is None else artifact.tiles[artifact.rank]
    entries = ((name, entry) for name, entry in artifact.params.items() if not absent(name))
    found = {name: _read(artifact, name, entry, arrays, own.get(name)) for name, entry in entries}
    for name, rows, cols, kinds in _wanted(artifact.spec):
        if absent(name):
            continue
        tensor = found.get(name)
        if tensor is None:
            raise ToolkitError(f"{artifact.path / ENGINE_JSON}: params: {name} is missing; convert the model again")
        m = tensor.meta
        if m.kind == VECTOR and m.dtype != F32 and not name.startswith(PREFIX):
            where = f"{artifact.path / ENGINE_JSON}: params: {name}"
            raise ToolkitError(f"{where}: expected numbers of 32 bits, found another type; convert the model again")
        if m.kind not in kinds or (m.rows, m.cols) != (rows, cols):
            raise ToolkitError(
                f"{artifact.path / ENGINE_JSON}: params: {name}: expected {rows} x {cols}, found {m.rows} x {m.cols}; "
                "convert the model again"
            )
    return MappedWeights(found, artifact.path)


def of_first_alone(name: str) -> bool:
    """Whether of several ranks only the first has it: what pictures are read with."""
    return name.startswith(PREFIX) and not name.startswith(ROUTED)


def _wanted(spec: DecoderSpec) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """(name, rows, cols, kinds) of every parameter that the spec names."""
    matrix, one = (DENSE, INT), (VECTOR,)
    for name, shape in {spec.embed: (spec.vocab_size, spec.hidden_size), **spec.tables()}.items():
        yield name, *shape, matrix
    if not spec.tied:
        yield spec.head, spec.head_size, spec.hidden_size, matrix
    for x in spec.linears():
        yield x.name, x.out_features, x.in_features, matrix
    seeing = {} if spec.vision is None else matrices(spec.vision)
    for name, (rows, cols) in seeing.items():
        yield name, rows, cols, matrix
    for name, size in (spec.vectors() | (sizes(spec.vision) if spec.vision is not None else {})).items():
        if name not in seeing:
            yield name, size, 1, one


def _read(
    artifact: EngineArtifact, name: str, entry: Any, arrays: Mapping[str, Any], own: tuple[int, int] | None
) -> PackedTensor:
    """``own``: which tiles of it the file has, None: all."""
    where = f"{artifact.path / ENGINE_JSON}: params: {name}"
    meta = _meta(where, entry)
    data, perm = arrays.get(name), arrays.get(f"{name}.perm")
    first, end = own or (0, meta.tiles)
    size = meta.nbytes if own is None else (end - first) * meta.tile_bytes
    if not 0 <= first <= end <= meta.tiles or (own is not None and meta.kind == VECTOR):
        raise ToolkitError(f"{where}: ranks: found tiles {first} to {end}; convert the model again")
    if data is None or data.dtype != np.uint8 or data.nbytes != size:
        found = "nothing" if data is None else f"{data.nbytes} bytes of {data.dtype}"
        raise ToolkitError(
            f"{artifact.array_file}: {name}: expected {size} bytes, found {found}; convert the model again"
        )
    if perm is not None and (perm.dtype != np.int32 or sorted(perm.tolist()) != list(range(meta.cols))):
        raise ToolkitError(
            f"{artifact.array_file}: {name}.perm: no permutation of {meta.cols}; convert the model again"
        )
    if not size:  # of a matrix with fewer tiles than ranks: memory that is never touched
        return PackedTensor(np.empty(meta.nbytes, np.uint8), meta, perm)
    return PackedTensor(data.reshape(-1), meta, perm, first)


def _meta(where: str, entry: Any) -> PackedMeta:
    """The description of one array, every number checked. Raises ToolkitError."""
    if not isinstance(entry, dict) or entry.get("layout") != LAYOUT_VERSION:
        found = entry.get("layout") if isinstance(entry, dict) else entry
        raise ToolkitError(f"{where}: layout: expected {LAYOUT_VERSION}, found {found!r:.40}; convert the model again")
    try:
        meta = read(PackedMeta, entry, others=True)  # the entry says more, for readers that know no tiles
    except ValueError as error:
        raise ToolkitError(f"{where}: {error}; convert the model again") from None
    good = 0 < meta.rows < 1 << 31 and 0 < meta.cols < 1 << 31
    good = good and meta.dtype in ITEM_BYTES and meta.kind in (VECTOR, DENSE, INT)
    if meta.kind == INT:
        good = good and meta.group > 0 and meta.group % 16 == 0 and not meta.cols % meta.group
        good = good and (_is_trellis(meta) if meta.trellis else meta.bits in (4, 8))
    if not good:
        raise ToolkitError(f"{where}: unknown form {entry!r:.100}; convert the model again")
    return meta


def _is_trellis(meta: PackedMeta) -> bool:
    """Whether a description of trellis codes can be. What they were packed from has groups of as many whole ones."""
    known = meta.trellis == TRELLIS and meta.bits in (2, 3, 4) and meta.dtype == F16
    size = meta.origin.get("group_size")
    whole = type(size) is int and size > 0 and not size % meta.group and not meta.cols % size
    return known and whole and not meta.minima and not meta.turned
