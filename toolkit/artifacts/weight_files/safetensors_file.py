"""The safetensors container: headers read and validated before any tensor is touched, files written so that they map.

Layout (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header
``{name: {dtype, shape, data_offsets}}``, then the tensors without holes. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.json_file import parse_json
from toolkit.artifacts.weight_files.huge_pages import HUGE, map_file
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

PAGE = 4096
MAX_HEADER = 100_000_000  # as in the reference implementation
PAD_PREFIX = "_pad."
HEADER_ROOM = 1 << 20  # first guess for the header of a file that is written as a stream
_CHUNK = 16 << 20  # bytes that are copied at once
_ZEROS = bytes(HUGE)

# safetensors dtype → numpy dtype of the same width (numpy has neither bfloat16 nor float8: those are raw bits).
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "?",
    "U8": "<u1",
    "I8": "<i1",
    "F8_E4M3": "<u1",
    "F8_E5M2": "<u1",
    "F8_E8M0": "<u1",
    "I16": "<i2",
    "U16": "<u2",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "F32": "<f4",
    "I64": "<i8",
    "U64": "<u8",
    "F64": "<f8",
}

# safetensors dtype → name of the torch dtype.
TORCH_DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
}
_FROM_TORCH = {name: dtype for dtype, name in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header states it. ``start`` and ``end`` are byte positions in the file. ``view``: sizes
    and strides in elements from ``start`` on, where its numbers do not lie one after the other (never in safetensors).
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    view: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file by name, in order of position, paddings left out.

    The header is checked in full: lengths, dtypes, shapes, no overlap, no hole, and that the file ends where
    the last tensor does. Raises ToolkitError that names the file, what was expected and what was found.
    """
    header, data_start, size = _raw_header(path)
    infos = {
        name: _tensor_info(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"
    }
    position = data_start
    ordered = sorted(infos.items(), key=lambda item: (item[1].start, item[1].end))
    for name, info in ordered:
        if info.start != position:
            raise ToolkitError(
                f"{path}: corrupt header: tensor {name} starts at byte {info.start}, expected {position}; "
                "fetch it again"
            )
        position = info.end
    if position != size:
        cut = next((f" within tensor {name}" for name, info in ordered if info.end > size), "")
        what = f"truncated{cut}" if position > size else "trailing bytes"
        raise ToolkitError(f"{path}: {what}: expected {position} bytes, found {size}; fetch it again")
    return {name: info for name, info in ordered if not name.startswith(PAD_PREFIX)}


def read_metadata(path: Path) -> dict[str, str]:
    """The file's free-form ``__metadata__``. Raises ToolkitError as ``read_header`` does."""
    metadata = _raw_header(path)[0].get("__metadata__", {})
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _raw_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, byte where tensor data starts, file size)."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ToolkitError(f"{path}: expected a safetensors file, found {size} bytes; fetch it again")
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ToolkitError(f"{path}: not a safetensors file: it states a header of {length} bytes")
            if length > size - 8:
                raise ToolkitError(
                    f"{path}: truncated: expected a header of {length} bytes, found {size - 8}; fetch it again"
                )
            raw = file.read(length)
    except FileNotFoundError:
        raise ToolkitError(f"{path}: no such file") from None
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    header = parse_json(raw, f"{path}: corrupt safetensors header", unique=True)
    if not isinstance(header, dict):
        raise ToolkitError(f"{path}: corrupt safetensors header: expected a JSON object")
    return header, 8 + length, size


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ToolkitError(f"{path}: tensor {name}: expected dtype, shape and data_offsets, found {entry!r:.60}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise ToolkitError(f"{path}: tensor {name}: unknown dtype {dtype!r:.40}; known: {', '.join(NUMPY_DTYPES)}")
    if not isinstance(shape, list) or not all(map(_whole, shape)):
        raise ToolkitError(f"{path}: tensor {name}: expected a shape of whole numbers, found {shape!r:.60}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise ToolkitError(f"{path}: tensor {name}: expected two data offsets, found {offsets!r:.60}")
    need = math.prod(shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != need:
        raise ToolkitError(
            f"{path}: tensor {name}: {dtype} {shape} takes {need} bytes, found {offsets[1] - offsets[0]}; "
            "fetch it again"
        )
    return TensorInfo(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def map_arrays(path: Path, infos: Mapping[str, TensorInfo] | None = None) -> dict[str, NDArray[Any]]:
    """Every tensor as a read-only array over the mapped file, nothing copied. BF16 comes as uint16, F8 as uint8.

    ``infos``: its header, where that was read before. Files of ``write_arrays`` are page-aligned; in others an array
    may be unaligned to its element size.
    """
    infos = read_header(path) if infos is None else infos
    if not infos:
        return {}
    base = map_file(path)
    return {
        name: base[info.start : info.end].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        for name, info in infos.items()
    }


def as_stored(tensor: Any) -> NDArray[Any]:
    """A torch tensor as ``map_arrays`` gives it: of bfloat16 the bits."""
    import torch

    solid = tensor.detach().contiguous()
    if solid.dtype != torch.bfloat16:
        return np.asarray(solid.numpy())
    return np.asarray(solid.view(torch.int16).numpy().view(np.uint16))


def widened(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Float32 of float16, float32 or the bits of bfloat16, as ``map_arrays`` gives them."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def array_bytes(array: Any) -> tuple[NDArray[np.uint8], tuple[int, ...], str]:
    """(raw bytes, shape, safetensors dtype) of a numpy array or a CPU torch tensor; copied only if not contiguous."""
    if isinstance(array, np.ndarray):
        solid = np.ascontiguousarray(array)
        kind = solid.dtype.newbyteorder("<").str.replace("|", "<")
        names = {"<b1": "BOOL", **{v: k for k, v in NUMPY_DTYPES.items() if not k.startswith(("F8", "BF"))}}
        return solid.reshape(-1).view(np.uint8), array.shape, names[kind]
    import torch

    tensor = array.detach().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    return raw, tuple(tensor.shape), _FROM_TORCH[str(tensor.dtype).removeprefix("torch.")]


@runtime_checkable
class Writer(Protocol):
    """An array of bytes that is made while it is written."""

    @property
    def nbytes(self) -> int: ...

    def write_to(self, file: int, at: int) -> None:
        """Write all of it to place ``at`` of an open file. OSError passes through."""


def write_arrays(
    path: Path,
    arrays: Iterable[tuple[str, Any, str | None]],
    metadata: Mapping[str, str] | None = None,
    *,
    header_room: int = HEADER_ROOM,
) -> None:
    """Write a stream of (name, numpy array, CPU torch tensor or ``Writer``, safetensors dtype or None for its own).

    Every tensor starts at a multiple of ``PAGE`` bytes of the file (``_pad.N`` tensors fill the gaps, since the format
    allows no holes), so that ``map_arrays`` returns aligned views. One array is held at a time: the header comes
    first in the file but is known last, so ``header_room`` bytes are kept for it and padded with blanks. The
    file appears whole or not at all, and what the system keeps of it in memory are huge pages where it can.
    OSError passes through.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("w+b") as file:
            file.seek(header_room)
            _write_stream(file, header, arrays)
            file.truncate()
            raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            if 8 + len(raw) > header_room:
                header_room = _make_room(file, header_room, 8 + len(raw))
            file.seek(0)
            file.write((header_room - 8).to_bytes(8, "little") + raw.ljust(header_room - 8))
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_tensors(
    path: Path,
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as the ecosystem's own tools do: no padding, wide dtypes first, then by name.

    ``tensors``: by name, or a stream of (name, tensor), of which one is held at a time: they go to a scratch file as
    they come, and from there to their places. ``metadata`` defaults to ``{"format": "pt"}``, which
    transformers asks for; it is read after the last tensor. Atomic; OSError passes through.
    """
    parts: list[tuple[str, tuple[int, ...], str, int, int]] = []  # name, shape, dtype, place in the scratch file
    scratch, target = path.with_name(f".{path.name}.data"), path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("w+b") as data, target.open("wb") as file:
            for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
                raw, shape, dtype = array_bytes(tensor)
                parts.append((name, shape, dtype, data.tell(), data.tell() + raw.nbytes))
                data.write(raw.data)
                del tensor, raw  # before the next one is made
            parts.sort(key=lambda part: (-np.dtype(NUMPY_DTYPES[part[2]]).itemsize, part[0]))
            header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
            position = 0
            for name, shape, dtype, start, end in parts:
                assert name not in header, name
                place = [position, position + end - start]
                header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
                position = place[1]
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            text = text.ljust(-(-len(text) // 8) * 8)
            file.write(len(text).to_bytes(8, "little") + text)
            for *_, start, end in parts:
                _copy(data, file, start, end)
        os.replace(target, path)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    finally:
        scratch.unlink(missing_ok=True)


def _copy(source: IO[bytes], target: IO[bytes], start: int, end: int) -> None:
    """Append bytes ``start`` to ``end`` of ``source`` to ``target``."""
    source.seek(start)
    while start < end:
        piece = source.read(min(_CHUNK, end - start))
        target.write(piece)
        start += len(piece)


def _write_stream(file: IO[bytes], header: dict[str, Any], arrays: Iterable[tuple[str, Any, str | None]]) -> None:
    """Write the arrays from the file's position on and enter them (and their paddings) in ``header``."""
    position = pads = 0
    begin, kept = file.tell(), HUGE
    for name, array, dtype in arrays:
        assert name not in header and not name.startswith(PAD_PREFIX), name
        data: Any
        writes = isinstance(array, Writer)
        data, shape, own = (array, (array.nbytes,), "U8") if writes else array_bytes(array)
        dtype = dtype or own
        assert NUMPY_DTYPES[dtype] == NUMPY_DTYPES[own], f"{name}: {own} cannot be stored as {dtype}"
        if gap := -position % PAGE:
            pad = {"dtype": "U8", "shape": [gap], "data_offsets": [position, position + gap]}
            header[f"{PAD_PREFIX}{pads}"] = pad
            file.write(bytes(gap))
            position, pads = position + gap, pads + 1
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + data.nbytes]}
        kept = _keep_huge(file, kept, begin + position + data.nbytes)
        if writes:
            file.flush()
            start = file.tell()
            data.write_to(file.fileno(), start)
            file.seek(start + data.nbytes)
        else:
            file.write(data.data)
        position += data.nbytes
        del array, data  # before the next one is made


def _keep_huge(file: IO[bytes], kept: int, end: int) -> int:
    """Fill the file from ``kept`` on with zeros until ``end`` is within; returns its size. Linux keeps in memory what a
    call writes, in pieces as large as that call's: here huge pages, whatever parts they are written over in."""
    while kept < end:
        os.pwrite(file.fileno(), _ZEROS, kept)
        kept += HUGE
    return kept


def _make_room(file: IO[bytes], room: int, needed: int) -> int:
    """Move the tensor data, which starts at byte ``room``, to where ``needed`` header bytes fit; return that place."""
    new_room = -(-needed // PAGE) * PAGE
    end = file.seek(0, os.SEEK_END)
    while end > room:  # from the back, so that nothing is overwritten before it is read
        start = max(room, end - _CHUNK)
        file.seek(start)
        data = file.read(end - start)
        file.seek(start + new_room - room)
        file.write(data)
        end = start
    return new_room
