"""Steps and calls as bytes, for ranks in other processes: JSON, then the arrays' raw bytes. No pickle."""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.videos import Frame
from toolkit.runners.step import SamplingBatch, StepBatch, StepOutput, Views

RECORDS: dict[str, Any] = {cls.__name__: cls for cls in (StepBatch, SamplingBatch, Views, StepOutput, Picture, Frame)}
_HEAD = struct.Struct("<II")  # of what follows the checksum; the head's size


class Damaged(OSError):
    """A message has not come as it was sent."""


def apart(message: Any) -> tuple[Any, list[bytes]]:
    """(what is JSON, the raw bytes of its arrays) of plain JSON values, bytes, numpy arrays, tuples and ``RECORDS``."""
    blobs: list[bytes] = []
    return _told(message, blobs), blobs


def together(told: Any, data: memoryview) -> Any:
    """Inverse of ``apart``, whose bytes ``data`` holds one behind the other; arrays are the reader's own."""
    return _read(told, data, [0])


def pack(message: Any) -> bytes:
    """What ``apart`` takes as one message."""
    told, blobs = apart(message)
    head = json.dumps(told).encode()
    found = zlib.crc32(head)
    for blob in blobs:
        found = zlib.crc32(blob, found)
    return b"".join([_HEAD.pack(found, len(head)), head, *blobs])


def unpack(data: bytes) -> Any:
    """Inverse of ``pack``. Raises Damaged."""
    checksum, size = _HEAD.unpack_from(data)
    if zlib.crc32(memoryview(data)[_HEAD.size :]) != checksum:
        raise Damaged("a message between ranks is damaged")
    end = _HEAD.size + size
    return together(json.loads(data[_HEAD.size : end]), memoryview(data)[end:])


def digest(output: StepOutput) -> int:
    """Of the tokens drawn, which all ranks must agree on."""
    return zlib.crc32(output.tokens.tobytes())


def _told(value: Any, blobs: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        blobs.append(value.tobytes())
        return {"array": value.dtype.str, "shape": value.shape}
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"record": type(value).__name__, "of": [_told(getattr(value, f.name), blobs) for f in fields(value)]}
    if isinstance(value, tuple):
        return {"tuple": [_told(item, blobs) for item in value]}
    if isinstance(value, list):
        return [_told(item, blobs) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _told(item, blobs)] for key, item in value.items()]}
    return value


def _read(told: Any, data: memoryview, at: list[int]) -> Any:
    if isinstance(told, list):
        return [_read(item, data, at) for item in told]
    if not isinstance(told, dict):
        return told
    if "array" in told:
        dtype = np.dtype(told["array"])
        count = math.prod(told["shape"])
        found = np.frombuffer(data, dtype, count, at[0]).reshape(told["shape"]).copy()
        at[0] += count * dtype.itemsize
        return found
    if "bytes" in told:
        at[0] += told["bytes"]
        return bytes(data[at[0] - told["bytes"] : at[0]])
    if "record" in told:
        cls = RECORDS[told["record"]]
        values = [_read(item, data, at) for item in told["of"]]
        return cls(**{f.name: value for f, value in zip(fields(cls), values, strict=True)})
    if "tuple" in told:
        return tuple(_read(item, data, at) for item in told["tuple"])
    return {key: _read(item, data, at) for key, item in told["dict"]}
