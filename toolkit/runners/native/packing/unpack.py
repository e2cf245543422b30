"""From the native library's tiles back to canonical weights: the exact inverse of ``pack.py``. Imports torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Dense, GroupInt, Trellis, Weight
from toolkit.artifacts.outline import taller
from toolkit.artifacts.scales import AllScales
from toolkit.base.named import Named
from toolkit.runners.native.packing.head import turn
from toolkit.runners.native.packing.pack import TORCH_TYPES, trellis_table
from toolkit.runners.native.packing.packed import DENSE, F32, LANES, VECTOR, PackedTensor, PackedWeights
from toolkit.runners.weights.info import scales_of

U8 = NDArray[np.uint8]
_TURNED = 4096  # rows that are turned at a time


def unpack(p: PackedTensor) -> Weight:
    """Exact inverse of ``pack_weight``; of a turned head, its numbers in float32."""
    if p.meta.turned:
        head = _unpack_group_int(p).dequantize(torch.float32)
        for rows in head.split(_TURNED):
            rows.copy_(turn(rows))
        return Dense(head)
    form = p.meta.origin["form"]
    if p.meta.trellis:
        return _unpack_trellis(p)
    if form == "dense":
        return Dense(_unpack_dense(p))
    m = p.meta
    if form == "channel_int8":
        blocks = p.data.reshape(m.tiles, 1, m.group_bytes)
        codes = _unpack_codes(np.ascontiguousarray(blocks[:, :, 128:]).reshape(m.tiles, -1), m.rows, m.cols, 8)
        scales = np.ascontiguousarray(blocks[:, 0, :64]).view(np.float32).reshape(-1)[: m.rows]
        return ChannelInt8(
            torch.from_numpy((codes.astype(np.int16) - 128).astype(np.int8)), torch.from_numpy(scales.copy())
        )
    return _unpack_group_int(p)


def _unpack_dense(p: PackedTensor) -> Tensor:
    m = p.meta
    items = p.data.view(np.float32 if m.dtype == F32 else np.uint16).reshape(m.tiles, m.cols, LANES)
    rows = np.ascontiguousarray(items.transpose(0, 2, 1)).reshape(-1, m.cols)[: m.rows]
    t = torch.from_numpy(rows.copy() if m.dtype == F32 else rows.view(np.int16).copy())
    return t if m.dtype == F32 else t.view(TORCH_TYPES[m.dtype])


def _unpack_codes(data: U8, rows: int, cols: int, bits: int) -> U8:
    tiles = data.shape[0]
    if bits == 8:
        return np.ascontiguousarray(data.reshape(tiles, -1, LANES, 4).transpose(0, 2, 1, 3)).reshape(-1, cols)[:rows]
    both = data.reshape(tiles, -1, LANES, 4)
    quads = np.stack([both & 15, both >> 4], axis=3)
    return np.ascontiguousarray(quads.transpose(0, 2, 1, 3, 4)).reshape(-1, cols)[:rows]


def _unpack_trellis(p: PackedTensor) -> Trellis:
    m, o = p.meta, p.meta.origin
    groups = m.cols // m.group
    blocks = p.data.reshape(m.tiles, groups, m.group_bytes)
    codes = blocks[:, :, m.header_bytes :].reshape(m.tiles, groups, m.group // 8, LANES, m.bits)
    words = np.ascontiguousarray(codes.transpose(0, 3, 1, 2, 4)).reshape(m.tiles * LANES, -1)[: m.rows].view(np.int32)
    scales = np.ascontiguousarray(blocks[:, :, :32]).view(np.float16).transpose(0, 2, 1).reshape(-1, groups)[: m.rows]
    held = scales[:, :: o["group_size"] // m.group].copy()
    return Trellis(
        torch.from_numpy(words.copy()), trellis_table(m.bits), torch.from_numpy(held), m.bits, o["group_size"]
    )


def _unpack_group_int(p: PackedTensor) -> GroupInt:
    m, o = p.meta, p.meta.origin
    blocks = p.data.reshape(m.tiles, m.cols // m.group, m.group_bytes)
    codes = _unpack_codes(
        np.ascontiguousarray(blocks[:, :, m.header_bytes :]).reshape(m.tiles, -1), m.rows, m.cols, m.bits
    )
    half = 64 if m.dtype == F32 else 32

    def floats(part: U8) -> Tensor:
        kind = np.float32 if m.dtype == F32 else np.int16
        raw = np.ascontiguousarray(part).view(kind).transpose(0, 2, 1).reshape(-1, part.shape[1])[: m.rows]
        t = torch.from_numpy(np.array(raw, order="C"))  # a copy: a mapped file is not writable
        return t if m.dtype == F32 else t.view(TORCH_TYPES[m.dtype])

    step = o["group_size"] // m.group
    scales = floats(blocks[:, :, :half])[:, ::step]
    zeros = minima = None
    if m.minima:
        minima = floats(blocks[:, :, half : 2 * half])[:, ::step]
        if o["zeros"]:  # 8-bit codes with zeros of their own
            safe = torch.where(scales == 0, torch.ones_like(scales), scales)
            zeros, minima = torch.round(-minima / safe).to(torch.uint8), None
    else:
        raw = np.ascontiguousarray(blocks[:, :, half : half + LANES]).transpose(0, 2, 1)
        stored = np.ascontiguousarray(raw).reshape(-1, m.cols // m.group)[: m.rows, ::step]
        zeros = torch.from_numpy(np.array(stored, order="C"))
    index = None
    if o["act_order"]:
        order = np.arange(m.cols) if p.perm is None else p.perm
        groups = np.empty(m.cols, np.int32)
        groups[order] = np.arange(m.cols) // o["group_size"]
        index = torch.from_numpy(groups)
        original = np.empty_like(codes)
        original[:, order] = codes
        codes = original
    scales = scales.to(getattr(torch, o["scales"])).contiguous()
    if minima is not None:
        minima = minima.to(getattr(torch, o["minima"])).contiguous()
    return GroupInt(torch.from_numpy(codes), scales, zeros, o["bits"], o["group_size"], minima, index)


class UnpackedWeights(Named["Weight | Tensor"]):
    """Packed weights in canonical form again, each made when asked for. A quantized head stays what it became; a turned
    one has the type that it was stored in, by which runners choose theirs.
    """

    def __init__(self, packed: PackedWeights) -> None:
        super().__init__(packed)
        self._packed = packed

    def __getitem__(self, name: str) -> Weight | Tensor:
        p = self._packed[name]
        if p.meta.kind == VECTOR:
            return torch.from_numpy(p.data.copy()).view(TORCH_TYPES[p.meta.dtype])[: p.meta.rows]
        found, stored = unpack(p), p.meta.origin.get("stored")
        if p.meta.turned and stored is not None:
            return Dense(found.dequantize(getattr(torch, stored)))
        return found

    def scales(self) -> AllScales | None:
        """Those of what is packed."""
        return scales_of(self._packed)

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as its meta tells it: matrices are without memory, but with act-order."""
        p = self._packed[name]
        m = p.meta
        if m.kind == VECTOR or (m.origin.get("act_order") and not m.turned):
            return self[name]
        stored = getattr(torch, m.origin.get("stored", "float32")) if m.turned else TORCH_TYPES[m.dtype]
        if m.kind == DENSE or m.turned:
            return Dense(torch.empty(m.rows, m.cols, dtype=stored, device="meta"))
        one = unpack(PackedTensor(p.data[: m.tile_bytes], replace(m, rows=1)))
        return taller(one, m.rows)
