"""The second of two machines, as a thread of the test: it runs its ranks for the first one, at the loopback address."""

from __future__ import annotations

import threading

from toolkit.errors import ToolkitError
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.nodes import Nodes, serve


class Second:
    """``told``: what it says. It serves ``tp`` ranks in all, half of them its own."""

    def __init__(self, model: Model, port: int, tp: int = 2, host: str = "127.0.0.1") -> None:
        self._error = ""
        self.told: list[str] = []
        told = model, Layout(tp=tp), Nodes(2, 1, host, port)
        self._thread = threading.Thread(target=self._run, args=told, daemon=True)
        self._thread.start()

    def _run(self, model: Model, layout: Layout, nodes: Nodes) -> None:
        try:
            serve(model, layout, nodes, self.told.append)
        except ToolkitError as e:
            self._error = str(e)

    def end(self) -> str:
        """What it ended with, "" where all went well."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._error
