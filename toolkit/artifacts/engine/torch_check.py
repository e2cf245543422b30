"""What an artifact packed for target ``torch`` must hold, asked of descriptions and headers before a tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.artifacts.engine.artifact import ENGINE_JSON, EngineArtifact
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.vision import sizes
from toolkit.models.spec import DecoderSpec

_FLOATS = ("F32", "F16", "BF16")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_CODE_BITS = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class _Array:
    """One array as a description asks for it. ``needed``: else it may be missing."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    needed: bool = True


def check_torch(artifact: EngineArtifact) -> None:
    """Raise ToolkitError unless every parameter of the spec is described, and every description matches its arrays."""
    for name, shape in _wanted(artifact.spec).items():
        entry = artifact.params.get(name)
        if not isinstance(entry, dict) or entry.get("shape") != list(shape):
            found = entry.get("shape") if isinstance(entry, dict) else "nothing"
            raise ToolkitError(
                f"{artifact.path / ENGINE_JSON}: params: {name}: expected shape {list(shape)}, found {found!r:.60}; "
                "convert the model again"
            )
    for name, entry in artifact.params.items():
        arrays = _arrays_of(artifact, name, entry)
        if arrays is None:
            raise ToolkitError(
                f"{artifact.path / ENGINE_JSON}: params: {name}: unknown form {entry!r:.100}; convert the model again"
            )
        _check_arrays(artifact, arrays)


def _check_arrays(artifact: EngineArtifact, arrays: Mapping[str, _Array]) -> None:
    for name, want in arrays.items():
        info = artifact.infos.get(name)
        if info is None and not want.needed:
            continue
        if info is None or info.shape != want.shape or info.dtype not in want.dtypes:
            raise ToolkitError(
                f"{artifact.array_file}: array {name}: expected {' or '.join(want.dtypes)} {list(want.shape)}, found "
                f"{info or 'nothing'}; convert the model again"
            )


def _wanted(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter that the spec names."""
    vectors = spec.vectors() | (sizes(spec.vision) if spec.vision is not None else {})
    wanted: dict[str, tuple[int, ...]] = {name: (size,) for name, size in vectors.items()}
    wanted |= {linear.name: (linear.out_features, linear.in_features) for linear in spec.linears()}
    wanted |= {spec.embed: (spec.vocab_size, spec.hidden_size), **spec.tables()}
    if not spec.tied:
        wanted[spec.head] = (spec.head_size, spec.hidden_size)
    return wanted


def _arrays_of(artifact: EngineArtifact, name: str, entry: Any) -> dict[str, _Array] | None:
    """Array name → what a parameter's description asks of it; None for a description that cannot be."""
    if not isinstance(entry, dict) or not _is_shape(entry.get("shape")):
        return None
    shape, form = tuple(entry["shape"]), entry.get("form")
    if form == "tensor":
        return {name: _Array(shape, _FLOATS)}
    if form == "dense":
        return {f"{name}.weight": _Array(shape, _FLOATS)}
    if len(shape) != 2:
        return None
    if form in ("channel_int8", "fp8"):
        kinds = ("I8",) if form == "channel_int8" else _FLOAT8
        return {f"{name}.weight": _Array(shape, kinds), f"{name}.scales": _Array(shape[:1], _FLOATS)}
    if form == "block_fp8":
        return _arrays_of_tiles(artifact, name, entry)
    return _arrays_of_codes(artifact, name, entry) if form in ("group_int", "fp4", "codebook") else None


def _arrays_of_codes(artifact: EngineArtifact, name: str, entry: dict[str, Any]) -> dict[str, _Array] | None:
    """Codes and what scales them; those of ``group_int`` are moved by a zero point, by zeros or by minima."""
    if not _is_grid(entry):
        return None
    form, bits, (rows, columns) = entry["form"], entry["bits"], entry["shape"]
    groups, per_byte = columns // entry["group_size"], 1 if bits > 4 else 2
    wanted = {f"{name}.codes": _Array((-(-rows * columns // per_byte),), ("U8",))}
    above = _arrays_of_super_scales(name, entry, rows, groups) if "super_block" in entry else {}
    if above is None:
        return None
    if form == "codebook":
        wanted[f"{name}.table"] = _Array((1 << bits,), ("F32",))
    if form == "fp4":
        wanted[f"{name}.global_scale"] = _Array((1,), ("F32",), needed=False)
    if not above:
        wanted[f"{name}.scales"] = _Array((rows, groups), ("U8", "F8_E4M3") if form == "fp4" else _FLOATS)
    if form == "group_int":
        wanted[f"{name}.group_index"] = _Array((columns,), ("I32",), needed=False)
        minima = bool(entry.get("super_minima")) if above else f"{name}.minima" in artifact.infos
        if minima and not above:
            wanted[f"{name}.minima"] = _Array((rows, groups), _FLOATS)
        needed = not minima and "zero" not in entry
        wanted[f"{name}.zeros"] = _Array((-(-rows * groups // per_byte),), ("U8",), needed)
    return wanted | above


def _arrays_of_tiles(artifact: EngineArtifact, name: str, entry: dict[str, Any]) -> dict[str, _Array] | None:
    block, tiles, (rows, columns) = entry.get("block"), entry.get("tiles"), entry["shape"]
    if not _is_pair(block) or not _is_pair(tiles):
        return None
    assert isinstance(block, list) and isinstance(tiles, list)
    taken = f"{name}.row_blocks" in artifact.infos  # rows of other tiles than their own number says
    if tiles[1] * block[1] < columns or (not taken and tiles[0] * block[0] < rows):
        return None
    return {
        f"{name}.weight": _Array((rows, columns), _FLOAT8),
        f"{name}.scales": _Array(tuple(tiles), _FLOATS),
        f"{name}.row_blocks": _Array((rows,), ("I32",), needed=False),
    }


def _arrays_of_super_scales(name: str, entry: dict[str, Any], rows: int, groups: int) -> dict[str, _Array] | None:
    length, columns = entry["super_block"], entry["shape"][1]
    if type(length) is not int or length < 1 or columns % length or not columns or groups % (columns // length):
        return None
    minima = bool(entry.get("super_minima"))
    found = {}
    for place, needed in (("", True), ("min", minima)):
        codes = "super_min_codes" if place else "super_codes"
        found[f"{name}.super_d{place}"] = _Array((rows, columns // length), _FLOATS, needed)
        found[f"{name}.{codes}"] = _Array((rows, groups), ("I8", "U8"), needed)
    return found


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(side) is int and 0 <= side < 1 << 40 for side in value)


def _is_pair(value: Any) -> bool:
    return _is_shape(value) and len(value) == 2 and 0 not in value


def _is_grid(entry: dict[str, Any]) -> bool:
    """Whether bits, group size and zero point can be, and the groups divide the shape. Tables and 4-bit floats: 4."""
    bits, size, zero = entry.get("bits"), entry.get("group_size"), entry.get("zero", 0)
    if type(bits) is not int or type(size) is not int or type(zero) is not int or size < 1:
        return False
    known = bits in _CODE_BITS if entry["form"] == "group_int" else bits == 4
    return known and 0 <= zero < 1 << bits and entry["shape"][1] % size == 0
