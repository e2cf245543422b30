"""What was measured beside what is simulated, of all rounds of a part of ``scripts/check_plan.py``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np
from planning.servers import ROLES
from planning.told import LIMITS, told

from toolkit.planner.fit import Fit
from toolkit.planner.fleet import Around, Run, simulate
from toolkit.planner.traffic import drawn

DRAWS = 16  # of the lots that the proxy draws, and of SPREAD, in each of which the requests come once
SPREAD = 0.02  # by which no measurement knows how fast the machine is; a queue may take another course for less
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


def compare(rounds: Sequence[dict[str, Any]]) -> None:
    """Medians over rounds; of the measured ones also the lowest and the highest, for no simulation can be nearer to one
    round than another round is."""
    part = rounds[0]["part"]
    print(f"\n{part}, rounds: {len(rounds)}")
    knows = [told(found) for found in rounds]
    for fitted, around in knows:
        print(f"as tool plan takes it: {flags(around)}; the loops themselves: {fitted.worst:+.1%} at worst")
    for share in sorted({row["share"] for found in rounds for row in found["rated"]}):
        rows = [[row for row in found["rated"] if row["share"] == share] for found in rounds]
        runs = [
            [simulations(found, row, *known) for row in some]
            for found, some, known in zip(rounds, rows, knows, strict=True)
        ]
        count = sum(row["completed"] for some in rows for row in some)
        print(f"  {rows[0][0]['request_rate']:.3g} requests a second, {count} in all")
        tell(
            "output_throughput",
            [mean(row["output_throughput"] for row in some) for some in rows],
            [mean(run.throughput for run in draw) for some in runs for draw in zip(*some, strict=True)],
        )
        for name in FIGURES:
            tell(name, [measured(name, some) for some in rows], [s for some in runs for s in simulated(name, some)])


def simulations(found: dict[str, Any], row: dict[str, Any], fitted: Fit, around: Around) -> list[Run]:
    """The requests of ``row``, on a machine about as fast as it was before and after it."""
    prefills = int(found["part"] == "apart")
    speed = mean(row["probes"]) / found["probe"]
    size_in, size_out = (str(row[f"total_{way}_tokens"] // row["completed"]) for way in ("input", "output"))
    asks = drawn(row["seed"], row["completed"], row["request_rate"], size_in, size_out, 0)
    engines = len(ROLES[found["part"]]) - prefills
    lots = np.random.default_rng(row["seed"]).uniform(1 - SPREAD, 1 + SPREAD, DRAWS)
    times = [fitted.time.times(speed * float(lot)) for lot in lots]
    return [simulate(asks, time, LIMITS, engines, around, prefills, seed) for seed, time in enumerate(times)]


def tell(name: str, real: Sequence[float], simulated: Sequence[float]) -> None:
    middle, guessed = median(real), median(simulated)
    spread = f"({min(real):.2f} to {max(real):.2f})"
    print(f"    {name:18} measured {middle:8.2f} {spread:20} simulated {guessed:8.2f}  {guessed / middle - 1:+.1%}")


def measured(name: str, rows: Sequence[dict[str, Any]]) -> float:
    """Of all requests of a round."""
    percent, kind, _ = name.split("_")
    real = [value for row in rows for value in row[f"{kind}_s"] if value is not None]
    return 1000 * float(np.percentile(real, float(percent[1:])))


def simulated(name: str, pieces: Sequence[Sequence[Run]]) -> list[float]:
    """The same of each draw."""
    percent, kind, _ = name.split("_")
    draws = [[getattr(one, kind) for run in runs for one in run.served] for runs in zip(*pieces, strict=True)]
    return [1000 * float(np.percentile(values, float(percent[1:]))) for values in draws]


def flags(around: Around) -> str:
    told = {
        "cores": around.cores, "threads": around.threads, "step-us": 1e6 * around.step,
        "outside-us": 1e6 * around.token, "route-ms": 1e3 * around.way,
        "handover-ms": 1e3 * around.handing, "handover-us": 1e6 * around.handing_token,
    }  # fmt: skip
    return " ".join(f"--{name} {value:.3g}" for name, value in told.items() if value)
