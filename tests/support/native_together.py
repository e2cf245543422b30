"""Ranks of the native runner in one process, for ``support.steps.Driver``."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.runners.native.runner import NativeRunner


class Together:
    """Ranks of one process, which run steps at the same time; each has a thread for that."""

    def __init__(self, runners: list[NativeRunner]) -> None:
        self.runners, self.spec, self.options = runners, runners[0].spec, runners[0].options

    def load_weights(self) -> None:
        for runner in self.runners:
            runner.load_weights()

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        for runner in self.runners:
            runner.allocate_cache(num_blocks)

    def look(self) -> None:
        """Ranks that are threads are there."""

    def submit(self, batch: Any) -> Any:
        handles = [runner.submit(batch) for runner in self.runners]
        outputs = [handle.result() for handle in handles]
        for other in outputs[1:]:
            assert vars(other).keys() == vars(outputs[0]).keys()
            for name, value in vars(outputs[0]).items():
                np.testing.assert_array_equal(getattr(other, name), value)
        handles[0].result = lambda: outputs[0]  # type: ignore[method-assign]
        return handles[0]

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
