"""Block diffusion written out: the whole text anew in every pass, no cache. What the engine's loop is compared with.

After the authors' description of SDAR: a block of masks is filled over ``steps`` passes. Of the tokens that a pass
draws those stay that it is surest of, or the first; the others are masks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from toolkit.runners.step import uniform


def denoise(
    logits: Callable[[list[int]], Any],
    prompt: list[int],
    new: int,
    block: int,
    mask: int,
    *,
    strategy: str = "low_confidence_dynamic",
    steps: int | None = None,
    threshold: float = 0.85,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stops: Sequence[int] = (),
) -> list[int]:
    """``new`` tokens behind ``prompt``, or fewer up to one of ``stops``. ``logits(ids)``: [len(ids), vocabulary], where
    each token sees its block and those before it."""
    text, steps = list(prompt), steps or block
    shares = [block // steps + (i < block % steps) for i in range(steps)]
    while len(text) < len(prompt) + new:
        begin = len(text) // block * block
        end, known = begin + block, dict(enumerate(text))
        for turn in range(block):
            open_places = [p for p in range(begin, end) if p not in known]
            if not open_places:
                break
            rows = np.array(logits([known.get(p, mask) for p in range(end)]), np.float64)
            rows[:, mask] = -np.inf
            drawn = {}
            for p in open_places:
                at = uniform(seed, (turn << 40) + p - len(prompt))
                token = int(rows[p].argmax()) if temperature == 0 else _draw(rows[p] / temperature, top_k, at)
                drawn[p] = (token, float(_softmax(rows[p])[token]))
            count = max(1, shares[turn] if turn < steps else 0)
            best = sorted(open_places, key=lambda p: -drawn[p][1])
            sure = [p for p in open_places if drawn[p][1] > threshold]
            if strategy == "sequential":
                best = open_places
            elif strategy == "low_confidence_dynamic":
                count = max(count, len(sure))
            known |= {p: drawn[p][0] for p in best[:count]}
        for p in range(len(text), end):
            text.append(known[p])
            if known[p] in stops:
                return text[len(prompt) :][:new]
    return text[len(prompt) :][:new]


def _softmax(row: Any) -> Any:
    shares = np.exp(row - row.max())
    return shares / shares.sum()


def _draw(row: Any, top_k: int, at: float) -> int:
    """The first token at which the shares so far, of the ``top_k`` likeliest if that is not 0, go beyond ``at``."""
    total, shares = 0.0, _softmax(np.where(row >= np.sort(row)[-top_k], row, -np.inf))
    for token, share in enumerate(shares):
        total += share
        if total > at:
            return token
    return int(math.nan if shares.max() == 0 else shares.argmax())
