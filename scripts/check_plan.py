"""Is `tool plan` right? One server, two behind a proxy, and two of which one computes prompts and one writes answers,
under a Poisson load, beside what is simulated.

    scripts/check_plan.py demo-engine --out DIR --part two --round 1
    scripts/check_plan.py demo-engine --out DIR --again

What the simulation is told: the times of steps from batches in an engine alone (once, kept in --out); from one request
at a time how fast the machine is, how much that varies and what serving costs; what the others cost from one at a time
to two servers at once, through the proxy and to two apart. What are compared are all requests at rates that none of
these has seen, of all rounds in --out together. Between pieces of such a run requests one at a time look at the machine
again, and the simulation runs at the mean of the round. A piece during which other programs were busy does not count.
Needs a machine that does nothing else; a round of a part takes about five minutes.
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

SHORT, LONG = (100, 16), (800, 2)  # tokens in and out; the first also at a rate
SHARES = (0.4, 0.6)  # of what eight clients reach
PIECES = 5  # in which a rate is measured, for no machine is as fast for minutes
CHUNKS = (8, 16, 32, 800)  # tokens of prompts of which steps are told
PROBE = 10, 2  # short and long requests that tell how fast the machine is


def measured(given: argparse.Namespace, part: str) -> dict[str, Any]:
    """Single requests, then the rates."""
    several = part != "one"
    file = given.out / "batches.json"
    if not file.exists():
        file.write_text(json.dumps(batches(given.model, SHORT, CHUNKS)))
    found: dict[str, Any] = {"part": part, "batches": json.loads(file.read_text()), "probes": []}
    with ExitStack() as stack:
        servers = Servers(stack, given.model, part, 1_000_000 * given.round)
        front = [servers.front]

        def single(urls: Sequence[str], shape: tuple[int, int] = SHORT, count: int = 24) -> list[dict[str, Any]]:
            """One request at a time to each: what it takes is no matter of what the scheduler does."""
            return servers.load(urls, shape, count, 1)

        def probe() -> None:
            """Each time another server."""
            one = [servers.urls[len(found["probes"]) % len(servers.urls)]]
            found["probes"].append([*single(one, SHORT, PROBE[0]), *single(one, LONG, PROBE[1])])

        for url in servers.urls:  # the first requests of a server are slower
            servers.load([url], SHORT, 4, 2)
        probe()
        if several:
            found["beside"] = single(servers.urls)
            found["through"] = single(front) + (single(front, LONG, 8) if part == "apart" else [])
        best = given.best or servers.load(front, SHORT, 48, 8)[0]["request_throughput"]
        found["rated"] = []
        probe()
        for share in SHARES * PIECES:
            row = servers.load(front, SHORT, given.count // PIECES, rate=float(f"{share * best:.3g}"))[0]
            probe()
            found["rated"].append(row | {"share": share})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact that `tool convert` wrote for a CPU")
    parser.add_argument("--out", type=Path, required=True, help="directory of the measured figures; it is made")
    parser.add_argument("--count", type=int, default=400, help="requests at each rate")
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
