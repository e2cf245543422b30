"""Texts run by a runner itself, without an engine around it, and their logits."""

from __future__ import annotations

from dataclasses import replace

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
    batch = texts_batch(runner, ids[None], cached, -(-(cached + len(ids)) // runner.options.block_size))
    wanted = np.arange(len(ids) if rows is None else rows, dtype=np.int32)
    try:
        return runner.submit(replace(batch, logits_index=wanted)).result().logits
    except RunnerError as error:
        raise ToolkitError(f"the model failed on the text: {error}") from error


def texts_batch(runner: Runner, ids: NDArray[np.int32], cached: int, each: int) -> StepBatch:
    """A step of the texts ``ids`` [texts, tokens], ``cached`` tokens of each of which were run before. Each text has
    ``each`` blocks of the cache. Nothing is asked for: neither tokens nor logits."""
    texts, count = ids.shape
    stop = cached + count
    at = np.arange(cached, stop, dtype=np.int64)
    blocks = np.arange(texts * each, dtype=np.int32).reshape(texts, each)
    slots = (np.arange(texts, dtype=np.int64)[:, None] * each * runner.options.block_size + at).ravel()
    states = [group.kind == "state" for group in runner.spec.cache_groups]
    own = np.arange(texts, dtype=np.int32)
    state = np.stack([own if cached else np.full(texts, -1, np.int32), own], axis=1)
    return StepBatch(
        token_ids=np.ascontiguousarray(ids.ravel()),
        from_previous=np.full(texts * count, -1, np.int32),
        positions=np.tile(at.astype(np.int32), texts)[None],
        cu_seqlens=(np.arange(texts + 1) * count).astype(np.int32),
        seq_lens=np.full(texts, stop, np.int32),
        block_tables=tuple(state if is_state else blocks for is_state in states),
        slot_mapping=tuple(np.zeros(0, np.int64) if is_state else slots for is_state in states),
        rope_set=np.zeros(texts, np.int8),
        adapter=np.full(texts, -1, np.int32),
        sample_index=NONE,
        sampling=SamplingBatch.greedy(0),
    )
