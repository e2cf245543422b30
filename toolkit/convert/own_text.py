"""Text that a model writes by itself, through the native runner alone: what its cache's precision is measured on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.runners.base import Runner
from toolkit.runners.step import SamplingBatch, StepBatch

Ids = NDArray[np.int32]
SEED = 42


def write_on(runner: Runner, starts: Ids, length: int) -> Ids:
    """Each row of ``starts`` [texts, tokens] gone on with to ``length`` tokens, drawn as the model has them, all side
    by side. The runner has its weights. RunnerError passes through."""
    texts, stop = starts.shape
    each = -(-length // runner.options.block_size)
    runner.allocate_cache((texts * each,) * len(runner.spec.cache_groups))
    found = np.zeros((texts, length), np.int32)
    found[:, :stop] = starts
    done = 0
    while stop < length:
        output = runner.submit(_batch(runner, found[:, done:stop], done, each)).result()
        found[:, stop] = output.tokens[:, 0]
        done, stop = stop, stop + 1
    return found


def _batch(runner: Runner, ids: Ids, cached: int, each: int) -> StepBatch:
    """One step of rows of ``ids`` behind ``cached`` tokens each; of each row the next token is drawn."""
    texts, count = ids.shape
    size, stop = runner.options.block_size, cached + count
    at = np.arange(cached, stop, dtype=np.int64)
    blocks = np.arange(texts * each, dtype=np.int32).reshape(texts, each)
    slots = (np.arange(texts, dtype=np.int64)[:, None] * each * size + at).ravel()
    states = [group.kind == "state" for group in runner.spec.cache_groups]
    own = np.arange(texts, dtype=np.int32)
    state = np.stack([own if cached else np.full(texts, -1, np.int32), own], axis=1)
    sampling = SamplingBatch.greedy(texts)
    sampling.temperature[:] = 1.0
    sampling.seed[:] = SEED + np.arange(texts)
    sampling.position[:] = stop
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
        sample_index=((np.arange(texts) + 1) * count - 1).astype(np.int32),
        sampling=sampling,
    )
