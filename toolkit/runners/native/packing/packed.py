"""Weights as the native library reads them: named raw arrays and a few numbers each. Needs numpy alone.

``kernels/cpu/ops.h`` defines the layout. A ``PackedTensor`` can lie in a mapped file; nothing is copied to use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass

VECTOR, DENSE, INT = 0, 1, 2
F32, BF16, F16, ONES = 0, 1, 2, 3
ITEM_BYTES = {F32: 4, BF16: 2, F16: 2}
LANES = 16
TRELLIS = 1  # TRELLIS_VERSION of ops.h
LAYOUT_VERSION = 2  # 2: heads turned by a Hadamard matrix


@dataclass(frozen=True)
class PackedMeta:
    """How to read a packed array. ``kind``, ``dtype``, ``bits``, ``group``: as in ops.h; rows and columns unpadded.

    ``turned``: the matrix is W·H, H a block Hadamard matrix (its own inverse) as of ``Ops::hadamard``: its input is
    turned likewise first, a row of it last. ``trellis``: of codes that are looked up by streams, which tables those
    were. ``origin`` says what it was packed from, for the exact inverse
    (``toolkit.runners.native.packing.unpack.unpack``).
    """

    kind: int
    rows: int
    cols: int = 1
    dtype: int = F32
    bits: int = 0
    group: int = 0
    minima: bool = False
    turned: bool = False
    trellis: int = 0
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def tiles(self) -> int:
        return -(-self.rows // LANES)

    @property
    def header_bytes(self) -> int:
        return 48 if self.trellis else {F32: 128, ONES: 0}.get(self.dtype, 64)

    @property
    def group_bytes(self) -> int:
        return self.header_bytes + self.group * LANES * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        if self.kind == INT:
            return self.cols // self.group * self.group_bytes
        return self.cols * LANES * ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        if self.kind == VECTOR:
            return -(-self.rows // LANES) * LANES * ITEM_BYTES[self.dtype]
        return self.tiles * self.tile_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PackedTensor:
    """``data``: uint8, flat. ``perm``: int32 [cols] or None: column k of the packed matrix is input perm[k]. ``first``:
    the tile that ``data`` begins with, where a rank's tiles alone are there."""

    data: NDArray[np.uint8]
    meta: PackedMeta
    perm: NDArray[np.int32] | None = None
    first: int = 0

    def described(self, meta: PackedMeta) -> Self:
        """The same bytes under another ``meta``."""
        return replace(self, meta=meta)

    def in_memory(self) -> PackedTensor:
        """Itself, its bytes made."""
        return self


PackedWeights = Mapping[str, PackedTensor]
Floats = NDArray[np.float32]


def floats(tensor: PackedTensor, part: slice = slice(None)) -> Floats:
    """The numbers of a vector, or a part of them, whatever type they are stored in."""
    dtype, data = tensor.meta.dtype, tensor.data
    stored = data.view({BF16: np.uint16, F16: np.float16}.get(dtype, np.float32))[: tensor.meta.rows][part]
    if dtype == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def vector(values: NDArray[Any], dtype: int = F32) -> PackedTensor:
    """Numbers, or for 16-bit types their bits, padded with zeros to a multiple of 16."""
    flat = np.zeros(-(-values.size // LANES) * LANES, np.float32 if dtype == F32 else np.uint16)
    flat[: values.size] = values.reshape(-1)
    return PackedTensor(flat.view(np.uint8), PackedMeta(VECTOR, int(values.size), dtype=dtype))
