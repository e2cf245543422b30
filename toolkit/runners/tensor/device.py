"""What a runner asks of its GPU beside tensors: pinned memory, marks in its stream, captured graphs, free memory.

Tests put another class with these methods in its place, so that everything else runs on a CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Replay = Callable[[], None]


class Mark(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""


class Device(Protocol):
    """``torch``: the device of tensors; ``capability``: compute capability as 80, 90 …, None where there is none."""

    torch: torch.device
    capability: int | None

    def working(self) -> Any:
        """A context; work started inside is done in order, and not waited for."""

    def pinned(self, size: int) -> tuple[Tensor, np.ndarray]:
        """``size`` bytes of host memory that the device reads and writes by itself, as a tensor and as an array.

        It is given out again only when copies from and to it are done and nobody holds it.
        """

    def mark(self) -> Mark: ...

    def pool(self) -> Any:
        """Memory for the results inside graphs, which are captured into it. It is spent once they are all gone."""

    def capture(self, run: Callable[[], None], pool: Any) -> Replay:
        """Record the device's work of ``run`` without doing it; what is returned does it, at the same addresses."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""

    def trim(self) -> None:
        """Give memory that is held in reserve back."""

    def trouble(self) -> type[Exception]:
        """What is raised where memory runs out."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: what it gives back (events, graphs, modules) must not go during a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaDevice:
    """A ``Device`` by torch. All work goes to one stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.torch = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        major, minor = torch.cuda.get_device_capability(self.torch)
        self.capability: int | None = 10 * major + minor
        self._stream = torch.cuda.Stream(self.torch)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, the runner's stream is current."""
        with torch.cuda.device(self.torch), torch.cuda.stream(self._stream):
            yield

    def pinned(self, size: int) -> tuple[Tensor, np.ndarray]:
        """From torch's caching allocator, which knows the copies that are under way."""
        held = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return held, held.numpy()

    def mark(self) -> Mark:
        """An event behind everything submitted so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def pool(self) -> Any:
        """A handle of torch's, which refuses a capture into one that had graphs and has none any more."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any) -> Replay:
        """A CUDA graph. Everything in it must have run before, so that nothing is compiled or set up on the way."""
        torch.cuda.synchronize(self.torch)
        graph = torch.cuda.CUDAGraph()
        with _no_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # that the capture was broken off says less than why
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def trouble(self) -> type[Exception]:
        return torch.cuda.OutOfMemoryError
