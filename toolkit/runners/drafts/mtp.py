"""A model's layer for multi-token prediction, or an EAGLE layer, as a draft head: a model of one layer whose rows come
from outside: embeddings and hidden states, which are joined. Each runner says how it runs such a model, and the join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.models.spec import MtpSpec, NormSpec
from toolkit.runners.base import MemoryNeed, RunnerError
from toolkit.runners.drafts.head import F32, Drawn, Join, Rows, chances, rms
from toolkit.runners.drafts.paged import PagedHead
from toolkit.runners.step import NONE, StepOutput


class MtpHead(PagedHead):
    """``runner``: of ``spec.layer``, with the model's embedding and head; it gives embeddings too (``embed``)."""

    def __init__(self, spec: MtpSpec, runner: Any, name: str = "mtp") -> None:
        super().__init__(runner)
        self.name, self.spec, self.width = name, spec, spec.layer.hidden_size
        self._norms: dict[str, F32] = {}
        self._join: Join | None = None

    def memory(self) -> MemoryNeed:
        """Of the layer, and of the join."""
        need: MemoryNeed = self.runner.memory()
        return replace(need, weights=need.weights + self.join_bytes())

    def wake(self) -> None:
        super().wake()
        self._norms, self._join = self.read()

    def release(self) -> None:
        super().release()
        self._norms, self._join = {}, None

    def read(self) -> tuple[dict[str, F32], Join]:
        """Of the loaded model the norms of ``spec.norms()`` by name, offsets included, and the join."""
        raise NotImplementedError

    def join_bytes(self) -> int:
        """Of the join in memory."""
        raise NotImplementedError

    # -- steps

    def fuse(self, states: F32) -> F32:
        """[rows, 1, hidden] of what the model's last layer gives → [rows, hidden], as the join reads them."""
        return self._rms(self._rms(states[:, 0], self.spec.model_norm), self.spec.state_norm)

    def step(self, ids: NDArray[np.int64], states: F32, rows: Sequence[Rows]) -> Drawn:
        """Rows of texts one after another, for which there is room: of each the token that came, [rows], and the state
        before it, [rows, hidden]. Of each text's last row what comes next. Raises RunnerError."""
        spec, join = self.spec, self._join
        if join is None:
            raise RunnerError(f"{self.name}: the layer has no weights")
        read = np.clip(ids, 0, spec.layer.vocab_size - 1).astype(np.int32)  # also those that stand for pictures
        words = self._rms(self.runner.embed(read), spec.token_norm)
        batch = self.batch(read, [r.kept for r in rows], [r.count for r in rows])
        last = batch.cu_seqlens[1:] - 1
        batch = replace(
            self.drawing(batch, last),
            logits_index=last if spec.bare else NONE,
            hidden_index=last if spec.normed else NONE,
            aux_layers=() if spec.normed else (1,),
            aux_index=NONE if spec.normed else last,
            embeds=join(np.concatenate([states, words] if spec.state_first else [words, states], 1)),
            embed_index=np.arange(len(ids), dtype=np.int32),
        )
        out = self.runner.submit(batch).result()
        for r in rows:
            r.kept.length += r.count
        made = out.hidden if spec.normed else out.aux[:, 0]
        sure = self._unscaled(out, made) if spec.bare else chances(out)
        sure[out.bad_rows] = 0.0
        return Drawn(self._rms(made, spec.state_norm), out.tokens[:, 0].astype(np.int64), sure)

    def _unscaled(self, out: StepOutput, made: F32) -> F32:
        """The chances of the likeliest tokens, of logits before the final norm has scaled what they are of."""
        eps = np.float32(self.spec.layer.final_norm.eps)
        logits = out.logits * np.sqrt(np.square(made).mean(-1, keepdims=True) + eps)
        found: F32 = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        return found

    def _rms(self, x: F32, norm: NormSpec | None) -> F32:
        return x if norm is None else rms(x, self._norms[norm.name], norm.eps)
