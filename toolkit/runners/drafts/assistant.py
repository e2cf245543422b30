"""A small model that drafts for a larger one and reads its cache, as a draft head: a runner has its layers, what stands
before and behind them is computed here in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.drafts.assistant import ORDERING, Assistant
from toolkit.models.spec import AssistantSpec
from toolkit.runners.base import MemoryNeed, RunnerError
from toolkit.runners.drafts.head import F32, I64, Drawn, Rows, chances, rms
from toolkit.runners.drafts.paged import stacked
from toolkit.runners.step import NONE, SamplingBatch, StepBatch

if TYPE_CHECKING:
    from toolkit.artifacts.checkpoint import Checkpoint


@dataclass
class Seen:
    """Of one text ``first``, the place of its newest token, and the blocks that hold all before it: of each cache group
    a row of the larger model's block table."""

    first: int
    tables: tuple[NDArray[np.int32], ...] = ()
    length: int = 0
    nbytes: int = 0


class Outer(NamedTuple):
    """Numbers outside of the layers: ``join`` [2 width, hidden] and ``back`` [hidden, width]; ``norm``, the larger
    model's final one, and its ``eps``; where clusters are chosen ``words`` [clusters, tokens of each, hidden], as they
    are stored, and their ids ``order`` [clusters, tokens of each]."""

    join: F32
    back: F32
    norm: F32
    eps: float
    words: Callable[[I64], F32] | None = None
    order: I64 = np.zeros((0, 0), np.int64)


def outer_bytes(found: Assistant, checkpoint: Checkpoint) -> int:
    """Of what ``outer_of`` gives: words as they are stored, matrices in float32."""
    words = checkpoint.info(f"{found.words}.weight").nbytes if found.spec.chosen else 0
    return words + 4 * sum(x.in_features * x.out_features for x in (found.spec.join, found.spec.back))


def outer_of(found: Assistant, checkpoint: Checkpoint, norm: F32) -> Outer:
    """What stands outside of the layers; ``norm``: of the larger model. Raises RunnerError where the order of tokens is
    none."""
    spec = found.spec
    join, back = (checkpoint.tensor(f"{x.name}.weight").float().numpy().T.copy() for x in (spec.join, spec.back))
    if not spec.chosen:
        return Outer(join, back, norm, spec.model_norm.eps)
    order, words = checkpoint.tensor(ORDERING).long(), checkpoint.tensor(f"{found.words}.weight")
    if not bool((order.sort().values == torch.arange(len(order))).all()):
        raise RunnerError(f"{ORDERING}: expected each of {len(order)} tokens once")
    order = order.view(spec.layer.vocab_size, -1)
    rows = words[order]  # of a cluster one behind the other, so that few pages are read
    return Outer(join, back, norm, spec.model_norm.eps, lambda chosen: rows[chosen].float().numpy(), order.numpy())


class AssistantHead:
    """``runner``: of ``spec.layer``, which reads the cache of ``target``, whose embeddings it is given; ``outer``:
    of ``nbytes``, called at every load. Implements ``Reader``, for texts that are ``Seen``."""

    name = "mtp"

    def __init__(self, spec: AssistantSpec, runner: Any, target: Any, outer: Callable[[], Outer], nbytes: int) -> None:
        self.spec, self.runner, self.width = spec, runner, spec.join.in_features // 2
        self._target, self._read, self._nbytes = target, outer, nbytes
        self._outer: Outer | None = None

    # -- memory

    def memory(self) -> MemoryNeed:
        """Of the layers and of what stands outside of them; a cache of its own it has none."""
        need: MemoryNeed = self.runner.memory()
        return replace(need, weights=need.weights + self._nbytes, block_bytes=())

    @property
    def groups(self) -> tuple[()]:
        """Of a cache of its own."""
        return ()

    def load(self, num_blocks: tuple[int, ...]) -> None:
        """Weights; the larger model's are there. Raises RunnerError or MemoryError."""
        self.wake()

    def wake(self) -> None:
        self.runner.load_weights()
        self._outer = self._read()

    def release(self) -> None:
        self.runner.release_cache()
        self.runner.release_weights()
        self._outer = None

    def close(self) -> None:
        self.runner.close()

    # -- texts

    def open(self, first: int) -> Seen:
        return Seen(first)

    def grow(self, text: Seen, count: int) -> bool:
        return True

    def forget(self, text: Seen) -> None:
        """It keeps nothing."""

    # -- steps

    def fuse(self, states: F32) -> F32:
        """[rows, 1, width] of what the larger model's last layer gives → [rows, width] behind its final norm."""
        outer = self._loaded()
        return rms(states[:, 0], outer.norm, outer.eps)

    def step(self, ids: I64, states: F32, rows: Sequence[Rows]) -> Drawn:
        """Of each text the newest token, or one that was drawn behind it, [texts], and the state before that one,
        [texts, width]. Raises RunnerError."""
        outer, n = self._loaded(), len(rows)
        lengths = np.array([r.kept.first for r in rows], np.int32)
        words = self._target.embed(np.clip(ids, 0, self._target.spec.vocab_size - 1).astype(np.int32))
        all_rows = np.arange(n, dtype=np.int32)
        clusters, none = self.spec.chosen > 0, np.zeros(n, np.int64)
        sampling = SamplingBatch.greedy(0 if clusters else n)
        sampling.logprobs[:] = 0
        out = self.runner.submit(
            StepBatch(
                token_ids=np.zeros(n, np.int32),
                from_previous=np.full(n, -1, np.int32),
                positions=lengths[None],
                cu_seqlens=np.arange(n + 1, dtype=np.int32),
                seq_lens=lengths,  # the tokens that are read; the newest is not among them
                block_tables=tuple(stacked([r.kept.tables[g] for r in rows]) for g in range(len(rows[0].kept.tables))),
                slot_mapping=(none,) * len(rows[0].kept.tables),  # nothing is written
                rope_set=np.zeros(n, np.int8),
                adapter=np.full(n, -1, np.int32),
                sample_index=NONE if clusters else all_rows,
                sampling=sampling,
                logits_index=all_rows if clusters else NONE,
                hidden_index=all_rows,
                embeds=np.concatenate([words, states], 1) @ outer.join,
                embed_index=all_rows,
            )
        ).result()
        back = out.hidden @ outer.back
        if clusters:
            return Drawn(back, *self._among(out.logits, out.hidden, outer))
        return Drawn(back, out.tokens[:, 0].astype(np.int64), chances(out))

    def _among(self, logits: F32, hidden: F32, outer: Outer) -> tuple[I64, F32]:
        """The likeliest tokens of the clusters that ``logits`` [texts, clusters] choose, and their chances there."""
        assert outer.words is not None
        tokens, sure = np.zeros(len(logits), np.int64), np.zeros(len(logits), np.float32)
        for i, row in enumerate(logits):
            chosen = np.argpartition(row, -self.spec.chosen)[-self.spec.chosen :]
            found = outer.words(chosen).reshape(-1, hidden.shape[1]) @ hidden[i]
            best = int(found.argmax())
            tokens[i] = outer.order[chosen].ravel()[best]
            total = np.exp(found - found[best]).sum()
            sure[i] = 1 / total if np.isfinite(total) else 0.0
        return tokens, sure

    def _loaded(self) -> Outer:
        if self._outer is None:
            raise RunnerError("mtp: the assistant has no weights")
        return self._outer
