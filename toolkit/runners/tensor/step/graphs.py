"""Steps as captured graphs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels import KernelError
from toolkit.runners.tensor.devices.device import GraphDevice, Replay
from toolkit.runners.tensor.step.inputs import DecodeArrays, GraphKey
from toolkit.runners.tensor.step.prompts import PromptArrays, PromptKey
from toolkit.runners.tensor.step.staging import Layout, send

log = logging.getLogger(__name__)
MOST_GRAPHS = 192  # kept; the ones that were not used for longest go

# The body of a step: it reads the views it is given, and returns logits where it does not draw.
Made = DecodeArrays | PromptArrays
Key = GraphKey | PromptKey
Body = Callable[[dict[str, Tensor], Any, Any], Tensor | None]


@dataclass(frozen=True)
class Graph:
    """``buffer`` is what the graph reads its step's arrays from; ``logits`` what it leaves, where it does not draw."""

    layout: Layout
    buffer: Tensor
    replay: Replay
    logits: Tensor | None


@dataclass
class Graphs:
    """Graphs by key, captured when a key comes for the first time; a device without them runs steps one by one.

    ``what``: the steps, in a warning; ``attends``: whether they do attention, whose tiles are known once one has run.
    Graphs share a pool for their intermediate results: what one leaves is overwritten by the next.
    """

    what: str
    device: GraphDevice
    attends: bool
    enabled: bool = True
    _graphs: OrderedDict[Key, Graph] = field(default_factory=OrderedDict)
    _pool: Any = None  # of the graphs that are captured next

    def keys(self) -> list[Key]:
        """What there are graphs for, the one used last at the end."""
        return list(self._graphs)

    def clear(self) -> None:
        """Forget all graphs, and the pool with them: something that they read or write has moved."""
        self._graphs.clear()
        self._pool = None

    def run(self, made: Made, body: Body) -> tuple[Tensor | None, Callable[[], None] | None]:
        """Submit a step: (its logits, where it does not draw; what captures it once its results are on their way).

        ``body``: of every step; it is not kept, for it holds who keeps this: cache and weights would outlive them.
        The second is None where the step was replayed.
        """
        key: Any = made.key()
        arrays = made.padded(key)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            send(arrays, graph.layout, graph.buffer, self.device)
            graph.replay()
            return graph.logits, None
        layout = Layout.of(arrays)
        buffer = torch.empty(layout.size, dtype=torch.uint8, device=self.device.torch)
        send(arrays, layout, buffer, self.device)
        logits = body(layout.views(buffer), made, key)
        capture = self.enabled and (bool(key.tiles) or not self.attends)  # it is known how attention cuts a step
        return logits, (lambda: self._capture(key, made, body, layout, buffer)) if capture else None

    def _capture(self, key: Key, made: Made, body: Body, layout: Layout, buffer: Tensor) -> None:
        views = layout.views(buffer)
        for last in (False, True):
            left: list[Tensor | None] = []
            if self._pool is None:
                self._pool = self.device.pool()
            try:
                replay = self.device.capture(lambda left=left: left.append(body(views, made, key)), self._pool)  # type: ignore[misc]
            except (RuntimeError, KernelError) as error:
                self._pool = None  # that of the graphs there are lives as long as they do
                self.device.trim()
                if last:
                    self._give_up(error)
            else:
                while len(self._graphs) >= MOST_GRAPHS:
                    self._graphs.popitem(last=False)
                self._graphs[key] = Graph(layout, buffer, replay, left[0])
                return

    def _give_up(self, error: Exception) -> None:
        """Run all steps kernel by kernel from now on."""
        self.enabled = False
        self.clear()
        why = "no memory is left" if isinstance(error, self.device.trouble()) else "the device refuses"
        log.warning("%s to capture %s: they run kernel by kernel (%s)", why, self.what, error)
