"""GGML's block types and canonical weights, both ways and bit by bit.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A row of a matrix is a sequence of blocks; a
block holds a few floats, small scales, and codes. Every ``_read`` turns bytes [rows, blocks, bytes a block] into a
canonical weight, and the ``_write`` beside it gives the same bytes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.canonical import Codebook, Dense, Fp4, GroupInt, SuperScales, Weight
from toolkit.artifacts.gguf.lattices import LATTICES
from toolkit.base.lazy_dataclass import dataclass

Bytes = NDArray[Any]  # of uint8

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""GGML's float types."""


@dataclass(frozen=True)
class BlockType:
    """``columns`` and ``size`` (bytes) of a block; ``bits`` of a code, ``group``: columns that share a scale.

    ``zero``: the code that stands for 0, None where groups have minima. ``supers``: scales are small integers times a
    float of the block.
    """

    name: str
    columns: int
    size: int
    bits: int
    group: int
    zero: int | None
    supers: bool
    read: Callable[[Bytes], Weight]
    write: Callable[[Any], Bytes]
    table: bool = False


def from_blocks(kind: str, raw: Bytes, shape: tuple[int, ...]) -> Weight:
    """A tensor's bytes as a canonical weight; ``shape``: [rows, columns] (or any, for float types)."""
    if kind in FLOATS:
        return Dense(torch.from_numpy(raw.copy()).view(FLOATS[kind]).view(shape))
    block = BLOCKS[kind] if kind in BLOCKS else LATTICES[kind]
    return block.read(raw.reshape(shape[0], shape[1] // block.columns, block.size))


def to_blocks(kind: str, weight: Weight) -> Bytes:
    """The bytes of a weight that has exactly the layout of ``kind`` (see ``fit.fit``). Shape [rows, bytes]."""
    if kind in FLOATS:
        assert isinstance(weight, Dense) and weight.weight.dtype == FLOATS[kind]
        flat = weight.weight.contiguous()
        return flat.reshape(flat.shape[0], -1).view(torch.uint8).numpy()
    out = BLOCKS[kind].write(weight)
    return np.ascontiguousarray(out.reshape(out.shape[0], -1))


def _f16(raw: Bytes) -> Tensor:
    """Bytes [rows, blocks, 2] → float16 [rows, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.int16)[..., 0].copy()).view(torch.float16)


def _bytes(floats: Tensor) -> Bytes:
    """float16 [rows, blocks] → bytes [rows, blocks, 2]."""
    assert floats.dtype == torch.float16, floats.dtype
    return floats.contiguous().view(torch.int16).numpy()[..., None].view(np.uint8)


def _codes(values: NDArray[Any]) -> Tensor:
    """Codes [rows, blocks, …] → uint8 [rows, columns]."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(values.shape[0], -1), dtype=np.uint8))


def _blocks(codes: Tensor, columns: int) -> Bytes:
    return codes.contiguous().numpy().reshape(codes.shape[0], -1, columns)


def _scale_codes(values: NDArray[Any]) -> Tensor:
    """Scale codes [rows, blocks, n] → int8 [rows, groups]."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(values.shape[0], -1)).astype(np.int8))


def _planes(raw: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Bit fields of bytes [rows, blocks, chunks, n] → [rows, blocks, chunks, shifts, n]."""
    return (raw[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _merge(fields: Bytes, shifts: tuple[int, ...]) -> Bytes:
    """Inverse of ``_planes``: [rows, blocks, chunks, shifts, n] → [rows, blocks, chunks, n]."""
    return np.bitwise_or.reduce(fields << np.array(shifts, np.uint8)[:, None], axis=-2)


# -- blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL


def _nibbles(raw: Bytes) -> Bytes:
    """16 bytes a block → 32 codes: low nibbles are the first half."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _from_nibbles(codes: Bytes) -> Bytes:
    return (codes[..., :16] & 15) | (codes[..., 16:] << 4)


def _simple_reader(bits: int, minima: bool) -> Callable[[Bytes], Weight]:
    def read(raw: Bytes) -> Weight:
        scales = _f16(raw[..., :2])
        rest = raw[..., 4 if minima else 2 :]
        if bits == 8:
            codes = rest ^ 0x80  # int8 -128…127 → 0…255 around a zero point of 128
        else:
            codes = _nibbles(rest[..., -16:])
            if bits == 5:
                high = np.unpackbits(np.ascontiguousarray(rest[..., :4]), axis=-1, bitorder="little")
                codes = codes | (high << 4)
        zeros = None if minima else torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
        return GroupInt(_codes(codes), scales, zeros, bits, 32, _f16(raw[..., 2:4]) if minima else None)

    return read


def _simple_writer(bits: int, minima: bool) -> Callable[[GroupInt], Bytes]:
    def write(weight: GroupInt) -> Bytes:
        codes = _blocks(weight.codes, 32)
        parts = [_bytes(weight.scales)]
        if minima:
            assert weight.minima is not None
            parts.append(_bytes(weight.minima))
        if bits == 8:
            parts.append(codes ^ 0x80)
        else:
            if bits == 5:
                parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
            parts.append(_from_nibbles(codes))
        return np.concatenate(parts, axis=-1)

    return write


def _read_iq4_nl(raw: Bytes) -> Weight:
    return Codebook(_codes(_nibbles(raw[..., 2:])), torch.tensor(IQ4_TABLE).float(), _f16(raw[..., :2]), 4, 32)


def _write_iq4_nl(weight: Codebook) -> Bytes:
    return np.concatenate([_bytes(weight.scales), _from_nibbles(_blocks(weight.codes, 32))], axis=-1)


def _read_mxfp4(raw: Bytes) -> Weight:
    return Fp4(_codes(_nibbles(raw[..., 1:])), torch.from_numpy(np.ascontiguousarray(raw[..., 0])), 32)


def _write_mxfp4(weight: Fp4) -> Bytes:
    scales = weight.scales.contiguous().numpy()[..., None]
    return np.concatenate([scales, _from_nibbles(_blocks(weight.codes, 32))], axis=-1)


# -- super-blocks of 256


def _group_int(codes: Bytes, supers: SuperScales, bits: int, group: int, zero: int | None) -> GroupInt:
    scales = supers.scales()
    zeros = None if zero is None else torch.full(scales.shape, zero, dtype=torch.uint8)
    return GroupInt(_codes(codes), scales, zeros, bits, group, supers.minima(), super_scales=supers)


def _supers(weight: GroupInt | Codebook, per_block: int) -> tuple[SuperScales, NDArray[np.int8]]:
    """The super-scales, and their codes as [rows, blocks, per_block]."""
    assert weight.super_scales is not None
    return weight.super_scales, _per_block(weight.super_scales.codes, per_block)


def _per_block(codes: Tensor | None, per_block: int) -> NDArray[np.int8]:
    assert codes is not None
    return codes.contiguous().numpy().reshape(codes.shape[0], -1, per_block)


def _read_q2_k(raw: Bytes) -> Weight:
    scales, packed = raw[..., :16], raw[..., 16:80]
    codes = _planes(packed.reshape(*packed.shape[:-1], 2, 32), (0, 2, 4, 6), 3)
    supers = SuperScales(
        _f16(raw[..., 80:82]), _scale_codes(scales & 15), _f16(raw[..., 82:84]), _scale_codes(scales >> 4)
    )
    return _group_int(codes, supers, 2, 16, None)


def _write_q2_k(weight: GroupInt) -> Bytes:
    supers, scales = _supers(weight, 16)
    assert supers.dmin is not None
    both = scales.view(np.uint8) | _per_block(supers.min_codes, 16).view(np.uint8) << 4
    codes = _blocks(weight.codes, 256)
    packed = _merge(codes.reshape(*codes.shape[:2], 2, 4, 32), (0, 2, 4, 6)).reshape(*codes.shape[:2], 64)
    return np.concatenate([both, packed, _bytes(supers.d), _bytes(supers.dmin)], axis=-1)


def _read_q3_k(raw: Bytes) -> Weight:
    mask, packed, scales = raw[..., :32], raw[..., 32:96], raw[..., 96:108]
    low = _planes(packed.reshape(*packed.shape[:-1], 2, 32), (0, 2, 4, 6), 3)
    high = _planes(mask[..., None, :], tuple(range(8)), 1)
    codes = low.reshape(*raw.shape[:2], 256) | high.reshape(*raw.shape[:2], 256) << 2
    low_scales = np.concatenate([scales[..., :8] & 15, scales[..., :8] >> 4], axis=-1)
    high_scales = _planes(scales[..., None, 8:], (0, 2, 4, 6), 3).reshape(*raw.shape[:2], 16)
    six = (low_scales | high_scales << 4).astype(np.int8) - 32
    return _group_int(codes, SuperScales(_f16(raw[..., 108:110]), _scale_codes(six)), 3, 16, 4)


def _write_q3_k(weight: GroupInt) -> Bytes:
    supers, scales = _supers(weight, 16)
    six = (scales + 32).astype(np.uint8)
    low_scales = (six[..., :8] & 15) | (six[..., 8:] & 15) << 4
    high_scales = _merge((six >> 4).reshape(*six.shape[:2], 1, 4, 4), (0, 2, 4, 6))[..., 0, :]
    codes = _blocks(weight.codes, 256)
    mask = _merge((codes >> 2).reshape(*codes.shape[:2], 1, 8, 32), tuple(range(8)))[..., 0, :]
    packed = _merge((codes & 3).reshape(*codes.shape[:2], 2, 4, 32), (0, 2, 4, 6)).reshape(*codes.shape[:2], 64)
    return np.concatenate([mask, packed, low_scales, high_scales, _bytes(supers.d)], axis=-1)


def _six_bit_pairs(scales: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes → eight 6-bit scales and eight 6-bit minima (Q4_K, Q5_K)."""
    first, second, third = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 2) & 48], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 2) & 48], axis=-1)
    return scale, minimum


def _from_six_bit_pairs(scale: Bytes, minimum: Bytes) -> Bytes:
    first = scale[..., :4] | (scale[..., 4:] >> 4) << 6
    second = minimum[..., :4] | (minimum[..., 4:] >> 4) << 6
    third = (scale[..., 4:] & 15) | (minimum[..., 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=-1)


def _q45_k_reader(bits: int) -> Callable[[Bytes], Weight]:
    def read(raw: Bytes) -> Weight:
        scale, minimum = _six_bit_pairs(raw[..., 4:16])
        packed = raw[..., -128:]
        codes = _planes(packed.reshape(*packed.shape[:-1], 4, 32), (0, 4), 15).reshape(*raw.shape[:2], 256)
        if bits == 5:
            high = _planes(raw[..., None, 16:48], tuple(range(8)), 1)
            codes = codes | high.reshape(*raw.shape[:2], 256) << 4
        supers = SuperScales(_f16(raw[..., :2]), _scale_codes(scale), _f16(raw[..., 2:4]), _scale_codes(minimum))
        return _group_int(codes, supers, bits, 32, None)

    return read


def _q45_k_writer(bits: int) -> Callable[[GroupInt], Bytes]:
    def write(weight: GroupInt) -> Bytes:
        supers, scales = _supers(weight, 8)
        assert supers.dmin is not None
        pairs = _from_six_bit_pairs(scales.view(np.uint8), _per_block(supers.min_codes, 8).view(np.uint8))
        codes = _blocks(weight.codes, 256)
        parts = [_bytes(supers.d), _bytes(supers.dmin), pairs]
        if bits == 5:
            high = (codes >> 4).reshape(*codes.shape[:2], 1, 8, 32)
            parts.append(_merge(high, tuple(range(8)))[..., 0, :])
        low = (codes & 15).reshape(*codes.shape[:2], 4, 2, 32)
        parts.append(_merge(low, (0, 4)).reshape(*codes.shape[:2], 128))
        return np.concatenate(parts, axis=-1)

    return write


def _read_q6_k(raw: Bytes) -> Weight:
    low = _planes(raw[..., :128].reshape(*raw.shape[:2], 2, 64), (0, 4), 15).reshape(*raw.shape[:2], 256)
    high = _planes(raw[..., 128:192].reshape(*raw.shape[:2], 2, 32), (0, 2, 4, 6), 3).reshape(*raw.shape[:2], 256)
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return _group_int(low | high << 4, SuperScales(_f16(raw[..., 208:210]), _scale_codes(scales)), 6, 16, 32)


def _write_q6_k(weight: GroupInt) -> Bytes:
    supers, scales = _supers(weight, 16)
    codes = _blocks(weight.codes, 256)
    low = _merge((codes & 15).reshape(*codes.shape[:2], 2, 2, 64), (0, 4)).reshape(*codes.shape[:2], 128)
    high = _merge((codes >> 4).reshape(*codes.shape[:2], 2, 4, 32), (0, 2, 4, 6)).reshape(*codes.shape[:2], 64)
    return np.concatenate([low, high, scales.view(np.uint8), _bytes(supers.d)], axis=-1)


def _read_iq4_xs(raw: Bytes) -> Weight:
    high = np.ascontiguousarray(raw[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], axis=-1).reshape(*raw.shape[:2], 8)
    six = (low | high.astype(np.uint8) << 4).astype(np.int8) - 32
    supers = SuperScales(_f16(raw[..., :2]), _scale_codes(six))
    codes = _nibbles(raw[..., 8:].reshape(*raw.shape[:2], 8, 16))
    return Codebook(_codes(codes), torch.tensor(IQ4_TABLE).float(), supers.scales(), 4, 32, supers)


def _write_iq4_xs(weight: Codebook) -> Bytes:
    supers, scales = _supers(weight, 8)
    six = (scales + 32).astype(np.uint8)
    high = np.bitwise_or.reduce((six >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=-1)
    low = (six[..., 0::2] & 15) | (six[..., 1::2] & 15) << 4
    codes = _blocks(weight.codes, 256)
    packed = _from_nibbles(codes.reshape(*codes.shape[:2], 8, 32)).reshape(*codes.shape[:2], 128)
    return np.concatenate([_bytes(supers.d), high.astype("<u2")[..., None].view(np.uint8), low, packed], axis=-1)


def _simple(name: str, size: int, bits: int, minima: bool) -> BlockType:
    zero = None if minima else 1 << (bits - 1)
    return BlockType(name, 32, size, bits, 32, zero, False, _simple_reader(bits, minima), _simple_writer(bits, minima))


BLOCKS: dict[str, BlockType] = {
    block.name: block
    for block in (
        _simple("Q4_0", 18, 4, False),
        _simple("Q4_1", 20, 4, True),
        _simple("Q5_0", 22, 5, False),
        _simple("Q5_1", 24, 5, True),
        _simple("Q8_0", 34, 8, False),
        BlockType("Q2_K", 256, 84, 2, 16, None, True, _read_q2_k, _write_q2_k),
        BlockType("Q3_K", 256, 110, 3, 16, 4, True, _read_q3_k, _write_q3_k),
        BlockType("Q4_K", 256, 144, 4, 32, None, True, _q45_k_reader(4), _q45_k_writer(4)),
        BlockType("Q5_K", 256, 176, 5, 32, None, True, _q45_k_reader(5), _q45_k_writer(5)),
        BlockType("Q6_K", 256, 210, 6, 16, 32, True, _read_q6_k, _write_q6_k),
        BlockType("IQ4_NL", 32, 18, 4, 32, None, False, _read_iq4_nl, _write_iq4_nl, table=True),
        BlockType("MXFP4", 32, 17, 4, 32, None, False, _read_mxfp4, _write_mxfp4, table=True),
        BlockType("IQ4_XS", 256, 136, 4, 32, None, True, _read_iq4_xs, _write_iq4_xs, table=True),
    )
}
