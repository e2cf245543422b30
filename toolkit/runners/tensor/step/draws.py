"""The uniform numbers that rows draw their tokens by, for all rows of a step at once."""

from __future__ import annotations

import numpy as np

from toolkit.runners.step import SamplingBatch


def uniforms(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """``toolkit.runners.step.uniform`` of uint64 [N] and int64 [N]; float32 [N]."""
    with np.errstate(over="ignore"):  # the generator computes modulo 2**64
        z = seed + np.uint64(0x9E3779B97F4A7C15) * (position.astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(1.0 / (1 << 24))


COLDEST = 1e-6  # temperatures below it are greedy: logits divided by them may be too large for float32


DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "u")  # what the op ``sample`` takes a row, in its order


def columns(s: SamplingBatch) -> dict[str, np.ndarray]:
    """The arrays that ``DRAWN_BY`` names."""
    return {
        "temperature": np.where(s.temperature < COLDEST, np.float32(0), s.temperature),
        "top_k": s.top_k.astype(np.int64),
        "top_p": s.top_p,
        "min_p": s.min_p,
        "u": uniforms(s.seed, s.position),
    }


def plain(s: SamplingBatch) -> bool:
    """Whether rows need no more than their logits and ``columns``: no penalty, bias, mask or log-probability."""
    return (
        s.grammar is None
        and not len(s.bias_ids)
        and not penalized(s)
        and not (s.logprobs.size and int(s.logprobs.max()) >= 0)
    )


def penalized(s: SamplingBatch) -> bool:
    """Whether any row has a penalty and something to apply it to."""
    if not len(s.history_ids):
        return False
    return bool(((s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0)).any())
