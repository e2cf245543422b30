"""Is `tool plan` right? One server, two behind a proxy, and two of which one computes prompts and one writes answers,
under a Poisson load, beside what is simulated.

    scripts/check_plan.py demo-engine --out DIR --part two --round 1
    scripts/check_plan.py demo-engine --out DIR --again

What the simulation is told comes from closed loops (a fixed number of requests at a time) on the same servers, right
before: the times of steps from one server that computes alone, and what the others cost from two at once, from some
behind the proxy and from two apart. What are compared are runs at rates that no loop has seen; of all rounds in --out
together. Before and after each such run the speed of the machine is looked at, and the simulation runs at the mean of
both. Needs a machine that does nothing else; a round of a part takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from planning.compared import compare
from planning.servers import ROLES, Servers, batches

SHORT, LONG = (200, 32), (800, 16)  # tokens in and out; the first also at a rate
SHARES = (0.4, 0.6)  # of what eight clients reach
PIECES = 3  # in which a rate is measured, for no machine is as fast for minutes
CHUNKS = (8, 16, 24, 48, 96)  # tokens of prompts of which steps are told
PROBE = 8  # requests that tell how fast the machine is


def measured(given: argparse.Namespace, part: str) -> dict[str, Any]:
    """Loops, then the rates."""
    several = part != "one"
    found: dict[str, Any] = {"part": part, "batches": batches(given.model, SHORT, CHUNKS)}
    with ExitStack() as stack:
        servers = Servers(stack, given.model, part, 1_000_000 * given.round)
        one, front = servers.urls[-1:], [servers.front]

        def single(urls: Sequence[str], shape: tuple[int, int] = SHORT, count: int = 12) -> list[dict[str, Any]]:
            """One request at a time to each: what it takes is no matter of what the scheduler does."""
            return servers.load(urls, shape, count, 1)

        def probe() -> float:
            return float(single(one, count=PROBE)[0]["duration"])

        for url in servers.urls:  # the first requests of a server are slower
            servers.load([url], SHORT, 4, 2)
        probes = [probe()]
        found["alone"] = single(one) + single(one, LONG, 6)
        if several:
            found["beside"] = single(servers.urls)
            found["through"] = single(front, count=16) + (single(front, LONG, 6) if part == "apart" else [])
        best = given.best or servers.load(front, SHORT, 32, 8)[0]["request_throughput"]
        found["rated"] = []
        probes.append(probe())
        found["probe"] = sum(probes) / 2  # around the loops
        for share in SHARES * PIECES:
            row = servers.load(front, SHORT, given.count // PIECES, rate=float(f"{share * best:.3g}"))[0]
            probes.append(probe())
            found["rated"].append(row | {"share": share, "probes": probes[-2:]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact that `tool convert` wrote for a CPU")
    parser.add_argument("--out", type=Path, required=True, help="directory of the measured figures; it is made")
    parser.add_argument("--count", type=int, default=150, help="requests at each rate")
    parser.add_argument("--round", type=int, default=1, help="its number, and the seed of its prompts and arrivals")
    parser.add_argument(
        "--best", type=float, help="requests a second that 100 %% are; default: what eight clients reach"
    )
    parser.add_argument("--part", choices=ROLES, help="one server, two, or two apart")
    parser.add_argument("--again", action="store_true", help="measure nothing: compare what --out has")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # servers end with it
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.again:
        if given.part is None:
            parser.error("--part: expected one, two or apart, or --again")
        found = measured(given, given.part)
        (given.out / f"{given.part}-{given.round}.json").write_text(json.dumps(found))
    for part in ROLES:
        files = sorted(given.out.glob(f"{part}-*.json"))
        if files and given.part in (None, part):
            compare([json.loads(file.read_text()) for file in files])


if __name__ == "__main__":
    main()
