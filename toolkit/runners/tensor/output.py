"""The rows that a step was asked for: sampled tokens, logits, hidden states, log-probabilities of targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.runners.base import RunnerError
from toolkit.runners.step import StepBatch, StepOutput
from toolkit.runners.tensor.decoder import Decoder
from toolkit.runners.tensor.sampler import Sampled, sample_rows

TARGET_ROWS = 256  # targets whose logits exist at one time


@dataclass
class Produced:
    """A step's results, still on the device; ``result`` waits for them."""

    sampled: Sampled
    logits: Tensor
    hidden: Tensor
    targets: Tensor

    def result(self) -> StepOutput:
        """The numpy arrays of the step boundary."""
        s, rows = self.sampled, self.sampled.tokens.shape[0]
        none = np.zeros((rows, 0))
        best = s.best.cpu().numpy()
        return StepOutput(
            tokens=s.tokens.cpu().numpy().astype(np.int32)[:, None],
            counts=np.ones(rows, np.int32),
            logprob=np.full((rows, 1), np.nan, np.float32) if s.logprob is None else s.logprob.cpu().numpy()[:, None],
            top_ids=none.astype(np.int32) if s.top_ids is None else s.top_ids.cpu().numpy().astype(np.int32),
            top_logprobs=none.astype(np.float32) if s.top_logprobs is None else s.top_logprobs.cpu().numpy(),
            logits=self.logits.cpu().numpy(),
            hidden=self.hidden.cpu().numpy(),
            target_logprobs=self.targets.cpu().numpy(),
            bad_rows=np.flatnonzero(~np.isfinite(best)).astype(np.int32),
        )


@dataclass
class Failed:
    """A step that could not run."""

    error: RunnerError

    def result(self) -> StepOutput:
        raise self.error


def produce(decoder: Decoder, x: Tensor, delta: Tensor | None, batch: StepBatch) -> Produced:
    """Run the final norm and the head on the rows that are asked for, and sample."""
    asked = (batch.sample_index, batch.logits_index, batch.hidden_index, batch.target_index)
    rows, places = np.unique(np.concatenate(asked), return_inverse=True)
    sample, logits, hidden, target = np.split(places, np.cumsum([len(a) for a in asked])[:-1])
    every = len(rows) == x.shape[0]
    h = decoder.hidden(x, delta, None if every else _index(rows, x.device))
    return Produced(
        sampled=_sample(decoder, h, sample, batch),
        logits=_take(h, logits, decoder.logits, decoder.spec.vocab_size),
        hidden=_take(h, hidden, lambda t: t.float(), decoder.spec.hidden_size),
        targets=_targets(decoder, h, target, batch.target_ids),
    )


def _index(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def _rows(h: Tensor, rows: np.ndarray) -> Tensor:
    """``h[rows]``, without a copy where that is all of it in order."""
    if len(rows) == h.shape[0] and (rows == np.arange(len(rows))).all():
        return h
    return h.index_select(0, _index(rows, h.device))


def _take(h: Tensor, rows: np.ndarray, what: Callable[[Tensor], Tensor], width: int) -> Tensor:
    if not len(rows):
        return torch.zeros(0, width)
    return what(_rows(h, rows))


def _sample(decoder: Decoder, h: Tensor, rows: np.ndarray, batch: StepBatch) -> Sampled:
    if not len(rows):
        return Sampled(torch.zeros(0, dtype=torch.int64, device=h.device), torch.zeros(0))
    return sample_rows(decoder.logits(_rows(h, rows)), batch.sampling, decoder.ops)


def _targets(decoder: Decoder, h: Tensor, rows: np.ndarray, ids: np.ndarray) -> Tensor:
    """log p(ids[i]) after flat token i, a few hundred rows of logits at a time."""
    found = []
    for start in range(0, len(rows), TARGET_ROWS):
        part = slice(start, start + TARGET_ROWS)
        logits = decoder.logits(_rows(h, rows[part]))
        target = _index(ids[part], h.device)[:, None]
        found.append(logits.gather(1, target)[:, 0] - logits.logsumexp(-1))
    return torch.cat(found) if found else torch.zeros(0)
