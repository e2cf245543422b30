"""2 ranks of one thread beside 1 process of two, on the native runner, by turns: a prompt, one sequence, eight at once.

    python scripts/bench/ranks.py MODEL [--rounds 3]

MODEL: an engine artifact (`tool convert`); both map it, so it lies in memory once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

import numpy as np

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.messages import GenerationConfig

PROMPT, TOKENS, FEW, MANY = 512, 48, 16, 8


async def answer(engine: AsyncEngine, ids: list[int], tokens: int) -> list[float]:
    """When each token came."""
    came: list[float] = []
    async for delta in engine.generate(ids, GenerationConfig(max_new_tokens=tokens, ignore_eos=True)):
        came += [time.perf_counter()] * len(delta.token_ids)
    return came


async def measure(engine: AsyncEngine, rng: Any, vocabulary: int) -> dict[str, float]:
    """Tokens a second."""

    def text(length: int) -> list[int]:
        found: list[int] = rng.integers(1000, vocabulary, length).tolist()
        return found

    begun = time.perf_counter()
    prompt = PROMPT / ((await answer(engine, text(PROMPT), 1))[0] - begun)
    came = await answer(engine, text(FEW), TOKENS)
    one = (TOKENS - 1) / (came[-1] - came[0])
    all_ = await asyncio.gather(*(answer(engine, text(FEW), TOKENS) for _ in range(MANY)))
    first, last = max(came[0] for came in all_), min(came[-1] for came in all_)
    within = sum(first < at <= last for came in all_ for at in came)
    return {f"prompt of {PROMPT}": prompt, "1 sequence": one, f"{MANY} sequences": within / (last - first)}


def main(model: str, rounds: int) -> None:
    rng = np.random.default_rng(1)
    same: dict[str, Any] = {"session_len": 1024, "max_batch_size": MANY, "threads": 2, "enable_prefix_caching": False}
    with (
        AsyncEngine.open(model, backend_config=TurbomindEngineConfig(**same)) as one,
        AsyncEngine.open(model, backend_config=TurbomindEngineConfig(tp=2, **same)) as two,
    ):
        found: list[tuple[dict[str, float], dict[str, float]]] = []
        for i in range(rounds + 1):  # the first is not counted: pages come from disk
            engines = (one, two) if i % 2 else (two, one)
            taken = {engine: asyncio.run(measure(engine, rng, 30000)) for engine in engines}
            found += [(taken[one], taken[two])] if i else []
    for name in found[0][0]:
        a, b = (statistics.median(pair[side][name] for pair in found) for side in (0, 1))
        ratio = statistics.median(pair[1][name] / pair[0][name] for pair in found)
        each = ", ".join(f"{pair[1][name] / pair[0][name]:.2f}" for pair in found)
        print(f"{name:>14}: 1 rank {a:7.1f} tokens/s, 2 ranks {b:7.1f}, ratio {ratio:.2f} ({each})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    main(args.model, args.rounds)
