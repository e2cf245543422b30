"""What the runner asks of its device beside tensors, and the CPU's answers; ``cuda_device`` has those of a GPU,
``accelerator`` those of all others.

Tests put another class with the methods of ``GraphDevice`` in a GPU's place, so that everything else runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.runners.host_memory import free_host_bytes, host_bytes

Replay = Callable[[], None]


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


@dataclass(frozen=True)
class Fetched:
    """Tensors on their way to the host. ``arrays``: valid once ``mark`` is reached."""

    arrays: dict[str, np.ndarray]
    mark: Mark


class Device(Protocol):
    """``torch``: the device of tensors. ``reserved``: bytes that it needs beside tensors. ``dense``: whether quantized
    weights run faster there once they are floating point.
    """

    torch: torch.device
    reserved: int
    dense: bool

    def working(self) -> AbstractContextManager[object]:
        """A context; work started inside is done in order."""

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """A step's arrays as tensors on the device."""

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        """Start bringing contiguous tensors back."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""

    def trim(self) -> None:
        """Give memory that is held in reserve back."""

    def trouble(self) -> type[Exception]:
        """What is raised where memory runs out."""


class GraphDevice(Device, Protocol):
    """A device that steps are submitted to without waiting, and that captures graphs."""

    def pinned(self, size: int) -> tuple[Tensor, np.ndarray]:
        """``size`` bytes of host memory that the device reads and writes by itself, as a tensor and as an array.

        It is given out again only when copies from and to it are done and nobody holds it.
        """

    def mark(self) -> Mark: ...

    def pool(self) -> Any:
        """Memory for the results inside graphs, which are captured into it. It is spent once they are all gone."""

    def capture(self, run: Callable[[], None], pool: Any) -> Replay:
        """Record the device's work of ``run`` without doing it; what is returned does it, at the same addresses."""


class Done:
    """The ``Mark`` of work that has ended when the call returns."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


class Cpu:
    """The ``Device`` whose tensors are the host's arrays: nothing is copied."""

    torch = torch.device("cpu")
    reserved = 0
    dense = True

    def working(self) -> AbstractContextManager[object]:
        return nullcontext()

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        return Fetched({name: tensor.numpy() for name, tensor in tensors.items()}, Done())

    def memory(self) -> tuple[int, int]:
        return free_host_bytes(), host_bytes()

    def trim(self) -> None:
        """Nothing is held."""

    def trouble(self) -> type[Exception]:
        return MemoryError
