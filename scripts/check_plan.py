"""Is `tool plan` right? One server, two behind a proxy, and two of which one computes prompts and one writes answers,
under a Poisson load, beside what is simulated.

    scripts/check_plan.py demo-engine --out DIR --parts loops,two,apart

What the simulation is told comes from closed loops (a fixed number of requests at a time) on the same servers: the
times of steps from one server that computes alone, and what the others cost from two at once, from one behind the proxy
and from two apart. What are compared are runs at rates that no loop has seen. Needs a machine that does nothing else;
each part takes two to five minutes, and a later one reads what earlier ones have written to --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.planner.engine import Engine, Limits
from toolkit.planner.fit import Fit, fit, read_profile
from toolkit.planner.fleet import Around, Fleet, Group, Run, simulate
from toolkit.planner.traffic import Ask, drawn
from toolkit.profile.http_client import Client
from toolkit.profile.options import Traffic
from toolkit.profile.serving import measure

TOOL = [sys.executable, "-m", "toolkit"]
CORES = 2.0
BATCH, LENGTH = 16, 2048
SHAPES = ((200, 32), (800, 16))  # tokens in and out of the closed loops; the first also at a rate
SEED = 10_000  # of the runs at rates: none of their prompts has been in a closed loop, and so in a cache
GREEDY = {"temperature": 0.0, "ignore_eos": True}
FIGURES = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")
LIMITS = Limits(max_batch_size=BATCH)
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


class Servers:
    """Those of one part, and the proxy in front of them. ``fronts``: their processes, without the engines'."""

    def __init__(self, stack: ExitStack, model: str, part: str) -> None:
        self._tokenizer = Tokenizer.open(Path(model))
        roles = ROLES[part]
        engine = ["--max-batch-size", BATCH, "--session-len", LENGTH, "--threads", int(CORES) // len(roles)]
        engine += ["--speculative", "off"]  # guesses come true as texts have it: no plan knows
        started = [
            stack.enter_context(running(23401 + i, "api_server", model, *engine, *role)) for i, role in enumerate(roles)
        ]
        self.urls = [url for url, _ in started]
        self.fronts = [process for _, process in started]
        self.front = self.urls[0]
        if len(roles) > 1:
            nodes = [word for url in self.urls for word in ("--node", url)]
            apart = ["--serving-strategy", "DistServe", "--prefill-min-bytes", 0] if part == "apart" else []
            self.front, proxy = stack.enter_context(running(23400, "proxy", *nodes, *apart))
            self.fronts.append(proxy)
            time.sleep(3)  # it looks at its nodes

    def load(self, urls: Sequence[str], shape: int, seed: int, count: int, **flags: Any) -> list[list[dict[str, Any]]]:
        """Rows of each of ``urls``, which are loaded at once. ``outside_s``: seconds of the cores that all but engines
        have had for an output token; ``ttft_s``, ``tpot_s``: of each request."""
        size_in, size_out = SHAPES[shape]
        traffic = Traffic(
            seed=seed, num_prompts=count, random_input_len=size_in, random_output_len=size_out,
            tokenizer=self._tokenizer, **flags,
        )  # fmt: skip

        async def go() -> list[list[dict[str, Any]]]:
            each = (
                measure(Client(url, extra=GREEDY), replace(traffic, seed=seed + 100 * i)) for i, url in enumerate(urls)
            )
            return [
                [
                    run.row | {"ttft_s": [one.ttft for one in run.records], "tpot_s": [one.tpot for one in run.records]}
                    for run in runs
                ]
                for runs in await asyncio.gather(*each)
            ]

        before = self._seconds()
        found = asyncio.run(go())
        tokens = sum(row["total_output_tokens"] for rows in found for row in rows)
        outside = (self._seconds() - before) / tokens
        return [[row | {"outside_s": outside} for row in rows] for rows in found]

    def _seconds(self) -> float:
        return time.process_time() + sum(one.cpu_times().user + one.cpu_times().system for one in self.fronts)


def batches(given: argparse.Namespace, name: str, threads: int) -> None:
    """Batches that begin together, in an engine alone: what a step takes that only decodes."""
    words = ["profile", "generation", given.model, "--json", given.out / f"{name}.json", "--rounds", 1]
    words += ["--concurrency", "1,2,4,8,16", "--prompt-tokens", SHAPES[0][0], "--completion-tokens", SHAPES[0][1]]
    words += ["--max-batch-size", BATCH, "--session-len", LENGTH, "--threads", threads]
    subprocess.run([*TOOL, *map(str, words)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def loops(given: argparse.Namespace) -> None:
    """Closed loops: on one of two servers, on both at once, on them through the proxy."""
    batches(given, "alone-batches", 1)
    with ExitStack() as stack:
        servers = Servers(stack, given.model, "two")
        one = servers.urls[:1]
        write(given, "alone-0", servers.load(one, 0, 0, 16, concurrency=(1, 2, 4, 8))[0])
        write(given, "alone-1", servers.load(one, 1, 10, 8, concurrency=(1, 4))[0])
        write(given, "beside", servers.load(servers.urls, 0, 20, 16, concurrency=(1, 8)))
        write(given, "routed", servers.load([servers.front], 0, 30, 16, concurrency=(1,))[0])


def rated(given: argparse.Namespace, part: str) -> None:
    """Requests at random, at a half and at three quarters of what the loops have reached."""
    with ExitStack() as stack:
        servers = Servers(stack, given.model, part)
        if part == "one":
            batches(given, "one-batches", int(CORES))
            write(given, "one-0", servers.load(servers.urls, 0, 40, 24, concurrency=(1, 2, 4, 8, 16))[0])
            write(given, "one-1", servers.load(servers.urls, 1, 50, 24, concurrency=(1, 16))[0])
            best = read(given, "one-0")[-1]["request_throughput"]
        else:
            best = sum(rows[-1]["request_throughput"] for rows in read(given, "beside"))
        if part != "one":  # is the machine as fast as it was then?
            write(given, f"now-{part}", servers.load(servers.urls[-1:], 0, 90, 16, concurrency=(1,))[0])
        if part == "apart":
            for shape in (0, 1):
                rows = servers.load([servers.front], shape, 60 + 10 * shape, 8, concurrency=(1,))[0]
                write(given, f"handed-{shape}", rows)
        rates = tuple(float(f"{share * best:.3g}") for share in (0.5, 0.75))
        write(
            given, f"poisson-{part}", servers.load([servers.front], 0, given.seed, given.count, request_rate=rates)[0]
        )


def write(given: argparse.Namespace, name: str, rows: Any) -> None:
    (given.out / f"{name}.json").write_text(json.dumps(rows))


def read(given: argparse.Namespace, name: str) -> Any:
    return json.loads((given.out / f"{name}.json").read_text())


def told_to_plan(given: argparse.Namespace, part: str) -> tuple[Fit, Around]:
    """What the simulation of ``part`` knows, all from closed loops."""
    name = "one" if part == "one" else "alone"
    rows = [row for kind in ("batches", 0, 1) for row in read_profile(given.out / f"{name}-{kind}.json")]
    fitted = fit(rows, LIMITS)
    if part == "one":
        return fitted, Around()
    alone, routed = read(given, "alone-0")[0], read(given, "routed")[0]
    way = max(0.0, routed["mean_ttft_ms"] - alone["mean_ttft_ms"]) / 1000
    around = Around(way, cores=CORES, token=routed["outside_s"])
    around = replace(around, threads=_share(given, fitted, around))
    if part == "apart":
        around = replace(around, **_handing(given, fitted, around))
    return fitted, around


def _share(given: argparse.Namespace, fitted: Fit, around: Around) -> float:
    """Cores that an engine is worth while two compute: those with which two loops at once take as long as they did."""
    real = [row for rows in read(given, "beside") for row in rows]
    taken = sum(row["duration"] / row["completed"] for row in real)
    low, high = 0.5, 2.0
    for _ in range(12):
        middle = (low + high) / 2
        there = replace(around, threads=middle, token=read(given, "beside")[0][0]["outside_s"], way=0.0)
        simulated = sum(_loop(row, fitted, there, 2) / row["completed"] for row in real)
        low, high = (middle, high) if simulated < taken else (low, middle)
    return low


def _loop(row: dict[str, Any], fitted: Fit, around: Around, engines: int) -> float:
    """Seconds of so many closed loops at once, one on each of as many engines."""
    groups = [Group([Engine(fitted.time, LIMITS)]) for _ in range(engines)]
    fleet, left = Fleet(groups, around), [row["completed"]] * engines
    ask = Ask(0.0, row["total_input_tokens"] // row["completed"], row["total_output_tokens"] // row["completed"])

    def come(i: int, now: float) -> None:
        if left[i]:
            left[i] -= 1
            fleet.come(now + fitted.time.wait, ask, groups[i])

    for i in range(engines):
        for _ in range(row["max_concurrency"]):
            come(i, 0.0)
    done = [0] * engines
    while fleet.turn() is not None:
        for i, group in enumerate(groups):
            for _ in range(len(group.engines[0].done) - done[i]):
                done[i] += 1
                come(i, fleet.now)
    return fleet.now


def _handing(given: argparse.Namespace, fitted: Fit, around: Around) -> dict[str, float]:
    """What handing over takes: what requests one after another needed more than is simulated without it."""
    found = []
    for shape, (size_in, size_out) in enumerate(SHAPES):
        run = simulate([Ask(0.0, size_in, size_out)], fitted.time, LIMITS, 1, around, 1)
        found.append((size_in, read(given, f"handed-{shape}")[0]["mean_ttft_ms"] / 1000 - run.percentile("ttft", 50)))
    (short, first), (long, second) = found
    each = max(0.0, (second - first) / (long - short))
    return {"handing": max(0.0, first - each * short), "handing_token": each}


def compared(given: argparse.Namespace, part: str) -> None:
    fitted, around = told_to_plan(given, part)
    rows = read(given, f"poisson-{part}")
    prefills = int(part == "apart")
    print(f"\n{part}; the closed loops themselves: {fitted.worst:+.1%} at worst; {fitted.time}")
    print(f"as tool plan takes it: {flags(around)}")
    if part != "one":
        then, now = read(given, "alone-0")[0], read(given, f"now-{part}")[0]
        print(f"one request at a time takes {now['duration'] / then['duration']:.3f} times what it took in the loops")
    for row in rows:
        mean_in = row["total_input_tokens"] // row["completed"]
        asks = drawn(given.seed, given.count, row["request_rate"], str(mean_in), str(SHAPES[0][1]), 0)
        run = simulate(asks, fitted.time, LIMITS, len(ROLES[part]) - prefills, around, prefills)
        for name in FIGURES:
            real, simulated = row[name], figure(run, name)
            both = f"measured {real:9.2f}  simulated {simulated:9.2f}"
            print(f"  {row['request_rate']:6.2f} requests/s  {name:18} {both}  {simulated / real - 1:+.1%}")


def flags(around: Around) -> str:
    told = {
        "cores": around.cores, "threads": around.threads, "outside-us": 1e6 * around.token,
        "route-ms": 1e3 * around.way,
        "handover-ms": 1e3 * around.handing, "handover-us": 1e6 * around.handing_token,
    }  # fmt: skip
    return " ".join(f"--{name} {value:.3g}" for name, value in told.items() if value)


def figure(run: Run, name: str) -> float:
    if name == "output_throughput":
        return run.throughput
    percent, kind, _ = name.split("_")
    return 1000 * run.percentile(kind, float(percent[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact that `tool convert` wrote for a CPU")
    parser.add_argument("--out", type=Path, required=True, help="directory of the measured figures; it is made")
    parser.add_argument("--count", type=int, default=300, help="requests at each rate")
    parser.add_argument("--seed", type=int, default=SEED, help="of the requests at rates")
    parser.add_argument("--parts", default="loops,two,apart", help="of loops, one, two (servers) and apart, by commas")
    parser.add_argument("--again", action="store_true", help="measure nothing: compare what --out has")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # servers end with it
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts.split(","):
        if not given.again:
            loops(given) if part == "loops" else rated(given, part)
        if part != "loops":
            compared(given, part)


if __name__ == "__main__":
    main()
