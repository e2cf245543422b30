"""Where the time of a model's ranks goes: computing, or handing each other what they have made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import EngineConfig
from toolkit.engine.load.setup import Packed
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.profile.generation import WARM_UP_TOKENS, fit
from toolkit.profile.load import raise_if_any_failed, run_all
from toolkit.profile.options import Grid, Traced
from toolkit.profile.workload import Ask, random_prompts

DRAWN = 2  # steps of a timeline: of the prompt's end, and one that follows
Event = list[Any]
"""As of ``AsyncEngine.trace_ranks``: name, from, until (seconds), bytes; of a "step" its tokens."""


@dataclass(frozen=True)
class Found:
    """``rows``: of each rank, see ``row_of``. ``events``: what they were made of."""

    rows: list[dict[str, Any]]
    events: list[list[Event]]


def measure(
    model: str,
    wish: Traced,
    *,
    engine_config: EngineConfig,
    packed: Packed | None = None,
    progress: Callable[[str], None] = lambda text: None,
    on_start: Callable[[AsyncEngine], None] = lambda engine: None,
    on_done: Callable[[Any], None] = lambda record: None,
) -> Found:
    """Open ``model`` (``packed``: see ``AsyncEngine.open``), warm it up, and watch its ranks while they answer. Raises
    UsageError for a model that is not split, ToolkitError where a request fails."""
    wish.check()
    fit(engine_config, Grid(0, (wish.concurrency,), wish.prompt_tokens, wish.completion_tokens))
    with AsyncEngine.open(
        model, backend_config=engine_config, progress=progress, process=True, packed=packed
    ) as engine:
        engine.trace_ranks(False)  # whether it has any
        on_start(engine)
        engine.settle()
        rng = np.random.default_rng(wish.seed)
        for name, tokens, tell in (
            ("warm-up", min(WARM_UP_TOKENS, wish.completion_tokens), lambda record: None),
            ("traced", wish.completion_tokens, on_done),
        ):
            prompts = random_prompts(rng, engine.tokenizer, wish.concurrency, wish.prompt_tokens)
            engine.trace_ranks(True)
            asks = [Ask(ids, tokens) for ids in prompts]
            records, _ = asyncio.run(
                run_all(engine, asks, name=name, sampling=wish.sampling, adapters=engine_config.adapters, on_done=tell)
            )
            raise_if_any_failed(records)
        events = engine.trace_ranks(False)
    return Found([row_of(rank, found) for rank, found in enumerate(events)], events)


def row_of(rank: int, events: Sequence[Event]) -> dict[str, Any]:
    """``steps`` and ``step_seconds`` of a rank, and of each kind of message how many, their bytes and ``seconds``, in
    which the rank has waited and copied; ``message_seconds``: of all of them together."""
    steps = [event for event in events if event[0] == "step"]
    kinds: dict[str, dict[str, float]] = {}
    for name, begun, ended, size in events:
        if name != "step":
            kind = kinds.setdefault(name, {"messages": 0, "bytes": 0, "seconds": 0.0})
            kind["messages"] += 1
            kind["bytes"] += size
            kind["seconds"] += ended - begun
    return {
        "rank": rank,
        "steps": len(steps),
        "tokens": sum(size for *_, size in steps),
        "step_seconds": sum(ended - begun for _, begun, ended, _ in steps),
        "message_seconds": sum(kind["seconds"] for kind in kinds.values()),
        "messages": kinds,
    }


def timeline(events: Sequence[Sequence[Event]]) -> list[list[Event]]:
    """Of each rank the steps that are drawn, the first of two after a prompt's last, in milliseconds from where the
    earliest begins. A rank on another machine has another clock, so that each begins with its own first step."""
    drawn: list[list[Event]] = []
    for of_rank in events:
        steps = sorted(event[1:] for event in of_rank if event[0] == "step")
        at = next((i for i in range(1, len(steps)) if steps[i][2] < steps[i - 1][2]), 0)
        chosen = steps[at : at + DRAWN] or steps[:1]
        if not chosen:
            drawn.append([])
            continue
        begin, end = chosen[0][0], chosen[-1][1]
        drawn.append([event for event in of_rank if event[1] >= begin and event[2] <= end])
    starts = [min(event[1] for event in events) for events in drawn if events]
    near = max(starts, default=0) - min(starts, default=0) < 1.0
    zero = [min(starts, default=0.0) if near or not found else min(e[1] for e in found) for found in drawn]
    return [
        [[name, (begun - start) * 1e3, (ended - start) * 1e3, size] for name, begun, ended, size in found]
        for start, found in zip(zero, drawn, strict=True)
    ]
