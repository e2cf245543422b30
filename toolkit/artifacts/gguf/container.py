"""The GGUF container (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and tensor table.

Nothing in the file is trusted: every count, length and offset is checked against the file's size before it is used.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.weight_files.find import gguf_parts
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

# GGML type id → (name, elements a block, bytes a block) of the types that can be read.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
TOOL_KEY = "toolkit.version"  # metadata of the files that we write
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class GgufContainer:
    """``metadata``: key → str, bool, int, float, list of str, or numpy array. ``tensors``: shapes as in numpy, the
    contiguous dimension last, dtype the GGML type's name. ``data``: the whole file, mapped; ``more``: files behind it,
    each with the place where it begins, were all one.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: NDArray[np.uint8]
    more: tuple[tuple[int, NDArray[np.uint8]], ...] = ()

    def at(self, start: int, end: int) -> NDArray[np.uint8]:
        """Bytes of one tensor, a view of its file."""
        base, data = next(((base, data) for base, data in reversed(self.more) if base <= start), (0, self.data))
        return data[start - base : end - base]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, a view of the file."""
        info = self.tensors[name]
        return self.at(info.start, info.end)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        start = self.tensors[name].start
        return gguf_parts(self.path)[sum(base <= start for base, _ in self.more)]


def read_container(path: Path) -> GgufContainer:
    """Map a GGUF file (version 2 or 3, little-endian) and check its tables.

    Raises ToolkitError that names the file, for garbage, truncation, and tensor types that cannot be read.
    """
    try:
        if path.stat().st_size < 24:
            raise ToolkitError(f"{path}: expected a GGUF file, found {path.stat().st_size} bytes; fetch it again")
        data = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    cursor = _Cursor(path, memoryview(data))  # type: ignore[arg-type]
    if bytes(cursor.take(4)) != b"GGUF":
        raise ToolkitError(f"{path}: not a GGUF file: it starts with {bytes(cursor.buffer[:4])!r}, expected b'GGUF'")
    version = cursor.number("<u4")
    if version not in (2, 3):
        raise ToolkitError(f"{path}: GGUF version: expected 2 or 3 (little-endian), found {version}")
    tensor_count, entry_count = cursor.number("<u8"), cursor.number("<u8")
    cursor.check_count(tensor_count, 24)
    cursor.check_count(entry_count, 12)
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"key {key!r:.60} occurs twice")
        metadata[key] = cursor.value(cursor.number("<u4"))
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= _MAX_ALIGNMENT or alignment % 8:
        raise ToolkitError(f"{path}: general.alignment: expected a multiple of 8, found {alignment!r:.40}")
    start = -(-cursor.position // alignment) * alignment
    return GgufContainer(path, metadata, _place(path, entries, start, len(data)), data)


@dataclass
class _Cursor:
    path: Path
    buffer: memoryview
    position: int = 0

    def error(self, what: str) -> ToolkitError:
        return ToolkitError(f"{self.path}: corrupt GGUF file: {what} (byte {self.position}); fetch it again")

    def take(self, count: int) -> memoryview:
        if count > len(self.buffer) - self.position:
            raise self.error(f"{count} bytes expected, {len(self.buffer) - self.position} left")
        self.position += count
        return self.buffer[self.position - count : self.position]

    def check_count(self, count: int, least_bytes: int) -> None:
        if count * least_bytes > len(self.buffer) - self.position:
            raise self.error(f"{count} entries stated, more than the file can hold")

    def number(self, dtype: str) -> int:
        return int.from_bytes(self.take(int(dtype[2])), "little")

    def string(self) -> str:
        raw = self.take(self.number("<u8"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.error("a string is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise self.error(f"value type {kind} is unknown")
        item = np.frombuffer(self.take(int(_SCALARS[kind][2])), _SCALARS[kind])[0].item()
        return bool(item) if kind == _BOOL else item

    def _array(self, depth: int) -> Any:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind in _SCALARS:
            size = int(_SCALARS[kind][2])
            self.check_count(count, size)
            return np.frombuffer(self.take(count * size), _SCALARS[kind])
        if kind == _STRING:
            self.check_count(count, 8)
            return self._strings(count)
        if kind != _ARRAY or depth >= 4:
            raise self.error(f"array of type {kind} is unknown or nested too deep")
        self.check_count(count, 12)
        return [self._array(depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have hundreds of thousands: a loop without a method call an item."""
        found: list[str] = []
        position, size, buffer = self.position, len(self.buffer), self.buffer
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = unpack(buffer, position)
                if length > size - position - 8:
                    raise self.error("a string runs past the end")
                found.append(str(buffer[position + 8 : position + 8 + length], "utf-8"))
                position += 8 + length
        except struct.error:
            raise self.error("truncated in a list of strings") from None
        except UnicodeDecodeError:
            raise self.error("a string is not UTF-8") from None
        self.position = position
        return found


def _tensor_entry(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """(name, type id, shape in numpy's order, offset)."""
    name = cursor.string()
    dims = cursor.number("<u4")
    if not 1 <= dims <= 4:
        raise cursor.error(f"tensor {name!r:.60}: {dims} dimensions")
    shape = tuple(cursor.number("<u8") for _ in range(dims))[::-1]
    return name, cursor.number("<u4"), shape, cursor.number("<u8")


def _place(
    path: Path, entries: list[tuple[str, int, tuple[int, ...], int]], data_start: int, size: int
) -> dict[str, TensorInfo]:
    """Check types, shapes and places of all tensors."""
    found: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in entries:
        what = f"{path}: tensor {name[:100]}"
        if name in found:
            raise ToolkitError(f"{what}: occurs twice; fetch the file again")
        if kind not in TYPES:
            known = ", ".join(entry[0] for entry in TYPES.values())
            raise ToolkitError(f"{what}: type {_OTHER_TYPES.get(kind, kind)} cannot be read; expected one of {known}")
        dtype, per_block, block_bytes = TYPES[kind]
        if not all(0 < side < 1 << 40 for side in shape) or shape[-1] % per_block:
            raise ToolkitError(f"{what}: shape {list(shape)} is impossible for {dtype}; fetch the file again")
        start = data_start + offset
        end = start + math.prod(shape) // per_block * block_bytes
        if end > size:
            raise ToolkitError(f"{what}: truncated: it ends at byte {end}, the file at {size}; fetch the file again")
        found[name] = TensorInfo(dtype, shape, start, end)
    position = data_start
    for name, info in sorted(found.items(), key=lambda item: item[1].start):
        if info.start < position:
            raise ToolkitError(f"{path}: tensor {name[:100]}: overlaps another; fetch the file again")
        position = info.end
    return found
