"""Is `tool plan` right? One server, two behind a proxy, and two of which one computes prompts and one writes answers,
under a Poisson load, beside what is simulated.

The step times come from closed loops on the same servers (a fixed number of requests at a time); what is compared are
runs at rates that no closed loop has seen. Needs a machine that does nothing else, for some five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from toolkit.planner.engine import Limits
from toolkit.planner.fit import Fit, fit, read_profile
from toolkit.planner.fleet import Run, simulate
from toolkit.planner.traffic import drawn

TOOL = [sys.executable, "-m", "toolkit"]
BATCH, LENGTH = 16, 2048
SHAPES = ((200, 64), (800, 32))  # tokens in and out of the closed loops; the first also at a rate
SEED = 10_000  # of the runs at rates: none of their prompts has been in a closed loop, and so in a cache
FIGURES = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


@contextlib.contextmanager
def running(port: int, *words: object) -> Iterator[str]:
    """A server of ours until the block ends."""
    process = subprocess.Popen(
        [*TOOL, "serve", *map(str, words), "--server-port", str(port)], stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def load(url: str, model: str, file: Path, *flags: object) -> subprocess.Popen[bytes]:
    words = ["profile", "api_server", url, "--tokenizer", model, "--json", str(file), *map(str, flags)]
    return subprocess.Popen([*TOOL, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def loops(urls: list[str], model: str, out: Path, most: int) -> list[list[Path]]:
    """Closed loops on all servers side by side; the files of each."""
    found: list[list[Path]] = [[] for _ in urls]
    for shape, (size_in, size_out) in enumerate(SHAPES):
        sizes = ",".join(str(c) for c in (1, 2, 4, 8, 16) if c <= most) if shape == 0 else f"1,{most}"
        flags = ["--concurrency", sizes, "--random-input-len", size_in, "--random-output-len", size_out]
        started = []
        for i, url in enumerate(urls):
            found[i].append(out / f"loops-{len(urls)}-{i}-{shape}.json")
            more = ["--num-prompts", 8 + most, "--seed", 100 * i + 10 * shape]
            started.append(load(url, model, found[i][-1], *flags, *more))
        if any(process.wait() for process in started):
            raise SystemExit(f"{sizes}: the load client failed")
    return found


def poisson(url: str, model: str, out: Path, rates: list[float], count: int, name: str) -> list[dict[str, Any]]:
    size_in, size_out = SHAPES[0]
    file = out / f"{name}.json"
    flags = ["--random-input-len", size_in, "--random-output-len", size_out, "--num-prompts", count, "--seed", SEED]
    if load(url, model, file, "--request-rate", ",".join(f"{r:.3g}" for r in rates), *flags).wait():
        raise SystemExit("the load client failed")
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def compared(
    rows: list[dict[str, Any]], fitted: Fit, replicas: int, prefills: int, count: int
) -> list[tuple[float, str, float, float]]:
    """(rate, figure, measured, simulated)."""
    found = []
    for row in rows:
        mean_in = row["total_input_tokens"] // row["completed"]
        asks = drawn(SEED, count, row["request_rate"], str(mean_in), str(SHAPES[0][1]), 0)
        run = simulate(asks, fitted.time, Limits(max_batch_size=BATCH), replicas, prefills=prefills)
        found += [(row["request_rate"], name, row[name], figure(run, name)) for name in FIGURES]
    return found


def figure(run: Run, name: str) -> float:
    if name == "output_throughput":
        return run.throughput
    percent, kind, _ = name.split("_")
    return 1000 * run.percentile(kind, float(percent[1:]))


def told(title: str, fitted: Fit, found: list[tuple[float, str, float, float]]) -> None:
    print(f"\n{title}; the closed loops themselves: {fitted.worst:+.1%} at worst")
    for rate, name, real, simulated in found:
        both = f"measured {real:9.2f}  simulated {simulated:9.2f}"
        print(f"  {rate:6.2f} requests/s  {name:18} {both}  {simulated / real - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact that `tool convert` wrote for a CPU")
    parser.add_argument("--out", type=Path, required=True, help="directory of the measured figures; it is made")
    parser.add_argument("--count", type=int, default=150, help="requests at each rate")
    parser.add_argument("--parts", default="one,two", help="of one, two (servers) and apart, by commas")
    parser.add_argument("--again", action="store_true", help="measure nothing: compare what --out has")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.parts.split(","):
        _check(part, given)


def _check(part: str, given: argparse.Namespace) -> None:
    servers, most = (1, 16) if part == "one" else (2, 8)
    prefills = 1 if part == "apart" else 0
    file = given.out / f"poisson-{part}.json"
    if not given.again:
        engine = ["--max-batch-size", BATCH, "--session-len", LENGTH]
        engine += [] if servers == 1 else ["--threads", 1]
        roles = [["--role", "prefill"], ["--role", "decode"]] if prefills else [[]] * servers
        with contextlib.ExitStack() as stack:
            started = [running(23401 + i, "api_server", given.model, *engine, *role) for i, role in enumerate(roles)]
            urls = [stack.enter_context(one) for one in started]
            if not prefills or not list(given.out.glob("loops-2-*.json")):
                loops(urls, given.model, given.out, most)
            best = [json.loads(one.read_text())[-1] for one in sorted(given.out.glob(f"loops-{servers}-*-0.json"))]
            target = urls[0]
            if servers > 1:
                nodes = [word for url in urls for word in ("--node", url)]
                apart = ["--serving-strategy", "DistServe", "--prefill-min-bytes", 0] if prefills else []
                target = stack.enter_context(running(23400, "proxy", *nodes, *apart))
                time.sleep(3)  # it looks at its nodes
            whole = sum(one["request_throughput"] for one in best)
            poisson(target, given.model, given.out, [0.5 * whole, 0.75 * whole], given.count, file.stem)
    rows = [row for one in sorted(given.out.glob(f"loops-{servers}-*.json")) for row in read_profile(one)]
    fitted = fit(rows, Limits(max_batch_size=BATCH))
    found = compared(json.loads(file.read_text()), fitted, servers - prefills, prefills, given.count)
    told(f"{servers} server(s), {part}", fitted, found)


if __name__ == "__main__":
    main()
