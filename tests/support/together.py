"""Ranks as threads of this process: the same parts of a model and the same messages as processes have, sooner made."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from toolkit.parallel.layout import Layout
from toolkit.parallel.micro import layers_of_all
from toolkit.parallel.model import Model, RankRunner, open_whole
from toolkit.parallel.wire import digest
from toolkit.runners.base import RunnerOptions


class Together:
    """A runner of ranks for ``support.steps.Driver``; what they draw is compared after every step."""

    name, batch_invariant, asynchronous, device = "tensor", False, False, "several"

    def __init__(self, path: Path, layout: Layout, options: RunnerOptions, **how: Any) -> None:
        whole = open_whole(Model(str(path), options, how), layout)
        self.layout, world = layout, layout.world
        self.ranks = [RankRunner(whole, rank, layout, options, None) for rank in range(world)]
        self.spec, self.options = whole.spec, options
        self._threads = ThreadPoolExecutor(world)
        with tempfile.TemporaryDirectory() as folder:
            self._all(lambda rank: rank.group.join(Path(folder), 60))

    def _all(self, what: Any) -> list[Any]:
        return list(self._threads.map(what, self.ranks))

    def memory(self) -> Any:
        return self.ranks[0].memory()

    def load_weights(self) -> None:
        for rank in self.ranks:
            rank.load_weights()

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        for rank in self.ranks:
            rank.allocate_cache(num_blocks)

    def encode(self, pictures: Any) -> Any:
        return self.ranks[0].encode(pictures)

    def look(self) -> None:
        """Ranks that are threads are there."""

    def submit(self, batch: Any) -> Any:
        outputs = self._all(lambda rank: rank.run(batch, 1))
        tp = self.layout.tp
        stages = [outputs[i : i + tp] for i in range(0, len(outputs), tp)]
        assert all(len({digest(output) for output in stage}) == 1 for stage in stages)
        return Ready(layers_of_all([stage[0] for stage in stages]))

    def close(self) -> None:
        for rank in self.ranks:
            rank.group.leave()
            rank.close()
        self._threads.shutdown()


class Ready:
    def __init__(self, output: Any) -> None:
        self.output = output

    def result(self) -> Any:
        return self.output
