"""Several engines behind a proxy, simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from toolkit.planner.engine import BLOCK, Engine, Job, Limits
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import Ask


@dataclass(frozen=True)
class Served:
    """One request as its client sees it, in seconds."""

    ttft: float
    tpot: float | None
    e2e: float


@dataclass(frozen=True)
class Run:
    """What came of a simulated load. ``seconds``: from the first request to the last answer; ``busy``: mean share of
    them in which an engine computed; ``queued``: mean requests in one engine when another comes."""

    served: list[Served]
    input_tokens: int
    output_tokens: int
    seconds: float
    busy: float
    queued: float
    preemptions: int

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    def percentile(self, name: str, percent: float) -> float:
        """Seconds of ttft, tpot or e2e."""
        values = [value for one in self.served if (value := getattr(one, name)) is not None]
        return float(np.percentile(values, percent)) if values else 0.0


def simulate(
    asks: Sequence[Ask], time: StepTime, limits: Limits, replicas: int, way: float = 0.0, prefills: int = 0
) -> Run:
    """``asks``, by arrival, on so many engines; each request goes where fewest are (the proxy's default). ``way``:
    seconds that a proxy takes for a request. Each must fit into an engine's cache. ``prefills``: engines that compute
    prompts alone; the others then begin with what these lend, the whole blocks of a prompt, at no further cost."""
    engines: list[Engine] = []
    came = {id(ask): ask.arrival for ask in asks}
    if prefills:
        heads = [Ask(a.arrival, a.input_len, 1, a.cached) for a in asks]
        engines, _ = _run(heads, time, limits, prefills, way)
        ends = {id(job.ask): job.end for engine in engines for job in engine.done}
        handed = [
            Ask(ends[id(head)], ask.input_len, ask.output_len, (ask.input_len - 1) // BLOCK * BLOCK)
            for head, ask in zip(heads, asks, strict=True)
        ]
        came = {id(ask): head.arrival for ask, head in zip(handed, heads, strict=True)}
        asks = sorted(handed, key=lambda ask: ask.arrival)
    writing, queued = _run(asks, time, limits, replicas, way)
    engines += writing
    jobs = [job for engine in writing for job in engine.done]
    seconds = max(job.end for job in jobs) - min(came.values())
    return Run(
        [_served(job, came[id(job.ask)]) for job in jobs],
        sum(ask.input_len for ask in asks),
        sum(ask.output_len for ask in asks),
        seconds,
        sum(engine.busy for engine in engines) / seconds / len(engines),
        queued / len(asks),
        sum(engine.preemptions for engine in engines),
    )


def _run(asks: Sequence[Ask], time: StepTime, limits: Limits, replicas: int, way: float) -> tuple[list[Engine], int]:
    """(the engines when all is done, how many requests each has found before it, in all)."""
    engines = [Engine(time, limits) for _ in range(replicas)]
    events: list[tuple[float, int, int]] = []  # when a stretch ends, whose, and which version of it
    version = [0] * replicas
    loads: list[tuple[int, int, int]] = [(0, i, 0) for i in range(replicas)]  # requests, engine, which count of it
    counted = [0] * replicas
    turn = replicas
    queued = 0

    def note(i: int) -> None:
        nonlocal turn
        version[i] += 1
        if engines[i].end < math.inf:
            heappush(events, (engines[i].end, i, version[i]))
        turn += 1  # of those with equally many, the one that has waited longest
        counted[i] = turn
        heappush(loads, (engines[i].unfinished, turn, i))

    loads = []
    for i in range(replicas):
        counted[i] = i
        heappush(loads, (0, i, i))
    delay = time.wait + way
    for ask in asks:
        now = ask.arrival + delay
        while events and events[0][0] <= now:
            _, i, made = heappop(events)
            if made == version[i]:
                engines[i].run()
                note(i)
        while True:
            count, at, i = heappop(loads)
            if at == counted[i]:
                break
        queued += count
        engines[i].add(ask, now)
        note(i)
    while events:
        _, i, made = heappop(events)
        if made == version[i]:
            engines[i].run()
            note(i)
    return engines, queued


def _served(job: Job, came: float) -> Served:
    later = job.ask.output_len - 1
    return Served(job.first - came, (job.end - job.first) / later if later else None, job.end - came)


def closed(count: int, input_len: int, output_len: int, at_once: int, time: StepTime, limits: Limits) -> Engine:
    """One engine after ``count`` requests of one kind, ``at_once`` of them at a time, each client asking again
    ``time.wait`` after its answer; its jobs keep features."""
    engine = Engine(time, limits, keeps_features=True)
    ask = Ask(0.0, input_len, output_len)
    coming = [(0.0, i) for i in range(min(at_once, count))]
    asked = len(coming)
    while coming or engine.end < math.inf:
        if coming and coming[0][0] <= engine.end:
            when, _ = heappop(coming)
            engine.add(ask, when)
            continue
        now = engine.end
        for _ in engine.run():
            if asked < count:
                heappush(coming, (now + time.wait, asked))
                asked += 1
    return engine
