"""Throughput under load: many requests, at most so many at once, or arriving at random at a given rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.engine.frontend import AsyncEngine
from toolkit.engine.setup import Packed
from toolkit.engine_configs import EngineConfig
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig
from toolkit.profile.load import raise_if_all_failed, run_all
from toolkit.profile.metrics import RequestRecord, throughput_summary
from toolkit.profile.workload import Ask, dataset_asks, poisson_starts, random_asks


@dataclass(frozen=True)
class Load:
    """``dataset``: "random" or a file. ``request_rate``: requests a second, inf = as fast as ``concurrency`` lets them.

    ``random_output_len`` None = 128 for random prompts, the dataset's own lengths for a file.
    """

    dataset: str = "random"
    num_prompts: int = 64
    concurrency: int = 32
    random_input_len: int = 256
    random_output_len: int | None = None
    request_rate: float = math.inf
    seed: int = 0
    sampling: GenerationConfig = field(default_factory=GenerationConfig)

    def check(self) -> None:
        """Raise UsageError for the first value out of its range."""
        for name in ("num_prompts", "concurrency", "random_input_len", "random_output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected 1 or more, found {value}")
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate: expected requests a second above 0, or inf, found {self.request_rate:g}")
        if self.seed < 0:
            raise UsageError(f"--seed: expected 0 or more, found {self.seed}")
        if self.dataset != "random" and not Path(self.dataset).is_file():
            raise UsageError(f"--dataset: expected 'random' or a file, found {self.dataset!r}, which is no file")

    def asks(self, engine: AsyncEngine) -> list[Ask]:
        """The requests, the same for the same load and tokenizer."""
        if self.dataset != "random":
            file, limit = Path(self.dataset), engine.session_len
            return dataset_asks(file, self.seed, engine.tokenizer, self.num_prompts, limit, self.random_output_len)
        output_len = self.random_output_len or 128
        if self.random_input_len + output_len > engine.session_len:
            raise UsageError(
                f"--random-input-len {self.random_input_len} + --random-output-len {output_len}: pass the session of "
                f"{engine.session_len} tokens"
            )
        return random_asks(self.seed, engine.tokenizer, self.num_prompts, self.random_input_len, output_len)


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
) -> ThroughputResult:
    """Open ``model`` (``packed``: see ``AsyncEngine.open``), warm it up, put ``load`` on it.

    Raises ToolkitError when no request succeeds.
    """
    load.check()
    engine = AsyncEngine.open(model, backend_config=engine_config, progress=progress, process=True, packed=packed)
    try:
        asks = load.asks(engine)
        on_start(engine)
        starts = None if load.request_rate == math.inf else poisson_starts(load.seed, len(asks), load.request_rate)
        warm_up = random_asks(load.seed + 1, engine.tokenizer, 1, min(16, engine.session_len - 4), 4)

        async def run() -> tuple[list[RequestRecord], float]:
            await run_all(engine, warm_up, name="warm-up")
            return await run_all(
                engine, asks, concurrency=load.concurrency, starts=starts, sampling=load.sampling, on_done=on_done
            )

        records, duration = asyncio.run(run())
    finally:
        engine.close()
    raise_if_all_failed(records)
    return ThroughputResult(throughput_summary(records, duration), records)
