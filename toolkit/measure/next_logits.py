"""Logits of a text straight from a runner, without an engine around it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.runners.base import Runner, RunnerError
from toolkit.runners.step import NONE, SamplingBatch, StepBatch


def make_ready(runner: Runner, tokens: int) -> None:
    """Load the weights, and a cache for one text of ``tokens`` tokens. Raises ToolkitError where the runner cannot."""
    try:
        runner.load_weights()
        runner.allocate_cache((-(-tokens // runner.options.block_size),) * len(runner.spec.cache_groups))
    except RunnerError as error:
        raise ToolkitError(f"the {runner.name} runner cannot start: {error}") from error


def next_logits(
    runner: Runner, ids: NDArray[np.int32], cached: int = 0, rows: int | None = None
) -> NDArray[np.float32]:
    """Run ``ids`` in one step behind ``cached`` tokens of the same text that were run before. Logits [rows, vocabulary]
    of the first ``rows`` of them, None = of all. Raises ToolkitError where the runner cannot.
    """
    count, stop = len(ids), cached + len(ids)
    states = [group.kind == "state" for group in runner.spec.cache_groups]
    slot = np.array([[0 if cached else -1, 0]], np.int32)
    blocks = np.arange(-(-stop // runner.options.block_size), dtype=np.int32)[None]
    batch = StepBatch(
        token_ids=np.ascontiguousarray(ids),
        from_previous=np.full(count, -1, np.int32),
        positions=np.arange(cached, stop, dtype=np.int32)[None],
        cu_seqlens=np.array([0, count], np.int32),
        seq_lens=np.array([stop], np.int32),
        block_tables=tuple(slot if state else blocks for state in states),
        slot_mapping=tuple(np.arange(0 if state else cached, 0 if state else stop, dtype=np.int64) for state in states),
        rope_set=np.zeros(1, np.int8),
        adapter=np.full(1, -1, np.int32),
        sample_index=NONE,
        sampling=SamplingBatch.greedy(0),
        logits_index=np.arange(count if rows is None else rows, dtype=np.int32),
    )
    try:
        return runner.submit(batch).result().logits
    except RunnerError as error:
        raise ToolkitError(f"the model failed on the text: {error}") from error
