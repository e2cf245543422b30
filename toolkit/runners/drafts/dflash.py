"""A draft model that guesses a block of tokens in one pass, as a draft head: a runner has its layers, and the join that
stands before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.models.spec import DFlashSpec
from toolkit.runners.base import MemoryNeed, RunnerError
from toolkit.runners.drafts.head import F32, I64, Join, Rows, chances, rms
from toolkit.runners.drafts.paged import PagedHead, Text


class DFlashHead(PagedHead):
    """``runner``: of ``spec.layer``, with the model's embedding and head; ``read``: called at every load, the join, of
    ``nbytes``, and the norm's weights. Of a text row i is of the states at place i - 1, as of other heads."""

    name = "dflash"

    def __init__(self, spec: DFlashSpec, runner: Any, read: Callable[[], tuple[Join, F32]], nbytes: int) -> None:
        super().__init__(runner)
        self.spec, self.width = spec, spec.layer.hidden_size
        self._read, self._nbytes = read, nbytes
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
        read[:, 0] = np.clip(newest, 0, self.spec.layer.vocab_size - 1)
        batch = self.batch(read.ravel(), texts, [size] * len(texts), back=1)
        starts = batch.cu_seqlens[:-1]
        masks = (starts[:, None] + np.arange(1, size, dtype=np.int32)).ravel().astype(np.int32)
        each = np.arange(len(texts), dtype=np.int32)
        mutual = np.stack([starts, batch.cu_seqlens[1:], each], 1).astype(np.int32)
        out = self.runner.submit(replace(self.drawing(batch, masks), mutual=mutual)).result()
        shape = len(texts), count
        return out.tokens[:, 0].astype(np.int64).reshape(shape), chances(out).reshape(shape)
