"""Requests and outputs as bytes, for an engine loop in another process: JSON, then the arrays' raw bytes. No pickle.

A message is a 4-byte length, that many bytes of JSON (an object with ``op``), and the arrays, whose shapes stand in the
JSON, one behind the other. Pictures go as ``parallel.wire`` takes them apart. Outputs, which come with every step, are
spelled here: what goes through all of their values takes longer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import orjson

from toolkit.engine.request import EngineOutput, EngineRequest, Filters, SamplingParams, Whose
from toolkit.models.eyes.pictures import Picture
from toolkit.parallel.wire import apart, together

ARRAYS = {"logits": np.float32, "hidden": np.float32, "routes": np.uint16}  # fields of EngineOutput
_HEAD = struct.Struct("<I")
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def pack(message: dict[str, Any], arrays: Iterable[bytes] = ()) -> bytes:
    """One message. Raises TypeError for values that are no JSON."""
    head = orjson.dumps(message, option=_JSON)
    return b"".join([_HEAD.pack(len(head)), head, *arrays])


def pack_told(message: dict[str, Any], arrays: Iterable[bytes] = ()) -> bytes:
    """The same of what an engine tells, whatever it is: half a character (a surrogate), as in an error that names a
    path which is no UTF-8, goes as the six signs that it is written by in Python."""
    try:
        return pack(message, arrays)
    except TypeError:
        return pack(_spelled(message), arrays)


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_spelled(key): _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list | tuple) else value


def unpack(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """(message, the bytes of its arrays)."""
    (size,) = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    return orjson.loads(data[_HEAD.size : end]), memoryview(data)[end:]


def pack_add(request: EngineRequest, held: Container[bytes] = ()) -> bytes:
    """``held``: digests of the pictures that the reader has already; these alone go in their place."""
    # A schema's integers have any size. orjson writes 64 bits: the response format goes as text.
    params = {**vars(request.params), "grammar": json.dumps(request.params.grammar)}
    pictures, arrays = apart([p.digest if p.digest in held else p for p in request.pictures])
    fields = {**vars(request), "params": params, "pictures": pictures}
    return pack({"op": "add", "request": fields}, arrays)


def read_request(message: dict[str, Any], data: memoryview, held: dict[bytes, Picture]) -> EngineRequest:
    """Inverse of ``pack_add``. ``held``: pictures by their digests, to which those that come are added."""
    fields = dict(message["request"])
    pictures = []
    for sent in together(fields.pop("pictures"), data):
        picture = held[sent] if isinstance(sent, bytes) else sent
        held[picture.digest] = picture
        pictures.append(picture)
    params = dict(fields.pop("params"))
    params["grammar"] = json.loads(params["grammar"])
    params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
    params["filters"] = params["filters"] and Filters(**params["filters"])
    whose = Whose(**fields.pop("whose"))
    return EngineRequest(params=SamplingParams(**params), pictures=pictures, whose=whose, **fields)


def pack_outputs(outputs: Iterable[EngineOutput], stats: dict[str, Any]) -> bytes:
    """Outputs of a step and the engine's figures after it."""
    arrays: list[np.ndarray] = []
    records = []
    for output in outputs:
        record = {k: v for k, v in vars(output).items() if v is not None and not (isinstance(v, list) and not v)}
        for name, dtype in ARRAYS.items():
            if name in record:
                array = np.ascontiguousarray(record[name], dtype)
                arrays.append(array)
                record[name] = array.shape
        records.append(record)
    return pack_told({"op": "outputs", "outputs": records, "stats": stats}, (array.tobytes() for array in arrays))


def read_outputs(message: dict[str, Any], data: memoryview) -> list[EngineOutput]:
    """Inverse of ``pack_outputs``."""
    outputs = []
    at = 0
    for record in message["outputs"]:
        for name, dtype in ARRAYS.items():
            if name in record:
                shape = tuple(record[name])
                record[name] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape).copy()
                at += record[name].nbytes
        if "logprobs" in record:
            record["logprobs"] = [_by_token(p) for p in record["logprobs"]]
        if "prompt_logprobs" in record:
            record["prompt_logprobs"] = [p and _by_token(p) for p in record["prompt_logprobs"]]
        outputs.append(EngineOutput(**record))
    return outputs


def _by_token(found: dict[str, float | None]) -> dict[int, float]:
    """JSON knows neither integer keys nor -inf."""
    return {int(k): float("-inf") if v is None else v for k, v in found.items()}
