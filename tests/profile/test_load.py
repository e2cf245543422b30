"""The load generator and the memory sampler, against a stand-in engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from toolkit.engine.text.stream import Timings
from toolkit.messages import GenerationConfig, Response
from toolkit.profile.load import run_all, run_one
from toolkit.profile.memory import PeakMemory, ProcessTree
from toolkit.profile.workload import Ask


class Ticking:
    """Gives one token every ``tick`` seconds; with ``pairs`` two at once after the first."""

    def __init__(self, tick: float = 0.001, pairs: bool = False) -> None:
        self.tick, self.pairs = tick, pairs
        self.running = self.most = 0
        self.starts: list[float] = []
        self.configs: list[GenerationConfig] = []
        self.adapters: list[str | None] = []

    async def generate(
        self,
        token_ids: list[int],
        gen_config: GenerationConfig,
        *,
        request_id: str | None = None,
        timings: Timings | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[Response]:
        self.starts.append(time.perf_counter())
        self.configs.append(gen_config)
        self.adapters.append(adapter)
        self.running += 1
        self.most = max(self.most, self.running)
        left = gen_config.max_new_tokens or 0
        try:
            if token_ids[0] == 13:
                yield Response(finish_reason="error", error_message="unlucky")
                return
            while left:
                await asyncio.sleep(self.tick)
                count = 2 if self.pairs and left < (gen_config.max_new_tokens or 0) and left > 1 else 1
                left -= count
                if timings is not None:
                    timings.drawn += [time.perf_counter()] * count
                yield Response(token_ids=[7] * count, finish_reason=None if left else "length")
        finally:
            self.running -= 1


def test_one_request() -> None:
    engine = Ticking(0.01, pairs=True)
    record = asyncio.run(run_one(engine, Ask([1, 2, 3], 5), "a", GenerationConfig()))
    assert [count for _, count in record.arrivals] == [1, 2, 2] and record.input_tokens == 3
    assert len(record.drawn) == 5 and record.start < record.drawn[0] <= record.drawn[-1] <= record.end
    assert record.error is None and record.ttft >= 0.01 and record.e2e >= 0.03
    config = engine.configs[0]
    assert config.ignore_eos and config.max_new_tokens == 5 and config.greedy


def test_concurrency_is_a_limit() -> None:
    engine = Ticking()
    done: list[Any] = []
    records, duration = asyncio.run(run_all(engine, [Ask([1], 3)] * 10, concurrency=3, on_done=done.append))
    assert engine.most == 3 and len(records) == len(done) == 10 and duration > 0.009
    asyncio.run(run_all(engine := Ticking(), [Ask([1], 3)] * 10))
    assert engine.most == 10


def test_starts_are_kept() -> None:
    engine, begun, due = Ticking(), time.perf_counter(), [0.0, 0.05, 0.1]
    asyncio.run(run_all(engine, [Ask([1], 1)] * 3, starts=due))
    assert len(engine.starts) == 3
    assert all(start - begun >= at - 0.001 for start, at in zip(engine.starts, due, strict=True)), "before its time"


def test_adapters_are_used_in_turn() -> None:
    asks = [Ask([1], 1)] * 5
    asyncio.run(run_all(engine := Ticking(), asks, adapters={"a": "A", "b": "B"}))
    asyncio.run(run_all(engine, asks[:2]))
    assert engine.adapters == ["a", "b", "a", "b", "a", None, None]


def test_a_failed_request_is_noted_and_the_others_live() -> None:
    records, _ = asyncio.run(run_all(Ticking(), [Ask([1], 2), Ask([13], 2), Ask([1], 2)]))
    assert [r.error for r in records] == [None, "unlucky", None]


def test_peak_memory() -> None:
    read: list[float] = []

    def reading() -> float:
        read.append([5.0, 9.0, 3.0][min(len(read), 2)])
        return read[-1]

    with PeakMemory(reading, interval_s=0.001) as memory:
        for expected in (9.0, 3.0):
            more = len(read) + 3
            while len(read) < more:
                time.sleep(0.001)
            assert memory.peak() == expected


def test_a_peak_is_of_the_time_since_the_last_one() -> None:
    """Though it is asked for while memory is read."""
    amid, own = threading.Event(), threading.get_ident()
    sizes = iter([1000.0])

    def read() -> float:
        if threading.get_ident() != own:
            amid.set()
            time.sleep(0.1)
        return next(sizes, 1.0)

    with PeakMemory(read, interval_s=0.001) as memory:
        assert amid.wait(10)
        assert memory.peak() == 1000.0
        time.sleep(0.2)
        assert memory.peak() == 1.0


def test_process_memory_counts_children() -> None:
    before = ProcessTree()()
    code = "x = bytearray(b'1' * (100 << 20)); print('up', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    grown = ProcessTree()() - before
    child.communicate(b"\n", timeout=100)
    assert 100 < grown < 400


@pytest.mark.parametrize("module", ["throughput", "generation", "plot", "memory"])
def test_profile_needs_no_server(module: str) -> None:
    code = (
        f"import sys, toolkit.profile.{module}\n"
        "bad = {'fastapi', 'uvicorn', 'starlette', 'openai', 'torch', 'transformers'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_tokens_are_drawn_as_asked_for() -> None:
    engine = Ticking()
    asks = [Ask([1, 2], 3)] * 2
    drawn = GenerationConfig(do_sample=True, temperature=0.3, top_k=7)
    asyncio.run(run_all(engine, asks))
    asyncio.run(run_all(engine, asks, sampling=drawn))
    assert [c.greedy for c in engine.configs] == [True, True, False, False]
    assert {(c.temperature, c.top_k, c.max_new_tokens, c.ignore_eos) for c in engine.configs[2:]} == {(0.3, 7, 3, True)}
