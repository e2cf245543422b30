"""Several engines behind a proxy, simulated."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.planner.engine import BLOCK, Engine, Job, Limits
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import Ask

SPOKEN = -1, -1  # in the place of an engine: what is around them has done its work for a request
WAY = -2  # likewise: the way of a request has ended, and which one's
COLD = 1.5  # seconds of rest, after which further ones make nothing colder
LOOKS = 2  # steps of a busy engine between that it hears of blocks and that it has them, as ``Keeper`` fetches them


@dataclass(frozen=True)
class Served:
    """One request as its client sees it, in seconds."""

    ttft: float
    tpot: float | None
    e2e: float


@dataclass(frozen=True)
class Run:
    """What came of a simulated load. ``served``: in the order in which they came; ``seconds``: from the first request
    to the last answer; ``busy``: mean share of them in which an engine computed; ``queued``: mean requests in one
    engine when another comes."""

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


@dataclass(frozen=True)
class Around:
    """What there is beside engines. ``way``: seconds of a request through a proxy. ``handing``: seconds until an engine
    that writes answers has the blocks that another one lends it; ``handing_token``: of the latter, for each token.
    ``cores``: that all engines, and what speaks for them, share; None: each has its own. ``threads``: cores of an
    engine while it computes; ``step``: seconds that each of its steps takes longer while others write answers, for
    they read memory, too; ``token``: core-seconds of each output token outside of engines: HTTP, proxy, client;
    ``request``: of each request, on its way, and ``rested`` more of one that comes where no engine computes.
    ``noise``: standard deviation of how long each engine's steps take, as a share, from one moment to the next;
    ``jitter``: of single steps, in seconds: where they vary an engine cuts prompts now smaller, now larger.
    ``mixed``: seconds that a step with answers and prompts takes beyond what it has of both, for each request.
    ``cold``: by how much a request's way is longer for each second that its engine has rested."""

    way: float = 0.0
    handing: float = 0.0
    handing_token: float = 0.0
    cores: float | None = None
    threads: float = 1.0
    token: float = 0.0
    step: float = 0.0
    noise: float = 0.0
    jitter: float = 0.0
    mixed: float = 0.0
    request: float = 0.0
    cold: float = 0.0
    rested: float = 0.0


ALONE = Around()


def simulate(
    asks: Sequence[Ask],
    time: StepTime,
    limits: Limits,
    replicas: int,
    around: Around = ALONE,
    prefills: int = 0,
    seed: int = 0,
    at_once: int | None = None,
) -> Run:
    """``asks``, by arrival, on so many engines; each request goes where fewest are (the proxy's default). Each must fit
    into an engine's cache. ``prefills``: engines that compute prompts alone; the others then begin with what these
    lend, the whole blocks of a prompt. ``seed``: of the lots among engines with equally many requests.
    ``at_once``: so many clients ask one after the other, whenever requests would have come."""
    copied = replace(time, slopes=tuple(slope + around.handing_token for slope in time.slopes))
    looks, first = LOOKS if prefills else 0, seed << 32
    engine = partial(Engine, limits=limits, noise=around.noise, jitter=around.jitter, mixed=around.mixed)
    writing = Group([engine(time, looks=looks, seed=first + i) for i in range(replicas)], seed)
    first += replicas
    lending = Group([engine(copied, seed=first + i) for i in range(prefills)], seed)
    if prefills:  # both have it to do with a request
        around = replace(around, request=around.request / 2, rested=around.rested / 2)
    fleet = Fleet([writing, lending], around)
    came: dict[int, float] = {}  # by the ids of what engines are asked, which they keep
    heads: dict[int, Ask] = {}  # requests that compute a prompt, for whom

    def send(ask: Ask, now: float) -> None:
        first = replace(ask, output_len=1) if prefills else replace(ask)
        came[id(first)] = now
        if prefills:
            heads[id(first)] = ask
        fleet.send(now, time.wait + around.way, first, lending if prefills else writing)

    left = deque(asks)
    for _ in range(min(len(asks), at_once or len(asks))):
        send(left[0], 0.0 if at_once else left[0].arrival)
        left.popleft()
    while (ended := fleet.turn()) is not None:
        for job in ended:
            if (wanted := heads.get(id(job.ask))) is not None:
                later = replace(wanted, cached=(wanted.input_len - 1) // BLOCK * BLOCK)
                came[id(later)] = came[id(job.ask)]
                fleet.send(fleet.now, around.handing + time.wait + around.way, later, writing)
            elif left:
                send(left.popleft(), fleet.now)
    jobs = [job for engine in writing.engines for job in engine.done]
    jobs.sort(key=lambda job: came[id(job.ask)])
    ends = fleet.clock([job.end for job in jobs])
    firsts = fleet.clock([job.first for job in jobs])
    seconds = max(ends) - min(came.values())
    return Run(
        [_served(job, came[id(job.ask)], first, end) for job, first, end in zip(jobs, firsts, ends, strict=True)],
        sum(ask.input_len for ask in asks),
        sum(ask.output_len for ask in asks),
        seconds,
        fleet.busy / seconds / (replicas + prefills),
        writing.queued / len(asks),
        sum(engine.preemptions for group in fleet.groups for engine in group.engines),
    )


class Group:
    """Engines that do the same. ``queued``: how many requests each request has found in its engine, in all."""

    def __init__(self, engines: list[Engine], seed: int = 0) -> None:
        self.engines = engines
        self.queued = 0
        self._draw = random.Random(len(engines) + (seed << 32))
        self._counted = [0] * len(engines)  # which entry of ``_loads`` holds
        self._loads: list[tuple[int, float, int, int]] = []  # requests, a draw, engine, which count of it
        for i in range(len(engines)):
            self.note(i)

    def note(self, i: int) -> None:
        """It has more or fewer requests."""
        self._counted[i] += 1
        heappush(self._loads, (self.engines[i].unfinished, self._draw.random(), i, self._counted[i]))

    def choose(self) -> int:
        """Where fewest are; of several one by chance, as the proxy has it."""
        while True:
            count, _, i, counted = heappop(self._loads)
            if counted == self._counted[i]:
                self.queued += count
                return i


class Fleet:
    """Engines on one clock. They compute by a clock of their own, which goes slower the more wants the cores that they
    share: all of them and what is around them are served alike, as the system does it. ``now``: seconds; ``busy``:
    those in which each has computed, in all."""

    def __init__(self, groups: list[Group], around: Around) -> None:
        self.groups = groups
        self.now = self.busy = 0.0
        self._around = around
        self._own = 0.0  # the engines' clock
        self._slow = 1.0  # seconds that one of its seconds takes
        self._computing = 0  # engines that do
        self._speaking = 0  # requests with which what is around them has work
        self._wants = {(g, i): 0.0 for g, group in enumerate(groups) for i in range(len(group.engines))}  # cores
        self._version = dict.fromkeys(self._wants, 0)
        self._writes = dict.fromkeys(self._wants, False)  # answers
        self._ends: list[tuple[float, int, int, int]] = []  # when a stretch ends, whose, and which version of it
        self._sent: list[tuple[float, int, float, Ask, int]] = []  # when, and how long its way is, to which group
        self._coming: dict[int, tuple[Ask, int, int | None]] = {}  # on their way, to which group, and engine if chosen
        self._count = 0
        self._clock: list[tuple[float, float]] = [(0.0, 0.0)]

    def send(self, when: float, way: float, ask: Ask, group: Group) -> None:
        """A request to an engine of ``group``, ``way`` seconds away where nobody wants the cores: that is work, too."""
        self._count += 1
        heappush(self._sent, (when, self._count, max(0.0, way), ask, self.groups.index(group)))

    def clock(self, times: Sequence[float]) -> list[float]:
        """Seconds at which it was so late by the engines' clock."""
        if self._around.cores is None:
            return list(times)
        own, real = zip(*self._clock, strict=True)
        return [float(t) for t in np.interp(times, own, real)]

    def turn(self) -> list[Job] | None:
        """What happens next: the requests that end with it; None: nothing more."""
        while self._ends and self._ends[0][3] != self._version.get(self._ends[0][1:3], 0):
            heappop(self._ends)
        ends = self._now_at(self._ends[0][0]) if self._ends else math.inf
        if self._sent and self._sent[0][0] < ends:
            when, number, way, ask, g = heappop(self._sent)
            self._pass(when, self._own_at(when))
            self._coming[number] = ask, g, None
            heappush(self._ends, (self._own + way, WAY, number, 0))
            self._speak()
            return []
        if not self._ends:
            return None
        own, g, i, _ = heappop(self._ends)
        self._pass(ends, own)
        if (g, i) == SPOKEN:
            self._speaking -= 1
            self._share()
            return []
        if g == WAY:
            self._arrive(i)
            return []
        ended = self.groups[g].engines[i].run()
        self._note(g, i)
        return ended

    def _arrive(self, number: int) -> None:
        ask, g, i = self._coming.pop(number)
        if i is None:
            i = self.groups[g].choose()
            engine = self.groups[g].engines[i]
            if cold := self._around.cold * min(engine.rest(self._own), COLD):
                engine.coming += 1
                self.groups[g].note(i)
                self._coming[number] = ask, g, i
                heappush(self._ends, (self._own + cold, WAY, number, 0))
                return
        else:
            engine = self.groups[g].engines[i]
            engine.coming -= 1
        engine.add(ask, self._own)
        self._note(g, i)

    def _now_at(self, own: float) -> float:
        return own if self._around.cores is None else self.now + (own - self._own) * self._slow

    def _own_at(self, now: float) -> float:
        return now if self._around.cores is None else self._own + (now - self.now) / self._slow

    def _pass(self, now: float, own: float) -> None:
        self.busy += (now - self.now) * self._computing
        self.now, self._own = now, own
        if self._around.cores is not None:
            self._clock.append((own, now))

    def _note(self, g: int, i: int) -> None:
        engine = self.groups[g].engines[i]
        self.groups[g].note(i)
        self._push(g, i)
        around, stretch, before = self._around, engine.stretch, self._wants[g, i]
        told = around.token * len(stretch.decodes) / stretch.first if stretch is not None and stretch.first else 0.0
        self._wants[g, i] = 0.0 if stretch is None else around.threads + told
        self._computing += (stretch is not None) - (before > 0)
        if around.cores is None:
            return
        self._share()
        writes = stretch is not None and bool(stretch.decodes)
        if writes != self._writes[g, i]:
            self._writes[g, i] = writes
            if around.step:
                self._crowd()

    def _share(self) -> None:
        assert self._around.cores is not None
        self._slow = max(1.0, (sum(self._wants.values()) + self._speaking) / self._around.cores)

    def _speak(self) -> None:
        """What is around the engines has a core's work with a request that comes."""
        work = self._around.request + (0.0 if self._computing else self._around.rested)
        if self._around.cores is None or not work:
            return
        self._speaking += 1
        self._share()
        heappush(self._ends, (self._own + work, *SPOKEN, 0))

    def _crowd(self) -> None:
        """One begins to write answers, or no longer does: for the others reading takes longer, or no longer."""
        writing = sum(self._writes.values())
        for (g, i), writes in self._writes.items():
            if self.groups[g].engines[i].slow(self._around.step * (writing > writes), self._own):
                self._push(g, i)

    def _push(self, g: int, i: int) -> None:
        self._version[g, i] += 1
        if (end := self.groups[g].engines[i].end) < math.inf:
            heappush(self._ends, (end, g, i, self._version[g, i]))


def _served(job: Job, came: float, first: float, end: float) -> Served:
    later = job.ask.output_len - 1
    return Served(first - came, (end - first) / later if later else None, end - came)


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
