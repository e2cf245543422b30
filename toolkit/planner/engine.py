"""One engine, simulated: the scheduler's rules on a clock that the step times drive.

Steps in which requests only decode follow one another as one *stretch* until a request ends, a cache block runs out or
a request comes: their times are an arithmetic series, for the context grows by a token a request.
"""

from __future__ import annotations

import math
import random
from collections import deque
from copy import deepcopy
from dataclasses import field
from functools import lru_cache
from typing import Any

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.block_manager import blocks_for
from toolkit.engine.feeding import RUSH
from toolkit.engine.pace import HASTY, LONG_STEP, SERVED, SHARED, Pace
from toolkit.engine.plan import Plan
from toolkit.engine.turns import LEAST_TOKENS, split
from toolkit.planner.step_time import Features, StepTime, features
from toolkit.planner.traffic import Ask

BLOCK = 64
LEARNS = 64  # steps of a stretch, its last, that the pace learns from: more tell it little
HOLDS = 0.7  # seconds, mean, that an engine is as fast as it is: how long slow moments were on two virtual cores


@dataclass(frozen=True)
class Limits:
    """As ``EngineOptions`` has them. ``kv_tokens``: that the cache holds, None = as many as are asked for.
    ``paced``: chunks of prompts are cut so that steps take about as long as decoding lets them (CPUs)."""

    max_batch_size: int = 64
    max_prefill_token_num: int = 8192
    kv_tokens: int | None = None
    paced: bool = True
    lookahead: bool = True


@dataclass(eq=False)
class Job:
    """A request in an engine. ``computed``: tokens in the cache; ``length``: known tokens. ``at_first`` and ``at_end``:
    the engine's features summed up to then, where it keeps them."""

    ask: Ask
    came: float
    computed: int = 0
    length: int = 0
    produced: int = 0
    first: float = 0.0
    end: float = 0.0
    looks: int = 0  # steps that it has waited for while its blocks were fetched
    fed: int = -1  # step in which its last turn ended
    taken: int = 0  # tokens of the present one
    at_start: Features | None = None
    at_first: Features | None = None
    at_end: Features | None = None

    @property
    def left(self) -> int:
        return self.length - self.computed

    def feed(self, count: int, step: int) -> None:
        """So many tokens of its prompt were computed in ``step``."""
        self.computed += count
        self.taken += count
        if self.taken >= LEAST_TOKENS:  # its turn is over
            self.fed, self.taken = step, 0


@dataclass
class Stretch:
    """``count`` steps in which ``decodes`` get a token each, and the first (then the only one) computes ``chunks``."""

    start: float
    decodes: list[Job]
    chunks: list[tuple[Job, int]]
    count: int
    first: float  # seconds of the first step, and
    growth: float  # by how much each takes longer than the one before
    sums: Features | None = None

    def end_of(self, steps: int) -> float:
        return self.start + steps * self.first + self.growth * steps * (steps - 1) / 2


@dataclass(eq=False)
class Engine:
    """``run``: from one stretch to the next; ``end``: when the present one ends, inf where nothing is to be done."""

    time: StepTime
    limits: Limits
    keeps_features: bool = False
    more: float = 0.0  # seconds that each step takes longer at present
    mixed: float = 0.0  # seconds that a step with answers and prompts takes more, for each request
    noise: float = 0.0  # standard deviation of how long steps take, as a share, from one moment to the next
    jitter: float = 0.0  # seconds by which what its pace sees of a step's time varies from one to the next, likewise
    seed: int = 0  # of both
    coming: int = 0  # requests that are its already, and on their way
    warm: bool = True  # its pace has learned what steps cost, as that of an engine which has served before
    looks: int = 0  # steps of a busy engine in which it asks for, and then reads, blocks that another one lends
    prompts: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    done: list[Job] = field(default_factory=list)
    stretch: Stretch | None = None
    steps: int = 0
    preemptions: int = 0
    _pace: Pace = field(default_factory=lambda: Pace(None))
    _last: tuple[Plan, float] | None = None  # a step that has ended, which the pace is yet to learn of
    _total: Features | None = None
    _leaving: int = 0  # requests whose end the next step does not know of: their places are not free yet
    _rushed: int = 0  # steps in which newcomers came before who has waited longest
    _unseen: bool = False  # a request waits that the next step was made without
    _factor: float = 1.0  # times what its content takes that a step takes
    _holds: float = -math.inf  # until then
    _ended: float = 0.0  # the last step

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        if self.warm and self.limits.paced:
            self._pace = deepcopy(_learned(self.time, self.limits, self.mixed))

    @property
    def end(self) -> float:
        return math.inf if self.stretch is None else self.stretch.end_of(self.stretch.count)

    @property
    def unfinished(self) -> int:
        return self.running + len(self.waiting) + self.coming

    @property
    def running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    def add(self, ask: Ask, now: float) -> Job:
        """A request comes."""
        job = Job(ask, now, length=ask.input_len)
        self.waiting.append(job)
        if self.keeps_features:
            job.at_start = self._sum()
            if self.stretch is not None and self.end > self.stretch.start:  # else, of steps that take no time, none is
                passed = (now - self.stretch.start) / (self.end - self.stretch.start)
                job.at_start = job.at_start + passed * self._contents(self.stretch)
        if self.stretch is None:
            self._begin(now, now)
        else:
            self._cut(self.stretch, now)
        return job

    def rest(self, now: float) -> float:
        """Seconds for which it has had nothing to do."""
        return now - self._ended if self.stretch is None else 0.0

    def slow(self, more: float, now: float) -> bool:
        """From the next step on each takes ``more`` seconds longer than its content does. Whether that is new."""
        if more == self.more:
            return False
        self.more = more
        if self.stretch is not None:
            self._cut(self.stretch, now)
        return True

    def _cut(self, stretch: Stretch, now: float) -> None:
        """Let it end with the step of ``now``: the next one is another."""
        if stretch.count > 1:
            stretch.count = min(stretch.count, _steps_until(stretch, now))

    def run(self) -> list[Job]:
        """End the stretch and begin the next one; the requests that ended in it."""
        stretch = self.stretch
        assert stretch is not None
        end, steps = stretch.end_of(stretch.count), stretch.count
        self.steps += steps
        self._ended = end
        if self.keeps_features:
            self._total = self._sum() + self._contents(stretch)
        last = end - (stretch.first + stretch.growth * (steps - 1))
        ahead = not self._waits_for(stretch) and self.limits.lookahead  # the next step was made as the last one began
        for job in stretch.decodes:
            if not job.produced:  # all but one token of its prompt had been computed
                job.first, job.at_first = end, self._total
            job.computed += steps
            job.produced += steps
            job.length += steps
        for job, count in stretch.chunks:
            job.feed(count, self.steps)
            if job.computed == job.length:
                job.produced += 1
                job.length += 1
                if job.produced == 1:
                    job.first, job.at_first = end, self._total
        if stretch.chunks:  # who has one token left goes on as those that write, be it the prompt's last one
            self.decoding += [job for job in self.prompts if job.left == 1]
            self.prompts = [job for job in self.prompts if job.left > 1]
        ended = [job for job in self.decoding if job.produced >= job.ask.output_len]
        for job in ended:
            job.end, job.at_end = end, self._total
        if ended:
            self.decoding = [job for job in self.decoding if job.produced < job.ask.output_len]
            self.done += ended
        if not self.running:  # unless somebody waited and had a place there was nothing to make it of
            ahead = ahead and len(ended) < self.limits.max_batch_size and any(job.came <= last for job in self.waiting)
        self._leaving = len(ended) if ahead else 0
        if not ahead:
            self._learn()
        self._begin(end, last if ahead else end)
        return ended

    def _waits_for(self, stretch: Stretch) -> bool:
        """Whether the last step of ``stretch`` is so long that the next one is made when it has ended. As in the real
        loop that is what the pace takes it to be, which knows of the steps before."""
        if not self.limits.paced:
            return stretch.end_of(stretch.count) - stretch.end_of(stretch.count - 1) > LONG_STEP
        chunks: list[Any] = [(job, job.computed, count) for job, count in stretch.chunks]
        known = max(0, stretch.count - LEARNS)
        plan = Plan(decodes=list(stretch.decodes), chunks=chunks, submitted=stretch.end_of(known))  # type: ignore[arg-type]
        for step in range(known + 1, stretch.count + 1):
            self._learn()
            self._last = plan, stretch.end_of(step)
        return self._pace.is_long(plan)

    def _learn(self) -> None:
        """Have the pace know of the last step."""
        if self._last is not None:
            plan, end = self._last
            late = self._draw.gauss(0.0, self.jitter / math.sqrt(2)) if self.jitter else 0.0  # each time has two ends
            self._pace.ended(plan, end + late)
            self._last = None

    def _begin(self, now: float, seen: float) -> None:
        """Schedule what comes after ``now``, of the requests that had come by ``seen``."""
        self._make_room()
        decodes, budget = list(self.decoding), self._budget(seen)
        self._admit(seen)
        chunks = self._chunks(budget)
        if not decodes and not chunks:
            self.stretch = None
            assert not self.waiting or not self.running, "nothing runs, and yet somebody waits"
            return
        soon = self._unseen or (self._leaving and self.waiting)  # the next step may begin what this one could not
        begins = any(not job.produced for job in decodes)
        steps = 1 if chunks or soon or begins else self._steps(decodes)
        tokens = len(decodes) + sum(count for _, count in chunks)
        rows = len(decodes) + sum(job.computed + count == job.length for job, count in chunks)
        context = float(sum(job.length for job in decodes))
        pairs = sum(count * (job.computed + count / 2) for job, count in chunks)
        factor = self._speed(now)
        beyond = self.mixed * (len(decodes) + len(chunks)) if decodes and chunks else 0.0
        first = factor * (self.time.seconds(tokens, context, pairs, rows) + beyond) + self.more
        sums = features(self.time.knots, tokens, context, pairs, rows) if self.keeps_features else None
        self.stretch = Stretch(now, decodes, chunks, steps, first, factor * self.time.context * len(decodes), sums)
        if self.noise:
            self._cut(self.stretch, self._holds)

    def _speed(self, now: float) -> float:
        """Times what their content takes that steps take at present: another one from time to time, with which an
        engine that is always busy does as much as without."""
        if self.noise and now >= self._holds:
            self._factor = math.exp(self._draw.gauss(self.noise * self.noise / 2, self.noise))
            self._holds = now + self._draw.expovariate(1 / HOLDS)
        return self._factor

    def _make_room(self) -> None:
        """For a token of each that decodes; where there is none the last that came gives up its blocks."""
        room = self.limits.kv_tokens
        while room is not None and self.decoding and self.running > 1:
            more = sum(blocks_for(job.length, BLOCK) for job in self.decoding)
            more += sum(blocks_for(job.computed, BLOCK) for job in self.prompts)
            if more * BLOCK <= room:
                return
            holders = self.prompts or self.decoding
            victim = max(holders, key=lambda job: job.came)
            holders.remove(victim)
            victim.computed = 0
            self.preemptions += 1
            self.waiting.appendleft(victim)

    def _budget(self, seen: float) -> int:
        """Prompt tokens of a step, as ``Scheduler`` has it; ``Pace`` learns from the simulated steps."""
        most = max(1, self.limits.max_prefill_token_num - len(self.decoding))
        waits = [job for job in self.waiting if job.came <= seen] if self.limits.paced else []
        if not self.limits.paced or not (self.prompts or waits):
            return most
        before = max((job.computed for job in self.prompts), default=0)
        starts = [*self.prompts, *waits]
        need = sum(job.left for job in starts if 1 < job.left <= LEAST_TOKENS)
        if self.running + self._leaving + len(waits) < 2:
            times, need = SERVED, 0
        else:
            times = HASTY if need else SHARED
        budget = self._pace.budget(len(self.decoding), before, most, times)
        return budget if budget >= need else min(need, self._pace.budget(len(self.decoding), before, most, 1.0))

    def _admit(self, seen: float) -> None:
        self._unseen = False
        held = sum(blocks_for(max(job.length, job.computed), BLOCK) for job in (*self.prompts, *self.decoding))
        places = self.limits.max_batch_size - self._leaving
        busy = self.running > 0
        for job in list(self.waiting):
            if self.running >= places:
                return
            if job.came > seen:
                self._unseen = True
                return
            if busy and job.ask.cached and job.looks < self.looks:
                job.looks += 1
                self._unseen = True
                continue
            need = blocks_for(job.length + 1, BLOCK)
            room = self.limits.kv_tokens
            if self.running and room is not None and (held + need) * BLOCK > room:
                return
            self.waiting.remove(job)
            job.computed = min(job.ask.cached, job.length - 1)
            self.prompts.append(job)
            held += need

    def _chunks(self, budget: int) -> list[tuple[Job, int]]:
        """The budget in equal parts among prompts, by turn; each is its own user's, as over HTTP."""
        if not self.prompts:
            self._rushed = 0
            return []
        order = self._order()
        parts = split(budget, [(job.left, 1.0) for job in order])
        return [(job, part) for job, part in zip(order, parts, strict=True) if part]

    def _order(self) -> list[Job]:
        """Newcomers' prompts first, as ``Scheduler`` has it, then those that have waited longest for a turn."""
        waited = sorted(self.prompts, key=lambda job: job.fed if job.fed >= 0 else self.steps)
        quick = sorted(self.prompts, key=lambda job: (job.fed, job.left > LEAST_TOKENS))
        self._rushed = self._rushed + 1 if quick[0] is not waited[0] else 0
        if self._rushed > RUSH:
            self._rushed = 0
            return waited
        return quick

    def _steps(self, decodes: list[Job]) -> int:
        """Steps until the first request ends or the cache is full."""
        count = min(job.ask.output_len - job.produced for job in decodes)
        room = self.limits.kv_tokens
        if room is not None and self.running > 1:
            lengths = np.array([job.length for job in decodes])
            while count > 1 and int((-(-(lengths + count - 1) // BLOCK)).sum()) * BLOCK > room:
                count = count // 2
        return max(1, count)

    def _sum(self) -> Features:
        if self._total is None:
            self._total = np.zeros(len(self.time.slopes) + 4)
        return self._total

    def _contents(self, stretch: Stretch) -> Features:
        assert stretch.sums is not None
        grown = np.zeros_like(stretch.sums)
        grown[-3] = len(stretch.decodes) * stretch.count * (stretch.count - 1) / 2
        found: Features = stretch.sums * stretch.count + grown
        return found


@lru_cache(maxsize=16)
def _learned(time: StepTime, limits: Limits, mixed: float) -> Pace:
    """What an engine's pace knows after some requests, long before the first that counts."""
    engine, now = Engine(time, limits, warm=False, mixed=mixed), -1e6
    for size in (512, 64, 256, 128):
        engine.add(Ask(now, size, 32), now)
        while engine.stretch is not None and len(engine.prompts) > 0:
            engine.run()
        now = engine.stretch.start if engine.stretch is not None else now
    while engine.stretch is not None:
        engine.run()
    return engine._pace


def _steps_until(stretch: Stretch, now: float) -> int:
    """Steps of a stretch that have begun by ``now``, 1 or more."""
    passed = max(0.0, now - stretch.start)
    a, b = stretch.growth / 2, stretch.first - stretch.growth / 2
    if a <= 0 and b <= 0:  # they take no time
        return stretch.count
    done = passed / b if a <= 0 else (math.sqrt(b * b + 4 * a * passed) - b) / (2 * a)
    return max(1, math.floor(done + 1e-9) + 1)
