"""Puts load on an engine and writes down when which token came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from toolkit.engine.text.stream import Timings
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.eyes.pictures import Picture
from toolkit.profile.metrics import RequestRecord
from toolkit.profile.workload import Ask

A = TypeVar("A")
R = TypeVar("R")


class Engine(Protocol):
    """What is needed of AsyncEngine."""

    def generate(
        self,
        token_ids: list[int],
        gen_config: GenerationConfig,
        *,
        request_id: str | None = None,
        timings: Timings | None = None,
        pictures: Sequence[Picture] = (),
        adapter: str | None = None,
    ) -> AsyncIterator[Response]: ...


async def run_one(
    engine: Engine, ask: Ask, request_id: str, sampling: GenerationConfig, adapter: str | None = None
) -> RequestRecord:
    """Generate ``ask.output_len`` tokens, past any end token. A failure is noted in the record."""
    config = replace(sampling, max_new_tokens=ask.output_len, ignore_eos=True)
    timings = Timings()
    record = RequestRecord(len(ask.token_ids), time.perf_counter(), drawn=timings.drawn)
    more: dict[str, Any] = {"pictures": ask.pictures} if ask.pictures else {}
    more |= {"adapter": adapter} if adapter else {}
    stream = engine.generate(ask.token_ids, config, request_id=request_id, timings=timings, **more)
    async for response in stream:
        if response.token_ids:
            record.arrivals.append((time.perf_counter(), len(response.token_ids)))
        if response.finish_reason in ("error", "abort"):
            record.error = response.error_message or response.finish_reason
    return record


def in_turn(adapters: Collection[str] | None) -> Callable[[int], str | None]:
    """Which of them the request of a number uses; None where there are none."""
    names: list[str | None] = [*adapters] if adapters else [None]
    return lambda index: names[index % len(names)]


async def run_all(
    engine: Engine,
    asks: Sequence[Ask],
    *,
    concurrency: int | None = None,
    starts: Sequence[float] | None = None,
    name: str = "profile",
    sampling: GenerationConfig | None = None,
    adapters: Collection[str] | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> tuple[list[RequestRecord], float]:
    """Run ``asks`` and return their records, in order, and the seconds that all took.

    ``concurrency``: most requests at once (None = no limit); ``starts``: seconds after which each may begin (None = at
    once). ``sampling``: how tokens are drawn (None = greedily). ``adapters``: requests use them in turn
    (None = the plain model). A request's own clock starts when it is handed to the engine.
    """
    adapter_of = in_turn(adapters)

    def one(index: int, ask: Ask) -> Awaitable[RequestRecord]:
        return run_one(engine, ask, f"{name}-{index}", sampling or GenerationConfig(), adapter_of(index))

    return await run_at(asks, one, concurrency=concurrency, starts=starts, on_done=on_done)


async def run_at(
    asks: Sequence[A],
    one: Callable[[int, A], Awaitable[R]],
    *,
    concurrency: int | None = None,
    starts: Sequence[float] | None = None,
    on_done: Callable[[R], None] = lambda found: None,
) -> tuple[list[R], float]:
    """``run_all`` for whatever ``one(index, ask)`` asks."""
    gate: contextlib.AbstractAsyncContextManager[object]
    gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    begin = time.perf_counter()

    async def timed(index: int, ask: A) -> R:
        if starts is not None:
            await asyncio.sleep(max(0.0, begin + starts[index] - time.perf_counter()))
        async with gate:
            found = await one(index, ask)
        on_done(found)
        return found

    results = await asyncio.gather(*(timed(i, ask) for i, ask in enumerate(asks)))
    return list(results), time.perf_counter() - begin


def raise_if_all_failed(records: Sequence[RequestRecord]) -> None:
    """Raise ToolkitError, with the first one's reason, where no request succeeded."""
    errors = [record.error for record in records if record.error]
    if len(errors) == len(records):
        raise ToolkitError(f"all {len(records)} requests failed; the first one said: {errors[0]}")


def raise_if_any_failed(records: Sequence[RequestRecord]) -> None:
    """Raise ToolkitError, with the first one's reason, where one of a batch failed."""
    if failed := [record.error for record in records if record.error]:
        size = len(records)
        raise ToolkitError(f"concurrency {size}: {len(failed)} of {size} requests failed: {failed[0]}")
