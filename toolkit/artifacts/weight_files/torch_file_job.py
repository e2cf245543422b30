"""What a file of ``torch.save`` says of its tensors and where their bytes lie: work for a box.

Two layouts (https://github.com/pytorch/pytorch, ``torch/serialization.py``): since torch 1.6 a zip archive whose entry
``NAME/data.pkl`` describes the tensors and whose entries ``NAME/data/KEY`` are the storages, uncompressed; before, five
pickles one after the other and then the storages, each after its length. Nothing here imports torch.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Any

from toolkit.artifacts.weight_files.pickle_data import ORDERED_DICT, Call, Kept, Name, load

Job = Callable[[dict[str, Any], bytes], tuple[list[Any], bytes]]

MOST_PICKLE = 64 << 20  # bytes of the pickle of a zip archive
_MOST = 1 << 62
_MAGIC = 0x1950A86A20F9469CFC6C  # how the older layout begins
_OLD_VERSION = 1001
_ENCRYPTED = 1
_LOCAL = struct.Struct("<4s22xHH")  # of a zip entry's own header: signature, length of its name and of its extra field

# Storage classes, and dtypes where a storage is of bytes alone → the tensor's dtype in safetensors' words.
_STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
}
_BYTES = "torch.storage.UntypedStorage"
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}

_V2, _OLD, _V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v3"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_TYPED = "torch._tensor._rebuild_from_type_v2"
_NAMES = {
    *(ORDERED_DICT, _BYTES, _V2, _OLD, _V3, *_PARAMETERS, _TYPED, *_STORAGES, *_DTYPES),
    *("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"),
}


def reading(setup: None, data: bytes) -> Job:
    """The box's job: {"path"} → for each tensor [name, dtype, byte of the file where its storage begins, bytes of the
    storage, offset in it, shape, strides], the last three in elements. ValueError, without the file's name, says what
    is wrong. What is true of these numbers together is for the caller to check."""

    def run(value: dict[str, Any], data: bytes) -> tuple[list[Any], bytes]:
        try:
            with open(value["path"], "rb") as file:
                begin = file.read(4)
                file.seek(0)
                return _zip(file) if begin[:2] == b"PK" else _old(file), b""
        except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
            raise ValueError(f"corrupt or truncated: {error}") from None

    return run


def _zip(file: IO[bytes]) -> list[Any]:
    archive = zipfile.ZipFile(file)
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise ValueError("corrupt archive: two entries have one name")
    roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise ValueError("expected an archive of torch.save, found a zip archive of something else")
    root = roots[0]
    if f"{root}/constants.pkl" in entries:
        raise ValueError("it is a TorchScript archive, which holds code beside the tensors")
    order = entries.get(f"{root}/byteorder")
    if order is not None and _content(file, order, 16) != b"little":
        raise ValueError("its numbers are big-endian, expected little-endian")
    from io import BytesIO

    described = load(BytesIO(_content(file, entries[f"{root}/data.pkl"], MOST_PICKLE)), _NAMES)
    tensors = _tensors(described)
    places: dict[str, tuple[int, int]] = {}
    for key in {key for _, _, key, *_ in tensors}:
        entry = entries.get(f"{root}/data/{key}")
        if entry is None:
            raise ValueError(f"corrupt archive: the storage {key:.40} is missing")
        places[key] = _place(file, entry)
    return _placed(tensors, places)


def _content(file: IO[bytes], entry: zipfile.ZipInfo, most: int) -> bytes:
    start, size = _place(file, entry)
    if size > most:
        raise ValueError(f"entry {entry.filename:.80}: {size} bytes, expected at most {most}")
    file.seek(start)
    return file.read(size)


def _place(file: IO[bytes], entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Where the bytes of an entry begin in the file, and how many they are."""
    name = f"entry {entry.filename:.80}"
    if entry.flag_bits & _ENCRYPTED:
        raise ValueError(f"{name} is encrypted, expected plain bytes")
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
        raise ValueError(f"{name} is compressed, expected plain bytes as torch.save writes them")
    file.seek(entry.header_offset)
    signature, name_length, extra_length = _LOCAL.unpack(file.read(_LOCAL.size))
    if signature != b"PK\3\4":
        raise ValueError(f"corrupt archive: {name} is not where the archive's list says")
    return entry.header_offset + _LOCAL.size + name_length + extra_length, entry.file_size


def _old(file: IO[bytes]) -> list[Any]:
    try:
        magic = load(file, ())
    except ValueError:
        magic = None
    if magic != _MAGIC:
        raise ValueError("expected a file of torch.save, found neither a zip archive nor torch's magic number")
    if load(file, ()) != _OLD_VERSION:
        raise ValueError("it is of a version of torch's old format that is unknown here")
    system = load(file, ())
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("its numbers are big-endian, expected little-endian")
    tensors = _tensors(load(file, _NAMES))
    keys = load(file, ())
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(keys) > len(set(keys)):
        raise ValueError("corrupt: expected a list of its storages")
    widths = {key: WIDTHS.get(dtype, 1) for _, dtype, key, *_ in tensors}
    places, size = {}, os.fstat(file.fileno()).st_size
    for key in keys:
        if key not in widths:
            raise ValueError(f"corrupt: the storage {key:.40} is no tensor's")
        (count,) = struct.unpack("<q", file.read(8))
        start = file.tell()
        places[key] = (start, count * widths[key])
        if not 0 <= count <= (size - start) // widths[key]:
            raise ValueError(f"truncated: a storage of {count} numbers at byte {start}, found {size - start} bytes")
        file.seek(start + count * widths[key])
    if missing := widths.keys() - set(keys):
        raise ValueError(f"corrupt: the storage {min(missing):.40} is missing")
    return _placed(tensors, places)


def _placed(tensors: list[Any], places: dict[str, tuple[int, int]]) -> list[Any]:
    found = []
    for name, dtype, key, size, *view in tensors:
        start, length = places[key]
        if length != size:
            raise ValueError(f"tensor {name:.200}: expected a storage of {size} bytes, found {length}")
        found.append([name, dtype, start, length, *view])
    return found


def _tensors(described: Any) -> list[Any]:
    """[name, dtype, storage's key, storage's bytes, offset, shape, strides] of each."""
    if not isinstance(described, dict):
        raise ValueError(f"expected tensors by name, found {_kind(described)}")
    return [[name, *_tensor(name, value)] for name, value in described.items()]


def _tensor(name: str, value: Any) -> list[Any]:
    for _ in range(2):  # a parameter of a tensor, and either of a type with attributes
        if isinstance(value, Call) and value.name in _PARAMETERS:
            value = value.args[0] if value.args else None
        elif isinstance(value, Call) and value.name == _TYPED and len(value.args) == 4:
            made, _, args, _ = value.args
            value = Call(made, args) if isinstance(made, Name) and isinstance(args, tuple) else None
    if not isinstance(value, Call) or value.name not in (_V2, _OLD, _V3) or len(value.args) < 4:
        raise ValueError(f"{name:.200}: expected a tensor, found {_kind(value)}; save the model's state_dict alone")
    storage, offset, shape, strides = value.args[:4]
    dtype = value.args[6] if value.name == _V3 and len(value.args) > 6 else None
    wrong = ValueError(f"tensor {name:.200}: corrupt: expected a storage, an offset, a shape and strides")
    if not isinstance(storage, Kept) or not isinstance(storage.key, tuple) or len(storage.key) < 5:
        raise wrong
    tag, kind, key, _, count, *further = storage.key
    if tag != "storage" or not isinstance(kind, Name) or not isinstance(key, str) or any(further):
        raise wrong
    stored = _DTYPES.get(str(dtype)) if kind == _BYTES else _STORAGES.get(kind)
    if stored is None or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise wrong
    if not all(type(x) is int and -_MOST < x < _MOST for x in (count, offset, *shape, *strides)):
        raise wrong
    width = 1 if kind == _BYTES else WIDTHS.get(stored, 1)
    return [stored, key, count * width, offset, list(shape), list(strides)]


def _kind(value: Any) -> str:
    return f"what {value.name} makes" if isinstance(value, Call) else f"a {type(value).__name__}"
