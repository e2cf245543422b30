"""Embeddings at fixed batch sizes: texts of one length that become a vector each, all of a batch handed in together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from toolkit.configs.engine import EngineConfig
from toolkit.configs.generation import GenerationConfig
from toolkit.engine.load.setup import Packed
from toolkit.engine.pooling import Head, check_pooling, open_head
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.profile.generation import check_room, make_room
from toolkit.profile.load import in_turn, raise_if_any_failed, run_at
from toolkit.profile.memory import PeakMemory
from toolkit.profile.metrics import RequestRecord, embedding_row
from toolkit.profile.options import Texts
from toolkit.profile.workload import random_prompts

POOLED = GenerationConfig(max_new_tokens=1)


def measure(
    model: str,
    texts: Texts,
    *,
    engine_config: EngineConfig,
    packed: Packed | None = None,
    progress: Callable[[str], None] = lambda text: None,
    on_start: Callable[[AsyncEngine], None] = lambda engine: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[dict[str, Any]]:
    """Open ``model`` (``packed``: see ``AsyncEngine.open``) and measure one row a batch size (keys: see
    metrics.embedding_row; and ``pooling``, ``dimensions``, ``peak_memory_of``, whose memory that is).

    Texts are random token ids that never repeat, and use the adapters of ``engine_config`` in turn. Raises
    ToolkitError when one fails or memory does not hold the largest batch, UsageError for a pooling that is none.
    """
    texts.check()
    check_pooling(texts.pooling, "--pooling")
    make_room(engine_config, max(texts.concurrency), texts.prompt_tokens)
    with AsyncEngine.open(
        model, backend_config=engine_config, progress=progress, process=True, packed=packed
    ) as engine:
        check_room(engine, texts)
        head = open_head(engine.tokenizer.path, texts.pooling)
        on_start(engine)
        engine.settle()
        with PeakMemory.of(engine.device) as memory:
            return asyncio.run(_measure_all(engine, texts, head, engine_config.adapters, memory, on_done))


async def _measure_all(
    engine: AsyncEngine,
    texts: Texts,
    head: Head,
    adapters: Collection[str] | None,
    memory: PeakMemory,
    on_done: Callable[[RequestRecord], None],
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(texts.seed)
    dimensions = 0
    adapter_of = in_turn(adapters)

    async def one(index: int, ids: list[int]) -> RequestRecord:
        """Its vector counts as one token that arrives."""
        nonlocal dimensions
        record = RequestRecord(len(ids), time.perf_counter())
        async for response in engine.generate(ids, POOLED, only=head.pooling, adapter=adapter_of(index)):
            if response.finish_reason in ("error", "abort"):
                record.error = response.error_message or response.finish_reason
            elif response.last_hidden_state is not None:
                dimensions = len(head.embedding(response.last_hidden_state[0], None, normalize=True))
                record.arrivals.append((time.perf_counter(), 1))
        return record

    rows = []
    for size in texts.concurrency:
        memory.peak()
        rounds = []
        for turn in range(texts.rounds + 1):  # the first one warms up
            batch = random_prompts(rng, engine.tokenizer, size, texts.prompt_tokens)
            records, _ = await run_at(batch, one, on_done=on_done if turn else lambda record: None)
            raise_if_any_failed(records)
            if turn:
                rounds.append(records)
        row = embedding_row(rounds, texts.prompt_tokens, memory.peak())
        rows.append(row | {"pooling": head.pooling, "dimensions": dimensions, "peak_memory_of": memory.whose})
    return rows
