"""From canonical weights to the native library's tiles, exactly; codes of a table become the 8-bit ones next to them.
Imports torch: used only to pack.

Float8 and group sizes that are no multiple of 16 have no packed form; ``pack_nearest`` makes them dense, and says so.
What ``pack_…`` gives holds its source until its bytes are asked for, or written straight into a file (``Unpacked``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Codebook, Dense, Fp8, GroupInt, Trellis, Weight
from toolkit.artifacts.formats.words import Words
from toolkit.base.threads import usable_cores
from toolkit.runners.native import library
from toolkit.runners.native.packing.packed import BF16, DENSE, F16, F32, INT, LANES, TRELLIS, PackedMeta, PackedTensor

U8 = NDArray[np.uint8]
TORCH_TYPES = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
TYPES = {v: k for k, v in TORCH_TYPES.items()}
_LAYOUTS = {"rows": 1, "gptq": 2, "awq": 3}  # CodeLayout of pack_tiles.h
_TRELLIS = 4  # likewise
_ALONE = 1 << 18  # bytes that one thread packs sooner than two begin
_SPLITS = (128, 96, 64, 48, 32, 16)  # activation groups that a long weight group is cut into


def without_memory(meta: PackedMeta, perm: NDArray[np.int32] | None = None) -> PackedTensor:
    """What an outline is packed to: as many bytes as it will have, of which none is there."""
    return PackedTensor(np.broadcast_to(np.uint8(0), (meta.nbytes,)), meta, perm)


# -- dense


class Unpacked(PackedTensor):
    """A matrix that the library packs from ``source`` when ``data`` is asked for, or into a file, and then it never
    stands in memory. ``source``: fields of ``PackSource``, arrays and tensors for their addresses."""

    _source: dict[str, Any]

    def __init__(self, meta: PackedMeta, perm: NDArray[np.int32] | None, source: dict[str, Any]) -> None:
        self.__dict__.update(meta=meta, perm=perm, _source=source)

    @cached_property
    def data(self) -> U8:
        lib = library.load(library.library_path())
        out = np.empty(self.meta.nbytes, np.uint8)
        if lib.tk_pack(self._record(), library.address(out), self._from(), self._threads()):
            raise AssertionError(library.error(lib))
        return out

    def write_to(self, file: int, at: int) -> None:
        """Write the bytes to place ``at`` of an open file. OSError passes through."""
        lib = library.load(library.library_path())
        failed = lib.tk_pack_file(self._record(), file, at, self._from(), self._threads())
        assert failed >= 0, library.error(lib)
        if failed:
            raise OSError(failed, os.strerror(failed))

    @property
    def nbytes(self) -> int:
        return self.meta.nbytes

    def described(self, meta: PackedMeta) -> Unpacked:
        return Unpacked(meta, self.perm, self._source)

    def in_memory(self) -> PackedTensor:
        return PackedTensor(self.data, self.meta, self.perm)

    def _record(self) -> Any:
        return library.tensor_records([without_memory(self.meta)])

    def _from(self) -> library.PackSource:
        source = self._source
        places = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in source.items()}
        return library.PackSource(**places, perm=library.address(self.perm))

    def _threads(self) -> int:
        return usable_cores() if self.meta.nbytes > _ALONE else 1


def pack_dense(weight: Tensor) -> PackedTensor:
    """[out, in] float to tiles [in][16 rows]."""
    meta = packed_meta(Dense(weight))
    if weight.is_meta:
        return without_memory(meta)
    held = weight.detach().to(TORCH_TYPES[meta.dtype])
    held = held if held.stride(1) == 1 else held.contiguous()
    return Unpacked(meta, None, {"codes": held, "ld": held.stride(0)})


def pack_alike(weights: Sequence[Tensor], dtype: torch.dtype) -> list[PackedTensor]:
    """Small [out, in] float matrices as ``pack_dense`` packs them in ``dtype``, those of one shape together: by
    themselves the calls would take longer than the work."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, weight in enumerate(weights):
        by_shape.setdefault(weight.shape, []).append(i)
    found: dict[int, PackedTensor] = {}
    for (rows, cols), places in by_shape.items():
        stacked = torch.stack([weights[i] for i in places]).to(dtype)
        tiles = torch.nn.functional.pad(stacked, (0, 0, 0, -rows % LANES)).view(len(places), -1, LANES, cols)
        data = tiles.transpose(2, 3).contiguous().view(torch.uint8).flatten(1).numpy()
        meta = PackedMeta(DENSE, rows, cols, TYPES[dtype], origin={"form": "dense"})
        found |= {i: PackedTensor(data[k], meta) for k, i in enumerate(places)}
    return [found[i] for i in range(len(weights))]


# -- integers in groups


def _split(group_size: int) -> int:
    """Activation group for a weight group: itself up to 128 columns, else the largest listed divisor (or itself)."""
    if group_size <= 128:
        return group_size
    return next((s for s in _SPLITS if group_size % s == 0), group_size)


def _permutation(w: GroupInt) -> NDArray[np.int32] | None:
    """Columns sorted by group, or None where they are. ValueError where groups are of different sizes."""
    if w.group_index is None:
        return None
    index = w.group_index.numpy()
    counts = np.bincount(index, minlength=w.scales.shape[1])
    if index.size != w.shape[1] or (counts != w.group_size).any():
        raise ValueError("groups of different sizes")
    order = np.argsort(index, kind="stable").astype(np.int32)
    return None if (order == np.arange(order.size)).all() else order


def pack_group_int(w: GroupInt) -> PackedTensor:
    """Codes below 16 in 4 bits, others in 8. ValueError where the groups do not fit the kernels."""
    meta = packed_meta(w)
    perm = _permutation(w)
    codes, layout = _codes_of(w, meta, perm)
    if codes.is_meta:
        return without_memory(meta, perm)
    scales = w.scales.to(TORCH_TYPES[meta.dtype]).contiguous()
    if w.minima is not None:
        offsets = w.minima.to(scales.dtype)
    else:
        assert w.zeros is not None
        # exact: the product of a zero below 2^8 and a 16-bit float's scale fits float32
        offsets = -w.zeros.float() * scales if meta.minima else w.zeros
    if offsets.shape != scales.shape:
        offsets = offsets.expand(scales.shape)
    source = {"codes": codes, "ld": codes.stride(0), "layout": layout}
    return _unpacked_int(meta, perm, scales, offsets, w.group_size // meta.group, **source)


def _codes_of(w: GroupInt, meta: PackedMeta, perm: NDArray[np.int32] | None) -> tuple[Tensor, int]:
    """Bytes or words of the codes, and their layout as ``PackSource`` numbers it."""
    words = w.stored
    if isinstance(words, Words) and words.bits == meta.bits and (perm is None or words.layout == "gptq"):
        held = words.words
        return held if held.stride(1) == 1 else held.contiguous(), _LAYOUTS[words.layout]
    return w.codes if w.codes.stride(1) == 1 else w.codes.contiguous(), 0


def _unpacked_int(
    meta: PackedMeta, perm: NDArray[np.int32] | None, scales: Tensor, offsets: Tensor, repeat: int, **source: Any
) -> Unpacked:
    """``scales`` and ``offsets``: [rows, groups], each for ``repeat`` groups of the packed matrix. Raises ValueError
    where there are not as many."""
    wanted = meta.rows, -(-meta.cols // (meta.group * repeat))
    if scales.shape != wanted or offsets.shape != wanted:
        raise ValueError(f"scales {tuple(scales.shape)} and offsets {tuple(offsets.shape)}, expected {wanted}")
    more = {"scales": scales, "offsets": offsets.contiguous(), "ld_scales": scales.shape[1], "repeat": repeat}
    return Unpacked(meta, perm, source | more)


def pack_channel_int8(w: ChannelInt8) -> PackedTensor:
    """One group as long as the row: activations are quantized per token. ValueError where it does not fit."""
    meta = packed_meta(w)
    if w.weight.is_meta:
        return without_memory(meta)
    codes = w.weight.contiguous()
    zeros = torch.full((codes.shape[0], 1), 128, dtype=torch.uint8)
    scales = w.scales.float()[:, None].contiguous()
    return _unpacked_int(meta, None, scales, zeros, 1, codes=codes, ld=codes.stride(0), flip=128)


def pack_trellis(w: Trellis) -> PackedTensor:
    """Streams as they are; looked up by another table than the library's, or without it, as 8-bit codes. ValueError
    where the groups do not fit the kernels."""
    if not _looked_up_here(w):
        return pack_group_int(w.integers())
    meta = packed_meta(w)
    if w.words.is_meta:
        return without_memory(meta)
    words, scales = w.words.contiguous(), w.scales.contiguous()
    source = {"codes": words, "ld": words.stride(0), "layout": _TRELLIS}
    return _unpacked_int(meta, None, scales, scales, w.group_size // meta.group, **source)


def trellis_table(bits: int) -> Tensor:
    """What trellis codes of so many bits look up here, int8 [256]."""
    return torch.frombuffer(bytearray(library.trellis_table(bits)), dtype=torch.int8)


def _looked_up_here(w: Trellis) -> bool:
    if w.table.is_meta:
        return True
    return library.unloadable() is None and torch.equal(w.table, trellis_table(w.bits))


def packed_meta(w: Weight) -> PackedMeta:
    """How ``pack_weight`` packs ``w``, whose matrices need not have memory. ValueError where it has no packed form."""
    rows, cols = w.shape
    if isinstance(w, Dense):
        return PackedMeta(DENSE, rows, cols, TYPES.get(w.weight.dtype, F32), origin={"form": "dense"})
    if isinstance(w, ChannelInt8):
        if cols % 16 or cols >= 65536:
            raise ValueError(f"{cols} columns")
        return PackedMeta(INT, rows, cols, F32, 8, cols, origin={"form": "channel_int8"})
    if isinstance(w, Codebook):
        return packed_meta(w.integers())
    if not isinstance(w, GroupInt | Trellis):
        raise ValueError(type(w).__name__)
    group = _split(w.group_size)
    if group % 16 or cols % group:
        raise ValueError(f"groups of {w.group_size} in {cols} columns")
    if isinstance(w, Trellis):
        if not _looked_up_here(w):
            return packed_meta(w.integers())
        origin = {"form": "trellis", "bits": w.bits, "group_size": w.group_size}
        return PackedMeta(INT, rows, cols, F16, w.bits, group, trellis=TRELLIS, origin=origin)
    bits, own_zeros = (4 if w.bits <= 4 else 8), False
    if w.minima is None and bits == 8:
        assert w.zeros is not None
        own_zeros = w.zeros.is_meta or bool((w.zeros != 128).any())
    odd = own_zeros or (w.minima is not None and w.minima.dtype != w.scales.dtype)
    origin = {
        "form": "group_int",
        "bits": w.bits,
        "group_size": w.group_size,
        "zeros": w.zeros is not None,
        "act_order": w.group_index is not None,
        "scales": str(w.scales.dtype).removeprefix("torch."),
        "minima": "" if w.minima is None else str(w.minima.dtype).removeprefix("torch."),
    }
    dtype = F32 if odd else TYPES.get(w.scales.dtype, F32)
    return PackedMeta(INT, rows, cols, dtype, bits, group, own_zeros or w.minima is not None, origin=origin)


def pack_weight(w: Weight) -> PackedTensor:
    """Pack any canonical weight. ValueError where it has no packed form (``pack_nearest`` then makes it dense)."""
    if isinstance(w, GroupInt):
        return pack_group_int(w)
    if isinstance(w, Trellis):
        return pack_trellis(w)
    if isinstance(w, Codebook):
        return pack_group_int(w.integers())
    if isinstance(w, ChannelInt8):
        return pack_channel_int8(w)
    if isinstance(w, Dense):
        return pack_dense(w.weight)
    raise ValueError(type(w).__name__)


def pack_nearest(name: str, w: Weight, notes: list[str]) -> PackedTensor:
    """Pack ``w``; where it has no packed form, dense in bfloat16. What grows so, or by codes in more bits than they
    have, is said in ``notes``.
    """
    try:
        packed = pack_weight(w)
    except ValueError as reason:
        what = "float8" if isinstance(w, Fp8) else str(reason)
        notes.append(f"{name}: {what} has no kernel here; held as bfloat16")
        return pack_as_bfloat16(w)
    if isinstance(w, GroupInt | Codebook | Trellis) and packed.meta.bits > w.bits:
        notes.append(f"{name}: codes of {w.bits} bits have no kernel here; held in {packed.meta.bits}")
    return packed


def pack_as_bfloat16(w: Weight) -> PackedTensor:
    """Dense, whatever it was."""
    outline = any(isinstance(t := getattr(w, f.name), Tensor) and t.is_meta for f in fields(w))
    if outline:
        return pack_dense(torch.empty(w.shape, dtype=torch.bfloat16, device="meta"))
    return pack_dense(w.dequantize(torch.bfloat16))
