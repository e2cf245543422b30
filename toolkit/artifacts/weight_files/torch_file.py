"""Weights of ``torch.save`` (``.bin``, ``.pth``), read without running what is in them.

Such a file is a pickle, which can run any code when it is unpickled. Here it is not: a confined process reads it as
data (``torch_file_job.py``) and says which tensors there are and where their bytes lie; each of these numbers is
checked against the file before the file is mapped, as those of safetensors are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.artifacts.weight_files.torch_file_job import WIDTHS
from toolkit.box.box import Box, LimitError, Limits
from toolkit.errors import ToolkitError

LIMITS = Limits(memory=1 << 30, cpu_seconds=30.0, seconds=120.0)
_MOST_DIMENSIONS = 8
_HINT = "save the model as safetensors (model.save_pretrained), or fetch it again"


def read_torch_headers(paths: Iterable[Path], limits: Limits = LIMITS) -> dict[Path, dict[str, TensorInfo]]:
    """Tensors of each file by name, in the file's order. Several may share bytes; ``TensorInfo.view`` is set where one
    is not contiguous.

    Raises ToolkitError, one line that names the file, for what is no file of tensors alone, names or instructions that
    no such file needs, compressed or encrypted parts, and places outside the file.
    """
    box = Box("toolkit.artifacts.weight_files.torch_file_job:reading", limits, size=1)
    try:
        return {path: _read(path, box) for path in paths}
    finally:
        box.close()


def _read(path: Path, box: Box) -> dict[str, TensorInfo]:
    try:
        size = os.stat(path).st_size
        entries, _ = box.run({"path": str(path.absolute())})
        return {str(entry[0]): place_tensor(entry, size) for entry in entries}
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    except LimitError as error:
        raise ToolkitError(f"{path}: its list of tensors cannot be read: {error}; {_HINT}") from None
    except (ValueError, RuntimeError) as error:
        raise ToolkitError(f"{path}: {error}; {_HINT}") from None


def place_tensor(entry: list[Any], file_size: int) -> TensorInfo:
    """Check what the job said of one tensor against the file's size. Raises ValueError."""
    name, dtype, start, length, offset, shape, strides = entry
    width, label = WIDTHS.get(dtype, 1), f"tensor {name:.200}"
    if len(shape) > _MOST_DIMENSIONS or len(strides) != len(shape):
        raise ValueError(f"{label}: expected a stride for each of up to {_MOST_DIMENSIONS} dimensions, found {strides}")
    if min((start, length, offset, *shape, *strides)) < 0:
        raise ValueError(f"{label}: expected no negative number, found offset {offset}, {shape}, strides {strides}")
    if start + length > file_size:
        raise ValueError(f"{label}: truncated: expected its storage to end at byte {start + length}, found {file_size}")
    count = math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if count else offset - 1
    if max(count, last + 1) * width > length:
        raise ValueError(
            f"{label}: {dtype} {shape} with strides {strides} from {offset} on does not fit its storage of {length} "
            "bytes"
        )
    begin = start + offset * width
    view = None if _contiguous(shape, strides) else (tuple(shape), tuple(strides))
    return TensorInfo(dtype, tuple(shape), begin, begin + (last + 1 - offset) * width, view)


def _contiguous(shape: list[int], strides: list[int]) -> bool:
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return math.prod(shape) == 0
        expected *= n
    return True
