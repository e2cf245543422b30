"""From the logits of the sampled rows to their tokens, in the order ``SamplingBatch`` lays down."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.runners.step import SamplingBatch, uniform
from toolkit.runners.tensor.ops import Ops


@dataclass
class Sampled:
    """Still on the device. ``best``: the largest logit of each row, NaN where the row cannot be drawn from."""

    tokens: Tensor  # int64 [N]
    best: Tensor  # float32 [N]
    logprob: Tensor | None = None  # float32 [N], nan where not asked for
    top_ids: Tensor | None = None  # int64 [N, P]
    top_logprobs: Tensor | None = None  # float32 [N, P]


def sample_rows(logits: Tensor, s: SamplingBatch, ops: Ops) -> Sampled:
    """Draw a token for every row of ``logits`` (float32 [N, V]), which are changed in place."""
    device = logits.device
    _penalize(logits, s, ops)
    _add_biases(logits, s)
    if s.grammar is not None:
        ops.apply_bitmask(logits, torch.from_numpy(s.grammar).to(device))
    best, tokens = logits.max(dim=-1)
    best = best.masked_fill(torch.from_numpy(s.senseless()).to(device), float("nan"))
    if (s.temperature > 0).any():
        tokens = _draw(logits, s, ops)
    result = Sampled(tokens, best)
    if s.logprobs.size and s.logprobs.max() >= 0:
        _log_probabilities(logits, s, result)
    return result


def _put(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


def _rows_of(pointers: np.ndarray) -> np.ndarray:
    """The row of each CSR entry."""
    return np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))


def _penalize(logits: Tensor, s: SamplingBatch, ops: Ops) -> None:
    on = (s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0)
    if not on.any() or not len(s.history_ids):
        return
    device, rows = logits.device, _rows_of(s.history_ptr)
    ops.penalize(
        logits,
        _put(rows, device),
        _put(s.history_ids.astype(np.int64), device),
        _put(s.history_count.astype(np.float32), device),
        _put(s.repetition_penalty, device),
        _put(s.presence_penalty, device),
        _put(s.frequency_penalty, device),
    )


def _add_biases(logits: Tensor, s: SamplingBatch) -> None:
    if len(s.bias_ids):
        where = (_put(_rows_of(s.bias_ptr), logits.device), _put(s.bias_ids.astype(np.int64), logits.device))
        logits.index_put_(where, _put(s.bias_values, logits.device), accumulate=True)


def _draw(logits: Tensor, s: SamplingBatch, ops: Ops) -> Tensor:
    u = np.zeros(len(s.temperature), np.float32)
    for row in np.flatnonzero(s.temperature > 0):
        u[row] = uniform(int(s.seed[row]), int(s.position[row]))
    columns = (s.temperature, s.top_k.astype(np.int64), s.top_p, s.min_p, u)
    return ops.sample(logits, *(_put(c, logits.device) for c in columns))


def _log_probabilities(logits: Tensor, s: SamplingBatch, result: Sampled) -> None:
    """Log-probabilities of the chosen token and the best ones, for the rows that ask."""
    device, rows = logits.device, np.flatnonzero(s.logprobs >= 0)
    at = torch.from_numpy(rows).to(device)
    some = logits.index_select(0, at)
    norm = some.logsumexp(-1, keepdim=True)
    count, width = len(s.logprobs), min(int(s.logprobs.max()), logits.shape[1])
    chosen = some.gather(1, result.tokens.index_select(0, at)[:, None]) - norm
    result.logprob = torch.full((count,), float("nan"), device=device).index_copy_(0, at, chosen[:, 0])
    if width == 0:
        return
    values, ids = some.topk(width, dim=-1)
    unasked = torch.arange(width, device=device) >= torch.from_numpy(s.logprobs[rows]).to(device)[:, None]
    values, ids = (values - norm).masked_fill_(unasked, float("-inf")), ids.masked_fill_(unasked, -1)
    result.top_ids = torch.full((count, width), -1, device=device).index_copy_(0, at, ids)
    floor = torch.full((count, width), float("-inf"), device=device)
    result.top_logprobs = floor.index_copy_(0, at, values)
