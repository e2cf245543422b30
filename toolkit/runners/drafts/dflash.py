"""A draft model that guesses a block of tokens in one pass, as a draft head: a runner has its layers, and the join that
stands before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.models.spec import DFlashSpec
from toolkit.runners.base import MemoryNeed, RunnerError
from toolkit.runners.drafts.head import F32, I64, Join, Rows, chances, rms
from toolkit.runners.drafts.paged import PagedHead, Text
from toolkit.runners.step import StepBatch


class Own(NamedTuple):
    """A vocabulary of its own: ``ids``, in the model's, of each token; ``words`` gives the model's embeddings."""

    ids: I64
    words: Callable[[NDArray[np.int32]], F32]


class DFlashHead(PagedHead):
    """``runner``: of ``spec.layer``, with the model's embedding and head, or the head of a vocabulary of its ``own``;
    ``read``: called at every load, the join, of ``nbytes``, and the norm's weights. Of a text row i is of the states at
    place i - 1, as of other heads."""

    name = "dflash"

    def __init__(
        self,
        spec: DFlashSpec,
        runner: Any,
        read: Callable[[], tuple[Join, F32]],
        nbytes: int,
        own: Own | None = None,
    ) -> None:
        super().__init__(runner)
        self.spec, self.width = spec, spec.layer.hidden_size
        self._read, self._nbytes, self._own = read, nbytes, own
        self._join: Join | None = None
        self._norm: F32 = np.zeros(0, np.float32)

    def memory(self) -> MemoryNeed:
        """Of the layers, and of the join."""
        need: MemoryNeed = self.runner.memory()
        return replace(need, weights=need.weights + self._nbytes)

    def wake(self) -> None:
        super().wake()
        self._join, self._norm = self._read()

    def release(self) -> None:
        super().release()
        self._join = None

    def fuse(self, states: F32) -> F32:
        """[rows, taps, hidden] of the model's hidden states → [rows, hidden], of which keys and values are made."""
        if self._join is None:
            raise RunnerError("dflash: the draft has no weights")
        return rms(self._join(states.reshape(len(states), -1)), self._norm, self.spec.norm.eps)

    def grow(self, text: Text, count: int) -> bool:
        """Make room for ``count`` rows more, and the block behind them."""
        return super().grow(text, count + self.spec.block)

    def read(self, states: F32, rows: Sequence[Rows]) -> None:
        """Keep keys and values of rows of texts one after another, for which there is room: ``states`` [rows, hidden],
        fused. Raises RunnerError."""
        texts, ids = [r.kept for r in rows], np.zeros(len(states), np.int32)
        batch = self.batch(ids, texts, [r.count for r in rows], back=1)
        self.runner.submit(
            replace(batch, fills=True, embeds=states, embed_index=np.arange(len(ids), dtype=np.int32))
        ).result()
        for r in rows:
            r.kept.length += r.count

    def guess(self, newest: Sequence[int], texts: Sequence[Text], count: int) -> tuple[I64, F32]:
        """Of each text the ``count`` likeliest tokens behind its newest one, and their chances by the model, both
        [texts, count]. Raises RunnerError."""
        size = 1 + count
        read = np.full((len(texts), size), self.spec.mask, np.int32)
        read[:, 0] = newest
        batch = self._reading(read.ravel(), texts, size)
        starts = batch.cu_seqlens[:-1]
        masks = (starts[:, None] + np.arange(1, size, dtype=np.int32)).ravel().astype(np.int32)
        each = np.arange(len(texts), dtype=np.int32)
        mutual = np.stack([starts, batch.cu_seqlens[1:], each], 1).astype(np.int32)
        out = self.runner.submit(replace(self.drawing(batch, masks), mutual=mutual)).result()
        shape, tokens = (len(texts), count), out.tokens[:, 0].astype(np.int64)
        return (tokens if self._own is None else self._own.ids[tokens]).reshape(shape), chances(out).reshape(shape)

    def _reading(self, ids: NDArray[np.int32], texts: Sequence[Text], size: int) -> StepBatch:
        """Of each text ``size`` tokens of the model's behind its last row."""
        counts = [size] * len(texts)
        if self._own is None:
            return self.batch(np.clip(ids, 0, self.spec.layer.vocab_size - 1), texts, counts, back=1)
        batch = self.batch(np.zeros_like(ids), texts, counts, back=1)
        return replace(batch, embeds=self._own.words(ids), embed_index=np.arange(len(ids), dtype=np.int32))
