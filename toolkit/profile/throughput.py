"""Throughput under load: many requests, at most so many at once, or arriving at random at a given rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.base.arrivals import poisson_starts
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import EngineConfig
from toolkit.engine.load.setup import Packed
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import UsageError
from toolkit.profile.drawings import drawings
from toolkit.profile.guesses import guesses_row
from toolkit.profile.load import raise_if_all_failed, run_all
from toolkit.profile.metrics import RequestRecord, throughput_summary
from toolkit.profile.options import MADE, Load
from toolkit.profile.workload import Ask, dataset_asks, random_asks, random_texts
from toolkit.vision.eyes import Eyes


def asks_of(load: Load, engine: AsyncEngine) -> list[Ask]:
    """The requests, the same for the same load and tokenizer."""
    if load.dataset not in MADE:
        file, limit = Path(load.dataset), engine.session_len
        return dataset_asks(file, load.seed, engine.tokenizer, load.num_prompts, limit, load.random_output_len)
    if load.images:
        return image_asks(load, engine)
    if load.random_input_len + load.output_len > engine.session_len:
        raise UsageError(
            f"--random-input-len {load.random_input_len} + --random-output-len {load.output_len}: pass the session of "
            f"{engine.session_len} tokens"
        )
    return random_asks(load.seed, engine.tokenizer, load.num_prompts, load.random_input_len, load.output_len)


def image_asks(load: Load, engine: AsyncEngine) -> list[Ask]:
    """Drawings before random words. Raises UsageError where the model does not see, or they do not fit the session."""
    eyes = None if engine.blind else Eyes.open(engine.tokenizer.path, max_tokens=engine.session_len)
    if eyes is None:
        raise UsageError("--dataset image: the model reads text alone; load one that sees")
    images = drawings(load.seed, load.num_prompts * load.images, load.size)
    texts = random_texts(load.seed, engine.tokenizer, load.num_prompts, load.random_input_len)
    found = []
    for i, text in enumerate(texts):
        some = images[i * load.images : (i + 1) * load.images]
        pictures = eyes.look([{"role": "user", "content": [{"type": "image", "image": image} for image in some]}])
        spelled = eyes.spell(eyes.recipe.written * load.images + text, pictures)
        ids = engine.tokenizer.encode(spelled, add_special_tokens=True)
        if len(ids) + load.output_len > engine.session_len:
            took = f"{len(ids)} tokens with its {load.images} image(s) + --random-output-len {load.output_len}"
            raise UsageError(f"a prompt takes {took}: they pass the session of {engine.session_len} tokens")
        found.append(Ask(ids, load.output_len, tuple(pictures)))
    return found


@dataclass(frozen=True)
class ThroughputResult:
    """``summary``: the figures of metrics.throughput_summary. ``records``: what they come from."""

    summary: dict[str, float | int]
    records: list[RequestRecord]


def measure(
    model: str,
    load: Load,
    *,
    engine_config: EngineConfig | None = None,
    packed: Packed | None = None,
    progress: Callable[[str], None] = lambda text: None,
    on_start: Callable[[AsyncEngine], None] = lambda engine: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    on_end: Callable[[dict[str, Any]], None] = lambda guesses: None,
) -> ThroughputResult:
    """Open ``model`` (``packed``: see ``AsyncEngine.open``), warm it up, put ``load`` on it; requests
    use the adapters of ``engine_config`` in turn.

    ``on_end``: told what came of guesses (``guesses_row``). Raises ToolkitError when no request succeeds.
    """
    load.check()
    with AsyncEngine.open(
        model, backend_config=engine_config, progress=progress, process=True, packed=packed
    ) as engine:
        asks = asks_of(load, engine)
        on_start(engine)
        engine.settle()
        starts = None if load.request_rate == math.inf else poisson_starts(load.seed, len(asks), load.request_rate)
        warm_up = random_asks(load.seed + 1, engine.tokenizer, 1, min(16, engine.session_len - 4), 4)

        async def run() -> tuple[list[RequestRecord], float]:
            await run_all(engine, warm_up, name="warm-up")
            return await run_all(
                engine,
                asks,
                concurrency=load.concurrency,
                starts=starts,
                sampling=load.sampling,
                adapters=None if engine_config is None else engine_config.adapters,
                on_done=on_done,
            )

        records, duration = asyncio.run(run())
        on_end(guesses_row(engine.stats()))
    raise_if_all_failed(records)
    return ThroughputResult(throughput_summary(records, duration, load.images), records)
