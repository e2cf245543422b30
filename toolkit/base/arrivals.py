"""When requests come."""

from __future__ import annotations

import math


def poisson_starts(seed: int, count: int, rate: float) -> list[float]:
    """Start times in seconds, the first at 0, with exponential gaps of mean 1 / ``rate``; inf = all at once."""
    import numpy as np

    if rate == math.inf:
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(count - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:count]
