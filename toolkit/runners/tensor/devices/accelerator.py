"""Devices beside CPUs and CUDA: those that torch knows by a module of their own, and those that packages bring.

``mps`` and ``xpu`` are torch's; ``npu`` and others come with an extension of torch. All run kernel by kernel with
torch's ops. A package says more of its device by an entry point: see docs/how-to/add-a-device.md.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.runners.host_memory import free_host_bytes, host_bytes
from toolkit.runners.tensor.devices.device import Device, Done, Fetched

GROUP = "toolkit.devices"  # of entry points: name as torch has it = "package.module:DEVICE"


class Accelerator:
    """A ``Device`` by what torch's modules of devices have in common. Steps are waited for."""

    reserved = 0
    dense = True  # torch's products want floating point

    def __init__(self, device: torch.device) -> None:
        self.torch = torch.device(device.type, device.index or 0)
        self._module = torch.get_device_module(self.torch)

    def working(self) -> AbstractContextManager[object]:
        """Inside, it is the current one of its type."""
        current = getattr(self._module, "device", None)
        return nullcontext() if current is None else current(self.torch.index)

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array).to(self.torch) for name, array in arrays.items()}

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        return Fetched({name: tensor.cpu().numpy() for name, tensor in tensors.items()}, Done())

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; the host's where the device tells nothing of its own."""
        if hasattr(self._module, "mem_get_info"):
            free, total = self._module.mem_get_info(self.torch.index)
            return int(free), int(total)
        if hasattr(self._module, "recommended_max_memory"):  # mps, which shares the host's
            total = int(self._module.recommended_max_memory())
            return max(0, min(total - int(self._module.driver_allocated_memory()), free_host_bytes())), total
        return free_host_bytes(), host_bytes()

    def trim(self) -> None:
        getattr(self._module, "empty_cache", lambda: None)()

    def trouble(self) -> type[Exception]:
        return torch.OutOfMemoryError


def why_absent(device: torch.device) -> str | None:
    """Why torch has no such device here, or None where it has."""
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError:
        return f"this torch has no module for {device.type}; install the extension of torch that brings it"
    if not module.is_available():
        return f"torch sees no {device.type} here"
    count = module.device_count()
    return None if (device.index or 0) < count else f"there are {count} of {device.type}, counted from 0"


@dataclass(frozen=True)
class Link:
    """How ranks on a type of device speak. ``open(store, host, rank, world, seconds)``: a group of so many, as torch's
    ``Backend`` with allreduce, allgather, alltoall_base, send, recv and abort, of tensors on the device; they meet at
    ``store``, a message may take ``seconds``. ``queued``: messages run behind the device's other work, so that waiting
    for one orders that work and tells of no failure; a message whose other end is gone lasts until ``abort``.
    """

    name: str
    open: Callable[[Any, str, int, int, float], Any]
    queued: bool = False


@dataclass(frozen=True)
class DeviceKind:
    """What is known of a type of device. ``known_as``: in a few words. ``open``: makes what the runner works with, of
    a device that is there; ``absent``: why one is not, one line, or None. ``ranks``: how several speak, None: they do
    not.
    """

    known_as: str
    open: Callable[[torch.device], Device] = Accelerator
    absent: Callable[[torch.device], str | None] = why_absent
    ranks: Link | None = None


OURS = ("cpu", "cuda")  # which no package brings: their looking-up is spared, which takes 10 ms


def kind_of(name: str) -> DeviceKind:
    """The kind that a package brings under ``name``, which is then imported, else what torch tells of it.

    Raises UsageError, one line, for a package whose entry point does not hold one.
    """
    if name in OURS:
        return DeviceKind(f"torch's {name}")
    for entry in importlib.metadata.entry_points(group=GROUP, name=name):
        where = f"device {name!r}: entry point {entry.value} of {entry.dist and entry.dist.name}"
        try:
            kind = entry.load()
        except Exception as error:
            told = " ".join(str(error).split()) or "no reason given"
            raise UsageError(f"{where}: {type(error).__name__}: {told}; mend or remove the package") from error
        if not isinstance(kind, DeviceKind):
            raise UsageError(
                f"{where}: found {type(kind).__name__}, expected a DeviceKind (docs/how-to/add-a-device.md)"
            )
        return kind
    return DeviceKind(f"torch's {name}")


def names() -> Iterator[str]:
    """Types of devices to look for here: those of packages, and the one that this torch is built for; CUDA aside."""
    brought = sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})
    yield from brought
    own = torch.accelerator.current_accelerator()
    if own is not None and own.type not in (*brought, "cuda"):
        yield own.type
