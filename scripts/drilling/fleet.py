"""What the drill does to a fleet: to which of its servers, when, and who was under way there."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

DUTY_S = (0.02, 0.2)  # a server that is slow runs so long, and stands so long, in turn


@dataclass
class Disturbance:
    """``kind`` done to ``server`` from ``began`` to ``ended`` (time.monotonic()); ``may_lose``: whether what was under
    way there may be lost. ``lost``: how many have been."""

    kind: str
    server: str
    began: float
    may_lose: bool
    ended: float = 0.0
    lost: int = 0


class Fleet(Protocol):
    """``url``: where clients ask; ``where``: the header by which answers say who has made them, "" = ``sent`` knows."""

    url: str
    model: str
    where: str
    kinds: Sequence[str]

    def servers(self) -> list[str]:
        """Those that can be disturbed now, by name."""
        ...

    async def disturb(self, kind: str, server: str, seconds: float) -> None:
        """Until it is over and the server works again."""
        ...

    def may_lose(self, kind: str, seconds: float) -> bool: ...

    def sent(self, request: str) -> dict[str, float]:
        """Servers that have had the request, and when."""
        ...


@dataclass
class Drill:
    """Disturbs a fleet, one server at a time, until ``stop``."""

    fleet: Fleet
    kinds: Sequence[str]
    seed: int = 0
    done: list[Disturbance] = field(default_factory=list)

    async def run(self, stop: asyncio.Event, pause: tuple[float, float] = (2.0, 8.0)) -> None:
        draw = random.Random(self.seed)
        bag: list[str] = []
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), draw.uniform(*pause))
                return
            bag = bag or draw.sample(list(self.kinds), len(self.kinds))  # each kind as often as any other
            kind, servers = bag.pop(), self.fleet.servers()
            if len(servers) < 2:
                await asyncio.sleep(1)
                continue
            server, seconds = draw.choice(sorted(servers)), draw.choice((1.0, 3.0, 6.0, 25.0))
            told = Disturbance(kind, server, time.monotonic(), self.fleet.may_lose(kind, seconds))
            self.done.append(told)
            await self.fleet.disturb(kind, server, seconds)
            told.ended = time.monotonic()

    def excuse(self, began: float, ended: float, sent: dict[str, float]) -> Disturbance | None:
        """What has lost a request that was at these servers from then on; None where nothing may have."""
        for one in self.done:
            over = one.ended or float("inf")
            at = sent.get(one.server)
            if one.may_lose and at is not None and max(at, began) <= over and ended >= one.began:
                return one
        return None


async def stand(pids: Sequence[int], seconds: float) -> None:
    """The processes stand still so long."""
    tell(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        tell(pids, signal.SIGCONT)


async def crawl(pids: Sequence[int], seconds: float) -> None:
    """The processes get a tenth of their time."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            tell(pids, signal.SIGSTOP)
            await asyncio.sleep(DUTY_S[1])
            tell(pids, signal.SIGCONT)
            await asyncio.sleep(DUTY_S[0])
    finally:
        tell(pids, signal.SIGCONT)


def url_of(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    """Where a process is ready, as its log says within so many seconds. SystemExit where it does not."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if found := re.search(r"ready at (http://[\d.]+:\d+)", log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"{log.stem} did not start: {log.read_text(errors='replace')[-2000:]}")


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Have it end, by force after so many seconds."""
    tell(family(process.pid), signal.SIGCONT)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()
    process.wait()


def tell(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def family(pid: int) -> list[int]:
    """A process and those that it has started."""
    try:
        first = psutil.Process(pid)
        return [pid, *(child.pid for child in first.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
