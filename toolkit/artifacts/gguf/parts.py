"""A model in several GGUF files, as llama.cpp's ``llama-gguf-split`` and gguf-py write them: NAME-00001-of-00003.gguf
has the metadata, each file a part of the tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.artifacts.gguf.container import GgufContainer, read_container
from toolkit.artifacts.weight_files.find import GGUF_PART, gguf_parts
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.errors import ToolkitError

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def join_parts(first: GgufContainer) -> GgufContainer:
    """A file with the tensors of those that belong to it; itself where there are none. Raises ToolkitError, one line
    that names the file, for one that is not the first, and where one is missing or of another model."""
    count = _whole(first, _COUNT, 1)
    if count < 2:
        return first
    path, files = first.path, gguf_parts(first.path)
    if len(files) != count:
        one = GGUF_PART.fullmatch(path.name)
        told = f"open {one[1]}-00001-of-{one[3]}{one[4]}" if one else f"expected …-00001-of-{count:05d}.gguf for a name"
        raise ToolkitError(f"{path}: is file {_whole(first, _NUMBER, 0) + 1} of the {count} of a model; {told}")
    parts = [first, *map(read_container, files[1:])]
    tensors: dict[str, TensorInfo] = {}
    more, base = [], 0
    for i, part in enumerate(parts):
        number = _whole(part, _NUMBER, 0)
        if (number, _whole(part, _COUNT, 1)) != (i, count):
            found = f"split.no {number} and split.count {_whole(part, _COUNT, 1)}"
            raise ToolkitError(f"{part.path}: expected file {i + 1} of {count}, found one with {found}; fetch it again")
        for name, info in part.tensors.items():
            if name in tensors:
                raise ToolkitError(f"{part.path}: tensor {name[:100]}: is in a file before it too; fetch them again")
            tensors[name] = replace(info, start=info.start + base, end=info.end + base)
        more.append((base, part.data))
        base += len(part.data)
    stated = _whole(first, _TENSORS, len(tensors))
    if stated != len(tensors):
        raise ToolkitError(
            f"{path}: expected {stated} tensors in {count} files, found {len(tensors)}; fetch them again"
        )
    return replace(first, tensors=tensors, more=tuple(more[1:]))


def _whole(container: GgufContainer, key: str, absent: int) -> int:
    found: Any = container.metadata.get(key, absent)
    if type(found) is not int:
        raise ToolkitError(f"{container.path}: {key}: expected an integer, found {found!r:.40}")
    return found
