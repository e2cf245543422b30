"""What draft heads have in common whose layers a runner computes, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.step import SamplingBatch, StepBatch


@dataclass
class Text:
    """Of one text what is cached: of its rows ``first``, ``first`` + 1 … the first ``length``, in ``blocks``."""

    first: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    nbytes: int = 0  # outside the cache


def options_of(target: RunnerOptions) -> RunnerOptions:
    """How the layer runs beside a model that runs so."""
    return replace(target, adapters=(), adapter_memory=0, kv_layers=(), key_means="")


def stacked(rows: Sequence[Sequence[int] | NDArray[np.int32]]) -> NDArray[np.int32]:
    """Rows of a block table one below the other, -1 behind their ends."""
    table = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table


class PagedHead:
    """``runner``: of the layers, a model that attends, with the embedding and head of a larger one. A text has the same
    blocks in all of its cache groups."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._num_blocks: tuple[int, ...] = (0,)
        self._free: list[int] = []

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Of a cache of its own, which keeps all of a text."""
        found: tuple[CacheGroup, ...] = self.runner.spec.cache_groups
        return tuple(replace(group, kind="full", window=None) for group in found)

    def load(self, num_blocks: tuple[int, ...]) -> None:
        """Weights, and a cache of so many blocks. Raises RunnerError or MemoryError."""
        self._num_blocks = num_blocks
        self.wake()

    def wake(self) -> None:
        self.runner.load_weights()
        self.runner.allocate_cache(self._num_blocks)
        self._free = list(range(min(self._num_blocks)))

    def release(self) -> None:
        self.runner.release_cache()
        self.runner.release_weights()

    def close(self) -> None:
        self.runner.close()

    # -- texts

    def open(self, first: int) -> Text:
        return Text(first)

    def grow(self, text: Text, count: int) -> bool:
        size = self.runner.options.block_size
        need = -(-(text.length + count) // size) - len(text.blocks)
        if need > len(self._free):
            return False
        text.blocks += [self._free.pop() for _ in range(need)]
        return True

    def forget(self, text: Text) -> None:
        self._free += text.blocks
        text.blocks, text.length = [], 0

    # -- steps

    def batch(self, ids: NDArray[np.int32], texts: Sequence[Text], counts: Sequence[int], back: int = 0) -> StepBatch:
        """Of each text so many rows behind its last, for which there is room, of tokens ``ids``; nothing is drawn.
        ``back``: places by which a row's position lies before its number. Raises RunnerError."""
        size, seqs = self.runner.options.block_size, len(texts)
        news = np.array(counts, np.int32)
        starts = np.array([text.length for text in texts], np.int32)
        cu = np.concatenate([[0], np.cumsum(news)]).astype(np.int32)
        places = np.arange(cu[-1], dtype=np.int32) + np.repeat(starts - cu[:-1], news)
        firsts = np.array([text.first - back for text in texts], np.int32)
        if any(len(text.blocks) * size < text.length + count for text, count in zip(texts, counts, strict=True)):
            raise RunnerError("draft head: no room for the rows of a text")
        table = stacked([text.blocks for text in texts])
        groups = len(self.runner.spec.cache_groups)
        blocks = table[np.repeat(np.arange(seqs), news), places // size].astype(np.int64)
        return StepBatch(
            token_ids=ids,
            from_previous=np.full(len(ids), -1, np.int32),
            positions=(places + np.repeat(firsts, news))[None],
            cu_seqlens=cu,
            seq_lens=starts + news,
            block_tables=(table,) * groups,
            slot_mapping=(blocks * size + places % size,) * groups,
            rope_set=np.zeros(seqs, np.int8),
            adapter=np.full(seqs, -1, np.int32),
            sample_index=np.zeros(0, np.int32),
            sampling=SamplingBatch.greedy(0),
        )

    @staticmethod
    def drawing(batch: StepBatch, rows: NDArray[np.int32]) -> StepBatch:
        """The same, of which the likeliest tokens of flat tokens ``rows`` are drawn, with their log-probabilities."""
        sampling = SamplingBatch.greedy(len(rows))
        sampling.logprobs[:] = 0
        return replace(batch, sample_index=rows, sampling=sampling)
