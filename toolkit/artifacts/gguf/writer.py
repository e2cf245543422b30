"""Writing the GGUF container, version 3 (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.gguf.container import TYPES
from toolkit.base.lazy_dataclass import dataclass

ALIGNMENT = 32
_IDS = {name: (number, columns, size) for number, (name, columns, size) in TYPES.items()}
_ARRAYS = {
    "|b1": 7,
    "|u1": 0,
    "|i1": 1,
    "<u2": 2,
    "<i2": 3,
    "<u4": 4,
    "<i4": 5,
    "<f4": 6,
    "<u8": 10,
    "<i8": 11,
    "<f8": 12,
}
_BOOL, _STRING, _ARRAY, _UINT32, _INT32, _FLOAT32 = 7, 8, 9, 4, 5, 6


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: ``shape`` as in numpy (contiguous dimension last), ``kind`` the GGML type's name."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def size(self) -> int:
        _, columns, size = _IDS[self.kind]
        assert self.shape[-1] % columns == 0, self
        return math.prod(self.shape) // columns * size


def write_gguf(
    path: Path, metadata: Mapping[str, Any], entries: Sequence[Entry], data: Iterable[NDArray[np.uint8]]
) -> None:
    """Write ``path``. ``metadata``: str, bool, int (uint32), float (float32), np.int32, list of str, or numpy array
    values;
    ``data``: the bytes of each entry in order, made one at a time. OSError passes through.
    """
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(metadata)))
        for key, value in metadata.items():
            _text(file, key)
            _value(file, value)
        offset = 0
        for entry in entries:
            _text(file, entry.name)
            file.write(struct.pack("<I", len(entry.shape)) + struct.pack(f"<{len(entry.shape)}Q", *entry.shape[::-1]))
            file.write(struct.pack("<IQ", _IDS[entry.kind][0], offset))
            offset += -(-entry.size // ALIGNMENT) * ALIGNMENT
        _pad(file)
        for entry, raw in zip(entries, data, strict=True):
            assert raw.nbytes == entry.size, (entry, raw.nbytes)
            file.write(np.ascontiguousarray(raw).data)
            _pad(file)


def _pad(file: IO[bytes]) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _text(file: IO[bytes], text: str) -> None:
    raw = text.encode("utf-8")
    file.write(struct.pack("<Q", len(raw)) + raw)


def _value(file: IO[bytes], value: Any) -> None:
    if isinstance(value, str):
        file.write(struct.pack("<I", _STRING))
        _text(file, value)
    elif isinstance(value, bool):
        file.write(struct.pack("<IB", _BOOL, value))
    elif isinstance(value, int):
        file.write(struct.pack("<II", _UINT32, value))
    elif isinstance(value, np.int32):
        file.write(struct.pack("<Ii", _INT32, value))
    elif isinstance(value, float):
        file.write(struct.pack("<If", _FLOAT32, value))
    elif isinstance(value, np.ndarray):
        kind = _ARRAYS[value.dtype.newbyteorder("<").str]
        file.write(struct.pack("<IIQ", _ARRAY, kind, value.size) + value.tobytes())
    else:
        file.write(struct.pack("<IIQ", _ARRAY, _STRING, len(value)))
        for text in value:
            _text(file, text)
