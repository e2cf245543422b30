"""How long something takes on a GPU: replays of a captured graph, so that launches cost what they cost when serving."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

ROTATED_BYTES = 512 << 20  # read between two readings of the same weights: ten times an H200's second-level cache
ROUNDS = 7
Run = Callable[[], object]


def copies(size: int, device: str) -> int:
    """How many copies of ``size`` bytes to go round, so that none is still in a cache when its turn comes."""
    return 2 if device == "cpu" else max(1, math.ceil(ROTATED_BYTES / max(size, 1)))


def seconds(runs: Sequence[Run], device: str) -> float:
    """Seconds of one of ``runs``, which are done in turn: the median round of several, the first left out.

    On a GPU a round is the replay of one graph of them all, at least 64. What a run needs must be warm: each runs once
    before. Raises what ``runs`` raise.
    """
    again = list(runs) * (1 if device == "cpu" else max(1, 64 // len(runs)))
    for run in runs:
        run()
    if device == "cpu":
        return _median(lambda: _all(again), time.perf_counter, lambda: None) / len(again)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        _all(again)
    found = []
    for _ in range(ROUNDS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # not timed: the GPU is busy while the one that is gets launched
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(found[1:]) / len(again)


def _all(runs: Sequence[Run]) -> None:
    for run in runs:
        run()


def _median(run: Run, clock: Callable[[], float], wait: Run) -> float:
    found = []
    for _ in range(3):
        start = clock()
        run()
        wait()
        found.append(clock() - start)
    return statistics.median(found)
