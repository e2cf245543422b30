"""How weights are packed for target ``torch``: canonical weights as they are, codes of up to 4 bits two a byte."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.engine.artifact import TORCH_TARGET, Arrays, EngineArtifact
from toolkit.base.named import Named
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt, SuperScales, Weight
    from toolkit.artifacts.scales import AllScales


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

    if packed.is_meta:
        return torch.empty(shape, dtype=torch.uint8, device=packed.device)
    if bits > 4:
        return packed.view(shape)
    # A table of byte → two codes is twice as fast as shifting and interleaving.
    byte = np.arange(256)
    pairs = (byte & 15 | byte >> 4 << 8).astype("<u2")
    codes = torch.from_numpy(np.take(pairs, packed.numpy()).view(np.uint8))
    return codes[: math.prod(shape)].view(shape)


def torch_weights(artifact: EngineArtifact) -> TorchWeights:
    """Canonical weights by name, made when asked for: dense ones are views of the file, codes are unpacked.

    Raises ToolkitError if the artifact is packed for another target than ``torch``.
    """
    if artifact.target != TORCH_TARGET:
        raise ToolkitError(
            f"{artifact.path}: packed for {artifact.target}, expected target {TORCH_TARGET}; "
            "convert the model again with --target torch"
        )
    return TorchWeights(artifact)


class TorchWeights(Named["Weight | Tensor"]):
    """The weights of an artifact packed for ``torch``, each made anew when asked for."""

    def __init__(self, artifact: EngineArtifact) -> None:
        super().__init__(artifact.params)
        self._artifact = artifact

    @cached_property
    def _mapped(self) -> Tensor:
        from toolkit.artifacts.weight_files.mapped import map_file

        return map_file(self._artifact.array_file)

    def _array(self, name: str) -> Tensor:
        from toolkit.artifacts.weight_files.mapped import view_tensor

        return view_tensor(self._mapped, self._artifact.infos[name])

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it: matrices are without memory."""
        return _Outlines(self._artifact)[name]

    def scales(self) -> AllScales | None:
        """Those that the artifact holds."""
        from toolkit.artifacts.scales import read_scales

        return read_scales(self._artifact.path)

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
            group_index=self._index(f"{name}.group_index", grid[1]),
            super_scales=above,
        )

    def _optional(self, name: str) -> Tensor | None:
        return self._array(name) if name in self._artifact.infos else None

    def _index(self, name: str, below: int) -> Tensor | None:
        """Numbers of groups or tiles, every one checked: what they index would be read out of bounds."""
        found = self._optional(name)
        if found is not None and found.numel() and not 0 <= int(found.min()) <= int(found.max()) < below:
            raise ToolkitError(
                f"{self._artifact.array_file}: array {name}: expected numbers from 0 to {below - 1}, found "
                f"{int(found.min())} to {int(found.max())}; convert the model again"
            )
        return found

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
            rows = self._index(f"{name}.row_blocks", entry["tiles"][0])
            return BlockFp8(self._array(f"{name}.weight"), self._array(f"{name}.scales"), block, rows)
        rows, columns = entry["shape"]
        codes = unpack_codes(self._array(f"{name}.codes"), 4, (rows, columns))
        if entry["form"] == "fp4":
            scale = self._optional(f"{name}.global_scale")
            return Fp4(codes, self._array(f"{name}.scales"), entry["group_size"], scale)
        above = self._super_scales(name, entry)
        scales = self._array(f"{name}.scales") if above is None else above.scales()
        return Codebook(codes, self._array(f"{name}.table"), scales, 4, entry["group_size"], above)


class _Outlines(TorchWeights):
    """The weights of which only what decides about a form is read."""

    def _array(self, name: str) -> Tensor:
        from toolkit.artifacts.outline import without_memory

        decides = name.endswith((".group_index", ".row_blocks", ".global_scale"))
        return super()._array(name) if decides else without_memory(self._artifact.infos[name])
