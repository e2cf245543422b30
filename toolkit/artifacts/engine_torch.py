"""How weights are packed for target ``torch``: canonical weights as they are, codes of up to 4 bits two a byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.engine import ENGINE_JSON, Arrays, EngineArtifact
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt, SuperScales, Weight

_CODE_BITS = (2, 3, 4, 5, 6, 7, 8)


def pack_torch(weights: Iterable[tuple[str, Weight | Tensor]], params: dict[str, dict[str, Any]]) -> Arrays:
    """The arrays of canonical weights; fills ``params``."""
    import torch

    from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8, GroupInt

    for name, value in weights:
        if isinstance(value, torch.Tensor):
            params[name] = {"form": "tensor", "shape": list(value.shape)}
            yield name, value, None
            continue
        entry: dict[str, Any] = {"shape": list(value.shape)}
        params[name] = entry
        if isinstance(value, Dense):
            entry["form"] = "dense"
            yield f"{name}.weight", value.weight, None
        elif isinstance(value, (ChannelInt8, Fp8)):
            entry["form"] = "channel_int8" if isinstance(value, ChannelInt8) else "fp8"
            yield f"{name}.weight", value.weight, None
            yield f"{name}.scales", value.scales, None
        elif isinstance(value, GroupInt):
            yield from _pack_group_int(name, value, entry)
        else:
            yield from _pack_other(name, value, entry)


def _pack_group_int(name: str, value: GroupInt, entry: dict[str, Any]) -> Arrays:
    entry.update(form="group_int", bits=value.bits, group_size=value.group_size)
    yield f"{name}.codes", pack_codes(value.codes, value.bits), None
    if value.symmetric:
        entry["zero"] = 1 << (value.bits - 1)
    elif value.zeros is not None:
        yield f"{name}.zeros", pack_codes(value.zeros, value.bits), None
    if value.group_index is not None:
        yield f"{name}.group_index", value.group_index, None
    if value.super_scales is not None:
        yield from _pack_super_scales(name, value.super_scales, entry)
        return
    yield f"{name}.scales", value.scales, None
    if value.minima is not None:
        yield f"{name}.minima", value.minima, None


def _pack_super_scales(name: str, value: SuperScales, entry: dict[str, Any]) -> Arrays:
    entry["super_block"] = entry["shape"][1] // value.d.shape[1]
    yield f"{name}.super_d", value.d, None
    yield f"{name}.super_codes", value.codes, None
    if value.dmin is not None:
        entry["super_minima"] = True
        yield f"{name}.super_dmin", value.dmin, None
        yield f"{name}.super_min_codes", value.min_codes, None


def _pack_other(name: str, value: Weight, entry: dict[str, Any]) -> Arrays:
    """Tiles of float8, 4-bit floats, codes of a table."""
    from toolkit.artifacts.canonical import BlockFp8, Codebook, Fp4

    if isinstance(value, BlockFp8):
        entry.update(form="block_fp8", block=list(value.block), tiles=list(value.scales.shape))
        yield f"{name}.weight", value.weight, None
        yield f"{name}.scales", value.scales, None
        if value.row_blocks is not None:
            yield f"{name}.row_blocks", value.row_blocks, None
        return
    assert isinstance(value, (Fp4, Codebook)), type(value)
    entry.update(form="fp4" if isinstance(value, Fp4) else "codebook", bits=4, group_size=value.group_size)
    yield f"{name}.codes", pack_codes(value.codes, 4), None
    if isinstance(value, Codebook):
        assert value.bits == 4
        yield f"{name}.table", value.table, None
        if value.super_scales is not None:
            yield from _pack_super_scales(name, value.super_scales, entry)
            return
    elif value.global_scale is not None:
        yield f"{name}.global_scale", value.global_scale, None
    yield f"{name}.scales", value.scales, None


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes, any shape → flat bytes: up to 4 bits two a byte, the first in the low half; else one a byte."""
    import torch

    flat = codes.reshape(-1)
    if bits > 4:
        return flat
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    return flat[0::2] | flat[1::2] << 4


def unpack_codes(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Inverse of ``pack_codes``."""
    import numpy as np
    import torch

    if bits > 4:
        return packed.view(shape)
    # A table of byte → two codes is twice as fast as shifting and interleaving.
    byte = np.arange(256)
    pairs = (byte & 15 | byte >> 4 << 8).astype("<u2")
    codes = torch.from_numpy(np.take(pairs, packed.numpy()).view(np.uint8))
    return codes[: math.prod(shape)].view(shape)


class TorchWeights(Mapping[str, "Weight | Tensor"]):
    """The weights of an artifact packed for ``torch``, each made anew when asked for."""

    def __init__(self, artifact: EngineArtifact) -> None:
        self._artifact = artifact

    @cached_property
    def _mapped(self) -> Tensor:
        from toolkit.artifacts.mapped import map_file

        return map_file(self._artifact.array_file)

    def _array(self, name: str) -> Tensor:
        from toolkit.artifacts.mapped import view_tensor

        return view_tensor(self._mapped, self._artifact.infos[name])

    def __getitem__(self, name: str) -> Weight | Tensor:
        from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8

        entry = self._artifact.params[name]
        form = entry["form"]
        if form == "tensor":
            return self._array(name)
        if form == "group_int":
            return self._group_int(name, entry)
        if form in ("block_fp8", "fp4", "codebook"):
            return self._other(name, entry)
        weight = self._array(f"{name}.weight")
        if form == "dense":
            return Dense(weight)
        kind = ChannelInt8 if form == "channel_int8" else Fp8
        return kind(weight, self._array(f"{name}.scales"))

    def _group_int(self, name: str, entry: dict[str, Any]) -> GroupInt:
        import torch

        from toolkit.artifacts.canonical import GroupInt

        bits, group_size, (rows, columns) = entry["bits"], entry["group_size"], entry["shape"]
        grid = (rows, columns // group_size)
        infos = self._artifact.infos
        zeros = None
        if "zero" in entry:
            zeros = torch.full(grid, entry["zero"], dtype=torch.uint8)
        elif f"{name}.zeros" in infos:
            zeros = unpack_codes(self._array(f"{name}.zeros"), bits, grid)
        above = self._super_scales(name, entry)
        minima = self._optional(f"{name}.minima") if above is None else above.minima()
        return GroupInt(
            codes=unpack_codes(self._array(f"{name}.codes"), bits, (rows, columns)),
            scales=self._array(f"{name}.scales") if above is None else above.scales(),
            zeros=zeros,
            bits=bits,
            group_size=group_size,
            minima=minima,
            group_index=self._optional(f"{name}.group_index"),
            super_scales=above,
        )

    def _optional(self, name: str) -> Tensor | None:
        return self._array(name) if name in self._artifact.infos else None

    def _super_scales(self, name: str, entry: dict[str, Any]) -> SuperScales | None:
        from toolkit.artifacts.canonical import SuperScales

        if "super_block" not in entry:
            return None
        return SuperScales(
            self._array(f"{name}.super_d"),
            self._array(f"{name}.super_codes"),
            self._optional(f"{name}.super_dmin"),
            self._optional(f"{name}.super_min_codes"),
        )

    def _other(self, name: str, entry: dict[str, Any]) -> Weight:
        from toolkit.artifacts.canonical import BlockFp8, Codebook, Fp4

        if entry["form"] == "block_fp8":
            block = (entry["block"][0], entry["block"][1])
            rows = self._optional(f"{name}.row_blocks")
            return BlockFp8(self._array(f"{name}.weight"), self._array(f"{name}.scales"), block, rows)
        rows, columns = entry["shape"]
        codes = unpack_codes(self._array(f"{name}.codes"), 4, (rows, columns))
        if entry["form"] == "fp4":
            scale = self._optional(f"{name}.global_scale")
            return Fp4(codes, self._array(f"{name}.scales"), entry["group_size"], scale)
        above = self._super_scales(name, entry)
        scales = self._array(f"{name}.scales") if above is None else above.scales()
        return Codebook(codes, self._array(f"{name}.table"), scales, 4, entry["group_size"], above)

    def __iter__(self) -> Iterator[str]:
        return iter(self._artifact.params)

    def __len__(self) -> int:
        return len(self._artifact.params)


def check_torch(artifact: EngineArtifact) -> None:
    """Every parameter of the spec is described, and every description matches the arrays."""
    spec, params = artifact.spec, artifact.params
    linears = spec.linears()
    wanted: dict[str, tuple[int, ...]] = {norm.name: (norm.size,) for norm in spec.norms()}
    wanted |= {linear.name: (linear.out_features, linear.in_features) for linear in linears}
    wanted |= {f"{linear.name}.bias": (linear.out_features,) for linear in linears if linear.bias}
    wanted[spec.embed] = (spec.vocab_size, spec.hidden_size)
    if not spec.tied:
        wanted[spec.head] = (spec.vocab_size, spec.hidden_size)
    for name, shape in wanted.items():
        entry = params.get(name)
        if not isinstance(entry, dict) or entry.get("shape") != list(shape):
            found = entry.get("shape") if isinstance(entry, dict) else "nothing"
            raise ToolkitError(
                f"{artifact.path / ENGINE_JSON}: params: {name}: expected shape {list(shape)}, found {found!r:.60}; "
                "convert the model again"
            )
    for name, entry in params.items():
        for array, elements in _arrays_of(artifact, name, entry).items():
            info = artifact.infos.get(array)
            found_elements = -1 if info is None else math.prod(info.shape)
            if found_elements != elements:
                raise ToolkitError(
                    f"{artifact.array_file}: array {array}: expected {elements} elements, found "
                    f"{'nothing' if info is None else found_elements}; convert the model again"
                )


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(side, int) and side >= 0 for side in value)


def _is_grid(entry: dict[str, Any]) -> bool:
    """Whether bits, group size and zero point can be, and the groups divide the shape."""
    bits, size, zero = entry.get("bits"), entry.get("group_size"), entry.get("zero", 0)
    if bits not in _CODE_BITS or not isinstance(size, int) or size < 1 or not isinstance(zero, int):
        return False
    return 0 <= zero < 1 << bits and len(entry["shape"]) == 2 and entry["shape"][1] % size == 0


def _arrays_of(artifact: EngineArtifact, name: str, entry: dict[str, Any]) -> dict[str, int]:
    """Array name → number of elements that a parameter's description asks for."""
    form = entry.get("form") if isinstance(entry, dict) and _is_shape(entry.get("shape")) else None
    if form == "tensor":
        return {name: math.prod(entry["shape"])}
    if form == "dense":
        return {f"{name}.weight": math.prod(entry["shape"])}
    if form in ("channel_int8", "fp8"):
        return {f"{name}.weight": math.prod(entry["shape"]), f"{name}.scales": entry["shape"][0]}
    if form == "block_fp8":
        return _arrays_of_tiles(artifact, name, entry)
    if form not in ("group_int", "fp4", "codebook") or not _is_grid(entry):
        raise _unknown_form(artifact, name, entry)
    bits, size = entry["bits"], entry["group_size"]
    rows, groups = entry["shape"][0], entry["shape"][1] // size
    per_byte = 1 if bits > 4 else 2
    wanted = {f"{name}.codes": -(-rows * groups * size // per_byte)}
    if form == "codebook":
        wanted[f"{name}.table"] = 1 << bits
    if "super_block" in entry:
        return wanted | _arrays_of_super_scales(artifact, name, entry, rows, groups)
    wanted[f"{name}.scales"] = rows * groups
    if form == "group_int" and "zero" not in entry and f"{name}.minima" not in artifact.infos:
        wanted[f"{name}.zeros"] = -(-rows * groups // per_byte)
    return wanted


def _unknown_form(artifact: EngineArtifact, name: str, entry: dict[str, Any]) -> ToolkitError:
    return ToolkitError(
        f"{artifact.path / ENGINE_JSON}: params: {name}: unknown form {entry!r:.100}; convert the model again"
    )


def _arrays_of_tiles(artifact: EngineArtifact, name: str, entry: dict[str, Any]) -> dict[str, int]:
    block, tiles = entry.get("block"), entry.get("tiles")
    if len(entry["shape"]) != 2:
        raise _unknown_form(artifact, name, entry)
    for pair in (block, tiles):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(x, int) and x > 0 for x in pair):
            raise _unknown_form(artifact, name, entry)
    assert block is not None and tiles is not None
    taken = f"{name}.row_blocks" in artifact.infos  # rows of other tiles than their own number says
    if tiles[1] * block[1] < entry["shape"][1] or (not taken and tiles[0] * block[0] < entry["shape"][0]):
        raise _unknown_form(artifact, name, entry)
    found = {f"{name}.weight": math.prod(entry["shape"]), f"{name}.scales": tiles[0] * tiles[1]}
    return found | ({f"{name}.row_blocks": entry["shape"][0]} if taken else {})


def _arrays_of_super_scales(
    artifact: EngineArtifact, name: str, entry: dict[str, Any], rows: int, groups: int
) -> dict[str, int]:
    length, columns = entry["super_block"], entry["shape"][1]
    if not isinstance(length, int) or length < 1 or columns % length or groups % (columns // length):
        raise _unknown_form(artifact, name, entry)
    found = {f"{name}.super_d": rows * (columns // length), f"{name}.super_codes": rows * groups}
    if entry.get("super_minima"):
        found |= {f"{name}.super_dmin": rows * (columns // length), f"{name}.super_min_codes": rows * groups}
    return found
