"""A model's layer for multi-token prediction, or an EAGLE layer, as a draft head: a model of one layer whose rows come
from outside: embeddings and hidden states, which are joined in float32. Each runner says how it runs such a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.models.spec import CacheGroup, MtpSpec, NormSpec
from toolkit.runners.base import MemoryNeed, RunnerError, RunnerOptions
from toolkit.runners.head import F32, Drawn, Rows
from toolkit.runners.step import NONE, SamplingBatch, StepBatch, StepOutput


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


class MtpHead:
    """``runner``: of ``spec.layer``, with the model's embedding and head; it gives embeddings too (``embed``)."""

    def __init__(self, spec: MtpSpec, runner: Any, name: str = "mtp") -> None:
        self.name, self.spec, self.runner = name, spec, runner
        self.width = spec.layer.hidden_size
        self._num_blocks: tuple[int, ...] = (0,)
        self._free: list[int] = []
        self._norms: dict[str, F32] = {}

    def memory(self) -> MemoryNeed:
        """Of the layer, and of the join in float32."""
        need, join = self.runner.memory(), self.spec.join
        weights: int = need.weights + 4 * join.in_features * join.out_features
        return replace(need, weights=weights)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Of a cache of its own."""
        found: tuple[CacheGroup, ...] = self.spec.layer.cache_groups
        return found

    def load(self, num_blocks: tuple[int, ...]) -> None:
        """Weights, and a cache of so many blocks. Raises RunnerError or MemoryError."""
        self._num_blocks = num_blocks
        self.wake()

    def wake(self) -> None:
        self.runner.load_weights()
        self.runner.allocate_cache(self._num_blocks)
        self._free = list(range(self._num_blocks[0]))
        self._norms = self.read()

    def release(self) -> None:
        self.runner.release_cache()
        self.runner.release_weights()
        self._norms = {}

    def close(self) -> None:
        self.runner.close()

    def read(self) -> dict[str, F32]:
        """Of the loaded model the norms of ``spec.norms()`` by name, offsets included; the join is held."""
        raise NotImplementedError

    def joined(self, x: F32) -> F32:
        """[rows, 2 hidden] → [rows, hidden] by the join."""
        raise NotImplementedError

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

    def fuse(self, states: F32) -> F32:
        """[rows, 1, hidden] of what the model's last layer gives → [rows, hidden], as the join reads them."""
        return self._rms(self._rms(states[:, 0], self.spec.model_norm), self.spec.state_norm)

    def step(self, ids: NDArray[np.int64], states: F32, rows: Sequence[Rows]) -> Drawn:
        """Rows of texts one after another, for which there is room: of each the token that came, [rows], and the state
        before it, [rows, hidden]. Of each text's last row what comes next. Raises RunnerError."""
        spec, size = self.spec, self.runner.options.block_size
        read = np.clip(ids, 0, spec.layer.vocab_size - 1).astype(np.int32)  # also those that stand for pictures
        words = self._rms(self.runner.embed(read), spec.token_norm)
        counts = np.array([r.count for r in rows], np.int32)
        starts = np.array([r.kept.length for r in rows], np.int32)
        cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        places = np.arange(cu[-1], dtype=np.int32) + np.repeat(starts - cu[:-1], counts)
        firsts = np.array([r.kept.first for r in rows], np.int32)
        table = np.full((len(rows), max(len(r.kept.blocks) for r in rows)), -1, np.int32)
        for i, r in enumerate(rows):
            if len(r.kept.blocks) * size < r.kept.length + r.count:
                raise RunnerError("mtp: no room for the rows of a text")
            table[i, : len(r.kept.blocks)] = r.kept.blocks
        blocks = table[np.repeat(np.arange(len(rows)), counts), places // size].astype(np.int64)
        last = cu[1:] - 1
        sampling = SamplingBatch.greedy(len(rows))
        sampling.logprobs[:] = 0
        out = self.runner.submit(
            StepBatch(
                token_ids=read,
                from_previous=np.full(len(ids), -1, np.int32),
                positions=(places + np.repeat(firsts, counts))[None],
                cu_seqlens=cu,
                seq_lens=starts + counts,
                block_tables=(table,),
                slot_mapping=(blocks * size + places % size,),
                rope_set=np.zeros(len(rows), np.int8),
                adapter=np.full(len(rows), -1, np.int32),
                sample_index=last,
                sampling=sampling,
                logits_index=last if spec.bare else NONE,
                hidden_index=last if spec.normed else NONE,
                aux_layers=() if spec.normed else (1,),
                aux_index=NONE if spec.normed else last,
                embeds=self.joined(np.concatenate([states, words] if spec.state_first else [words, states], 1)),
                embed_index=np.arange(len(ids), dtype=np.int32),
            )
        ).result()
        for r in rows:
            r.kept.length += r.count
        made = out.hidden if spec.normed else out.aux[:, 0]
        sure = self._unscaled(out, made) if spec.bare else np.exp(np.minimum(out.logprob[:, 0], 0.0))
        sure[out.bad_rows] = 0.0
        return Drawn(self._rms(made, spec.state_norm), out.tokens[:, 0].astype(np.int64), sure)

    def _unscaled(self, out: StepOutput, made: F32) -> F32:
        """The chances of the likeliest tokens, of logits before the final norm has scaled what they are of."""
        eps = np.float32(self.spec.layer.final_norm.eps)
        logits = out.logits * np.sqrt(np.square(made).mean(-1, keepdims=True) + eps)
        found: F32 = 1 / np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
        return found

    def _rms(self, x: F32, norm: NormSpec | None) -> F32:
        if norm is None:
            return x
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(norm.eps))
        return x / scale * self._norms[norm.name]
