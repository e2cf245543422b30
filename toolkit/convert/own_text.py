"""Text that a model writes by itself, through the native runner alone: what its cache's precision is measured on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toolkit.measure.next_logits import texts_batch
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
    sampling = SamplingBatch.greedy(texts)
    sampling.temperature[:] = 1.0
    sampling.seed[:] = SEED + np.arange(texts)
    sampling.position[:] = cached + count
    last = ((np.arange(texts) + 1) * count - 1).astype(np.int32)
    return replace(texts_batch(runner, ids, cached, each), sample_index=last, sampling=sampling)
