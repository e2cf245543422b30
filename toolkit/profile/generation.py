"""Token latency at fixed batch sizes: all requests start together, have one length and generate one length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from toolkit.configs.engine import EngineConfig
from toolkit.configs.option import spelled
from toolkit.engine.load.setup import Packed
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.profile.guesses import guesses_row
from toolkit.profile.load import raise_if_any_failed, run_all
from toolkit.profile.memory import PeakMemory
from toolkit.profile.metrics import RequestRecord, generation_row
from toolkit.profile.options import Batches, Grid
from toolkit.profile.workload import Ask, random_prompts

WARM_UP_TOKENS = 4


def fit(config: EngineConfig, grid: Grid) -> None:
    """Give ``config`` room for the grid where a size is open, and read prompts before tokens are written unless it says
    otherwise: rows tell one from the other. Raises UsageError for a size that is too small."""
    if config.target_step_ms is None:
        config.target_step_ms = 0.0
    make_room(config, max(grid.concurrency), grid.prompt_tokens + grid.completion_tokens)


def make_room(config: EngineConfig, requests: int, tokens: int) -> None:
    """For so many requests of so many tokens at once, see ``fit``."""
    for name, value in {"max_batch_size": requests, "session_len": tokens}.items():
        given = getattr(config, name)
        if given is None:
            setattr(config, name, value)
        elif given < value:
            raise UsageError(f"{spelled(name)}: these batches need {value}, found {given}")


def measure(
    model: str,
    grid: Grid,
    *,
    engine_config: EngineConfig,
    packed: Packed | None = None,
    progress: Callable[[str], None] = lambda text: None,
    on_start: Callable[[AsyncEngine], None] = lambda engine: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    on_end: Callable[[dict[str, Any]], None] = lambda guesses: None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Open ``model`` (``packed``: see ``AsyncEngine.open``) and measure one row a batch size (keys: see
    metrics.generation_row; ``max_prefill_token_num``, prompt tokens of a step at most; ``peak_memory_of``, whose memory
    that is).

    Prompts are random and never repeat, in the warm-up and in every round: the prefix cache finds nothing. Requests use
    the adapters of ``engine_config`` in turn. ``on_end``: told what came of guesses (``guesses_row``).
    Raises ToolkitError when a request fails or the memory plan cannot hold the largest batch.
    """
    grid.check()
    fit(engine_config, grid)
    with AsyncEngine.open(
        model, backend_config=engine_config, progress=progress, process=True, packed=packed
    ) as engine:
        check_room(engine, grid)
        on_start(engine)
        engine.settle()
        with PeakMemory.of(engine.device) as memory:
            rows = asyncio.run(_measure_all(engine, grid, engine_config.adapters, memory, on_done, on_row))
        on_end(guesses_row(engine.stats()))
        return rows


async def _measure_all(
    engine: AsyncEngine,
    grid: Grid,
    adapters: Collection[str] | None,
    memory: PeakMemory,
    on_done: Callable[[RequestRecord], None],
    on_row: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(grid.seed)

    def batch(size: int, length: int) -> list[Ask]:
        prompts = random_prompts(rng, engine.tokenizer, size, grid.prompt_tokens)
        return [Ask(ids, length) for ids in prompts]

    rows = []
    for size in grid.concurrency:
        warm_up = batch(size, min(WARM_UP_TOKENS, grid.completion_tokens))
        await run_all(engine, warm_up, name=f"warm-up-{size}", adapters=adapters)
        memory.peak()
        rounds = []
        for turn in range(grid.rounds):
            asks = batch(size, grid.completion_tokens)
            name = f"round-{size}-{turn}"
            records, _ = await run_all(
                engine, asks, name=name, sampling=grid.sampling, adapters=adapters, on_done=on_done
            )
            raise_if_any_failed(records)
            rounds.append(records)
        row = generation_row(rounds, grid.prompt_tokens, grid.completion_tokens, memory.peak())
        most = engine.plan.max_prefill_token_num
        rows.append(row | {"max_prefill_token_num": most, "peak_memory_of": memory.whose})
        on_row(rows[-1])
    return rows


def check_room(engine: AsyncEngine, grid: Batches) -> None:
    """Raise ToolkitError where memory does not hold the largest batch."""
    if engine.max_batch_size < max(grid.concurrency):
        raise ToolkitError(
            f"--concurrency {max(grid.concurrency)}: memory allows a batch of {engine.max_batch_size}; "
            "measure smaller ones, or use --quant-policy 8"
        )
