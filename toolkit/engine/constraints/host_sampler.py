"""The sampling rules of ``SamplingBatch`` in numpy: for requests whose logits the host must touch, and as an oracle."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from toolkit.runners.step import SamplingBatch, uniform

F32 = NDArray[np.float32]


def adjust(logits: F32, s: SamplingBatch, row: int) -> F32:
    """Logits [V] of sampled row ``row`` after penalties, biases and grammar (steps 1 to 3); a copy."""
    x = np.array(logits, np.float32)
    low, high = s.history_ptr[row], s.history_ptr[row + 1]
    if high > low:
        ids, count = s.history_ids[low:high], s.history_count[low:high].astype(np.float32)
        old, p = x[ids], s.repetition_penalty[row]
        new = np.where(old > 0, old / p, old * p)
        x[ids] = new - (s.frequency_penalty[row] * count + s.presence_penalty[row] * (count > 0))
    low, high = s.bias_ptr[row], s.bias_ptr[row + 1]
    if high > low:
        np.add.at(x, s.bias_ids[low:high], s.bias_values[low:high])
    if s.grammar is not None:
        allowed = np.unpackbits(s.grammar[row].view(np.uint8), bitorder="little")[: len(x)].astype(bool)
        x[~allowed] = -np.inf
    return x


def log_softmax(x: F32) -> F32:
    """Over the last axis, in float32 with the maximum taken out first."""
    top = x.max(axis=-1, keepdims=True)
    shifted = x - np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def drawable(x: F32, s: SamplingBatch, row: int) -> bool:
    """Whether ``draw`` can choose: the opposite of a runner's ``bad_rows``."""
    return bool(np.isfinite(x.max())) and not s.senseless()[row]  # the maximum is NaN where any value is


def draw(x: F32, s: SamplingBatch, row: int) -> int:
    """The token chosen from adjusted logits [V] (step 5), where ``drawable``."""
    temperature = float(s.temperature[row])
    if temperature == 0:
        return int(np.argmax(x))
    p = probabilities(x, temperature)
    return chosen(p, kept(p, s, row), s, row)


def probabilities(x: F32, temperature: float) -> NDArray[np.float64]:
    """Of tokens with logits [V], at a temperature above 0."""
    p = np.exp((x - x.max()).astype(np.float64) / temperature)
    return cast("NDArray[np.float64]", p / p.sum())


def kept(p: NDArray[np.float64], s: SamplingBatch, row: int) -> NDArray[np.int64]:
    """Ids that top_k, top_p and min_p leave of probabilities [V], ascending."""
    order = np.argsort(-p, kind="stable")  # most probable first, lowest id first on a tie
    keep = len(order) if s.top_k[row] == 0 else min(int(s.top_k[row]), len(order))
    order = order[:keep]
    if s.top_p[row] < 1:
        mass = np.cumsum(p[order])
        order = order[: int(np.searchsorted(mass, float(s.top_p[row]) * mass[-1], side="left")) + 1]
    return np.union1d(order[:1], order[p[order] >= float(s.min_p[row]) * p[order[0]]])


def chosen(p: NDArray[np.float64], kept: NDArray[np.int64], s: SamplingBatch, row: int) -> int:
    """The one of ids ``kept`` that seed and position draw by probabilities [V]."""
    mass = np.cumsum(p[kept])
    u = uniform(int(s.seed[row]), int(s.position[row])) * mass[-1]
    return int(kept[min(int(np.searchsorted(mass, u, side="right")), len(kept) - 1)])


def top(logprobs: F32, k: int) -> list[tuple[int, float]]:
    """The ``k`` most probable ids with their log-probabilities, best first, lowest id first on a tie."""
    if k <= 0:
        return []
    if k == 1:
        order = np.array([logprobs.argmax()])
    else:  # those above the k-th best, and of those equal to it the first
        least = np.partition(logprobs, -min(k, len(logprobs)))[-min(k, len(logprobs))]
        near = np.flatnonzero(logprobs >= least)
        order = near[np.argsort(-logprobs[near], kind="stable")[:k]]
    return [(int(i), float(logprobs[i])) for i in order]
