"""The GPU as the runner uses it: one stream, pinned memory, events, captured graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.runners.tensor.devices.device import Fetched, Mark, Replay
from toolkit.runners.tensor.step import staging


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
    """A ``GraphDevice`` by torch. All work goes to one stream of its own."""

    reserved = 512 << 20  # CUDA's own, compiled kernels, cuBLAS workspaces, the graphs' nodes
    dense = False

    def __init__(self, device: torch.device) -> None:
        self.torch = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
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

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """By one copy that is not waited for."""
        return staging.put(arrays, self)

    def fetch(self, tensors: Mapping[str, Tensor]) -> Fetched:
        """To one piece of pinned memory, behind the work so far."""
        return staging.fetch(tensors, self)

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
