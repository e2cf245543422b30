"""Is `tool plan` right? One server, two behind a proxy, and two of which one computes prompts and one writes answers,
under a Poisson load, beside what is simulated.

    python scripts/check_plan.py work/demo-engine --out DIR --part two --round 1
    python scripts/check_plan.py work/demo-engine --out DIR --again

What the simulation is told: the times of steps from batches in an engine alone; from one request at a time to each
server, with short rests, what serving costs, and how much the machine's speed and single steps vary; from pairs of them
what steps with answers and prompts take; with rests as between random arrivals how much slower an engine is behind
them; what the others cost from one and from two at a time through the proxy, and from one to each server. All of that
is measured before, between and after the pieces of the loads, for the machine drifts by a tenth within minutes.
What are compared are all requests at rates that none of these has seen, of all rounds in --out together. A piece during
which other programs were busy does not count. Needs a machine that does nothing else; a round of a part takes about
fourteen minutes.
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
from planning.servers import PAIRS, REST, RESTS, ROLES, Servers, batches

BRIEF, TINY = 2, (2, 2)  # tokens out, and in and out, of what the simulation is told by beside requests of the load
SHARES = (0.4, 0.6)  # of what eight clients reach
ROUNDS = 3  # of batches, before the first piece, in the middle and behind the last
# Requests of the load's lengths that tell how fast the machine is: of 10 what a step takes longer while another engine
# computes came out as 0.1 ms in one round, and as 0.9 in another.
PROBE = 30


def measure(given: argparse.Namespace, part: str, file: Path) -> None:
    """The rates, and between their pieces what the simulation is told by: so the machine drifts for both alike.
    ``file`` has what was measured so far."""
    found: dict[str, Any] = {"part": part, "batches": [], "turns": [], "rated": []}
    short, brief = (given.input_len, given.output_len), (given.input_len, BRIEF)
    with ExitStack() as stack:
        servers = Servers(stack, given.model, part, 1_000_000 * given.round)
        front = [servers.front]

        def single(
            urls: Sequence[str], shape: tuple[int, int], count: int = PROBE, rest: float | Sequence[float] = 0.0
        ) -> list[dict[str, Any]]:
            """One request at a time to each: what it takes is no matter of what the scheduler does."""
            return servers.load(urls, shape, count, 1, rest=rest)

        def turn(number: int) -> None:
            if number in (0, given.pieces // 2, given.pieces):
                found["batches"].append(batches(given.model, short, ROUNDS))
            # All servers at once, with rests: while nothing else runs all cores halt, and each token comes later.
            now = {"probe": [*single(servers.urls, short, rest=REST), *single(servers.urls, TINY, rest=REST)]}
            now["rested"] = single(servers.urls, short, len(RESTS), RESTS)
            now["pairs"] = [servers.load([url], short, len(PAIRS), starts=PAIRS)[0] for url in servers.urls]
            if part != "one":
                now["beside"] = single(servers.urls, short)
                now["outside"] = [*single(front, brief, rest=REST), *single(front, short, rest=REST)]
                now["alone"] = single(front, short)
                now["busy"] = [servers.load(front, shape, 2 * PROBE, 2)[0] for shape in (brief, short)]
            if part == "apart":
                now["outside"] += single(front, TINY, rest=REST)
            found["turns"].append(now)

        for url in servers.urls:  # the first requests of a server are slower
            servers.load([url], short, 4, 2)
        best = given.best or servers.load(front, short, 48, 8)[0]["request_throughput"]
        for piece in range(given.pieces):
            turn(piece)
            for share in SHARES:
                row = servers.load(front, short, given.count // given.pieces, rate=float(f"{share * best:.3g}"))[0]
                found["rated"].append(row | {"share": share})
            file.write_text(json.dumps(found))
        turn(given.pieces)
    file.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact that `tool convert` wrote for a CPU")
    parser.add_argument("--out", type=Path, required=True, help="directory of the measured figures; it is made")
    parser.add_argument("--count", type=int, default=400, help="requests at each rate")
    parser.add_argument(
        "--pieces", type=int, default=6, help="in which a rate is measured, for no machine is as fast for minutes"
    )
    parser.add_argument("--input-len", type=int, default=100, help="tokens of their prompts")
    parser.add_argument("--output-len", type=int, default=16, help="and of their answers")
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
        measure(given, given.part, given.out / f"{given.part}-{given.round}.json")
    for part in ROLES:
        files = sorted(given.out.glob(f"{part}-*.json"))
        if files and given.part in (None, part):
            compare([json.loads(file.read_text()) for file in files])


if __name__ == "__main__":
    main()
