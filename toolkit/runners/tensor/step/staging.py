"""Many small arrays in one copy to the device, and several tensors back in a few."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.runners.tensor.devices.device import Fetched, GraphDevice

ALIGNMENT = 16  # of every array's address: kernels are compiled for it
_TYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
}
_BACK: dict[torch.dtype, np.dtype] = {v: k for k, v in _TYPES.items()}


@dataclass(frozen=True)
class Field:
    """Where an array lies in a buffer."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Layout:
    """Arrays by name, one after another in a buffer of ``size`` bytes."""

    fields: dict[str, Field]
    size: int

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray]) -> Layout:
        """Room for arrays of these shapes and dtypes."""
        fields, at = {}, 0
        for name, array in arrays.items():
            fields[name] = Field(at, at + array.nbytes, array.shape, array.dtype)
            at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return Layout(fields, max(at, ALIGNMENT))

    @cached_property
    def record(self) -> np.dtype:
        """The buffer as one record, whose fields are the arrays: numpy writes a field in one call."""
        fields = self.fields
        formats = [(field.dtype, field.shape) for field in fields.values()]
        offsets = [field.start for field in fields.values()]
        return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": self.size})

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Tensors over a uint8 ``buffer``, which is not copied."""
        return {name: buffer[f.start : f.stop].view(_TYPES[f.dtype]).view(f.shape) for name, f in self.fields.items()}


def send(arrays: Mapping[str, np.ndarray], layout: Layout, buffer: Tensor, device: GraphDevice) -> None:
    """Write ``arrays``, which must fit ``layout``, to ``buffer`` by one copy that is not waited for."""
    host, raw = device.pinned(layout.size)
    held = raw.view(layout.record)  # of one record
    for name, field in layout.fields.items():
        array = arrays[name]
        assert array.shape == field.shape and array.dtype == field.dtype, (name, array.shape, field)
        held[name] = array
    buffer.copy_(host, non_blocking=True)


def put(arrays: Mapping[str, np.ndarray], device: GraphDevice) -> dict[str, Tensor]:
    """``arrays`` in fresh memory of the device, by one copy that is not waited for."""
    layout = Layout.of(arrays)
    buffer = torch.empty(layout.size, dtype=torch.uint8, device=device.torch)
    send(arrays, layout, buffer, device)
    return layout.views(buffer)


def fetch(tensors: Mapping[str, Tensor], device: GraphDevice) -> Fetched:
    """Start copying contiguous ``tensors`` to one piece of pinned memory."""
    if not tensors:
        return Fetched({}, device.mark())
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    host, raw = device.pinned(sum(sizes))
    arrays, at = {}, 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        stop = at + tensor.nbytes
        host[at:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        arrays[name] = raw[at:stop].view(_BACK[tensor.dtype]).reshape(tensor.shape)
        at += size
    return Fetched(arrays, device.mark())
