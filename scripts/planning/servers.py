"""The servers of one part of ``scripts/check_plan.py``, and loads on them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.arrivals import poisson_starts
from toolkit.profile.exchange import Exchange
from toolkit.profile.http_client import Client, TextAsk
from toolkit.profile.load import raise_if_all_failed, run_at
from toolkit.profile.options import Traffic
from toolkit.profile.serving import WARM_UP, asks_of, row

TOOL = [sys.executable, "-m", "toolkit"]
ALL = sorted(os.sched_getaffinity(0))  # cores
BATCH, LENGTH = 16, 2048
OTHERS = 0.05  # cores that other programs may have meanwhile: what was measured beside more does not count
# Seconds before each of requests that come one at a time: few, for an engine that has rested is slower at first, its
# caches others' meanwhile; and as many as between requests that come at random, which tell how much.
REST = 0.05
RESTS = [-0.3 * math.log(1 - (7 * i % 15 + 0.5) / 15) for i in range(15)]
# When requests come of which each second one comes while its server has another, with a prompt or with its answer, and
# each pair behind a rest: a step with both takes a tenth more there than where two clients ask without one.
PAIRS = [0.7 * (i // 2) + i % 2 * 0.03 * (i // 2 % 5 + 1) for i in range(30)]
ENOUGH = 64  # tokens that a round of prompts has, or one prompt: a slow moment would be all that few small ones tell
SHORT = 8  # tokens of prompts of batches that read little
WHOLE = 8192  # tokens of a step: no prompt is cut
# Into which it is, as beside answers: of so few tokens a prompt that comes alone takes longer, its engine has rested.
PIECES = (1, 2, 4, 8, 12, 16, 32)
PROMPTS = (1, 800)  # tokens: the way to a first one, and much of what is before a token
TRIES = 3  # of batches beside fewer
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# Guesses come true as texts have it: no plan knows.
ENGINE = ["--max-batch-size", BATCH, "--session-len", LENGTH, "--threads", 1, "--speculative", "off"]
ROLES: dict[str, list[list[str]]] = {
    "one": [[]],
    "two": [[], []],
    "apart": [["--role", "prefill"], ["--role", "decode"]],
}


@contextmanager
def running(port: int, *words: object) -> Iterator[tuple[str, psutil.Process]]:
    """A server of ours until the block ends."""
    process = subprocess.Popen(
        [*TOOL, "serve", *map(str, words), "--server-port", str(port)], stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def is_engine(process: psutil.Process) -> bool:
    return "toolkit.engine.process.worker" in " ".join(process.cmdline())


def place(*parents: psutil.Process) -> None:
    """Wait until each has an engine, and keep each of these on a core of its own; all else, ourselves included, on the
    cores that are left, or where none is on all."""
    rest = ALL[: -len(parents)] or ALL
    for parent, core in zip(parents, reversed(ALL), strict=False):
        placed = False
        while not placed and parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
            for process in (psutil.Process(), parent, *parent.children(recursive=True)):
                with suppress(psutil.Error, ProcessLookupError):  # one that has ended
                    engine = is_engine(process)
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, [core] if engine else rest)
                    placed |= engine
            time.sleep(0.02)


class Servers:
    """Those of one part, and the proxy in front of them. ``seed``: of the first load; each has prompts of its own, and
    so finds none in a cache."""

    def __init__(self, stack: ExitStack, model: str, part: str, seed: int) -> None:
        self._tokenizer = Tokenizer.open(Path(model))
        self._seed = seed
        roles = ROLES[part]
        started = [
            stack.enter_context(running(23401 + i, "api_server", model, *ENGINE, *role)) for i, role in enumerate(roles)
        ]
        place(*(process for _, process in started))
        self.urls = [url for url, _ in started]
        self._fronts = [process for _, process in started]  # without the engines' processes
        self._engines = [one for parent in self._fronts for one in parent.children(recursive=True) if is_engine(one)]
        self.front = self.urls[0]
        if len(roles) > 1:
            nodes = [word for url in self.urls for word in ("--node", url)]
            apart = ["--serving-strategy", "DistServe", "--prefill-min-bytes", 0] if part == "apart" else []
            self.front, proxy = stack.enter_context(running(23400, "proxy", *nodes, *apart))
            self._fronts.append(proxy)
            time.sleep(3)  # it looks at its nodes

    def load(
        self,
        urls: Sequence[str],
        shape: tuple[int, int],
        count: int,
        concurrency: int | None = None,
        rate: float = math.inf,
        rest: float | Sequence[float] = 0.0,
        starts: Sequence[float] | None = None,
    ) -> list[dict[str, Any]]:
        """A row of each of ``urls``, which are loaded at once; ``rest``: seconds before each request, none of its own;
        those of several by turn. ``starts``: when each comes; None: at ``rate`` by chance, or as ``concurrency`` says.

        ``outside_s``: seconds of the cores that all but engines have had for an output token; ``engine_s``: that these
        have had for a request; ``others``: cores that programs other than these had meanwhile; ``ttft_s``, ``tpot_s``:
        of each request; ``seed``: of their arrivals."""
        self._seed += 1000
        traffics = [
            Traffic(
                seed=self._seed + i, num_prompts=count, random_input_len=shape[0], random_output_len=shape[1],
                tokenizer=self._tokenizer,
            )
            for i in range(len(urls))
        ]  # fmt: skip
        asks = [asks_of(traffic, 0) for traffic in traffics]
        clients = [Client(url, extra=GREEDY) for url in urls]

        rests = list(rest) if isinstance(rest, Sequence) else [rest]

        async def ask_of(client: Client, number: int, ask: TextAsk) -> Exchange:
            await asyncio.sleep(rests[number % len(rests)])
            return await client.run(ask)

        async def go() -> list[tuple[list[Exchange], float]]:
            for client in clients:
                await client.choose_model()
                await client.run(WARM_UP)
            before, all_before, ours, began = self._seconds(), busy(), whole(), time.monotonic()
            engines = seconds(self._engines)
            runs = [
                run_at(
                    some, lambda number, ask, client=client: ask_of(client, number, ask), concurrency=concurrency,
                    starts=starts or (None if rate == math.inf else poisson_starts(traffic.seed, count, rate)),
                )
                for some, client, traffic in zip(asks, clients, traffics, strict=True)
            ]  # fmt: skip
            found = await asyncio.gather(*runs)
            self._taken, self._computed = self._seconds() - before, seconds(self._engines) - engines
            self._others = (busy() - all_before - whole() + ours) / (time.monotonic() - began)
            return found

        rows = []
        for client, traffic, (exchanges, duration) in zip(clients, traffics, asyncio.run(go()), strict=True):
            records = [client.record(exchange) for exchange in exchanges]
            raise_if_all_failed(records)
            one = row(traffic, rate, concurrency, records, duration)
            each = {
                "ttft_s": [r.ttft for r in records],
                "tpot_s": [r.tpot for r in records],
                "rests": rests,
                "seed": traffic.seed,
                "began": exchanges[0].start,
            }
            rows.append(one | each)
        tokens = sum(one["total_output_tokens"] for one in rows)
        engine = self._computed / sum(one["completed"] for one in rows)
        common = {"outside_s": self._taken / tokens, "engine_s": engine, "others": self._others}
        return [one | common for one in rows]

    def _seconds(self) -> float:
        return time.process_time() + seconds(self._fronts)


def seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(one.cpu_times().user + one.cpu_times().system for one in processes)


def busy() -> float:
    """Seconds that all cores have been busy; of a virtual machine also those that others had instead."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)


def whole() -> float:
    """Seconds of cores that we and all that we started have had."""
    own = os.times()
    found = own.children_user + own.children_system  # of those that have ended
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def batches(model: str, shape: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """Requests that begin together, in an engine alone: what a step takes that only decodes, behind long and short
    prompts, for among prompts of one length what is read grows as the batch does; what a piece of a prompt takes; and
    prompts of ``PROMPTS`` tokens alone."""
    found = []
    kinds = [(shape[0], "16,8,4,2,1", 1, WHOLE), (SHORT, "16,8,4,2", 1, WHOLE)]
    kinds += [(shape[0], "1", 1, size) for size in PIECES]
    kinds += [(size, "1", max(1, ENOUGH // size), WHOLE) for size in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        for tokens, at_once, times, most in kinds:
            words = ["profile", "generation", model, "--json", file, "--rounds", times * rounds]
            words += ["--concurrency", at_once, "--prompt-tokens", tokens, "--completion-tokens", shape[1]]
            words += ["--max-prefill-token-num", most]
            command = [*TOOL, *map(str, [*words, *ENGINE])]
            for _ in range(TRIES):
                before, began = busy() - whole(), time.monotonic()
                with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    place(psutil.Process(process.pid))
                assert process.returncode == 0
                if busy() - whole() - before <= OTHERS * (time.monotonic() - began):
                    break
            found += json.loads(file.read_text())
    return found
