"""What was measured beside what is simulated, of all rounds of a part of ``scripts/check_plan.py``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
from planning.servers import ROLES
from planning.told import LIMITS, told

from toolkit.planner.fit import Fit
from toolkit.planner.fleet import Around, Run, simulate
from toolkit.planner.traffic import drawn

DRAWS = 16  # of the lots that the proxy draws, in each of which the requests come once
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


def compare(rounds: Sequence[dict[str, Any]]) -> None:
    part = rounds[0]["part"]
    print(f"\n{part}, rounds: {len(rounds)}")
    knows = [told(found) for found in rounds]
    for fitted, around in knows:
        print(f"as tool plan takes it: {flags(around)}; the loops themselves: {fitted.worst:+.1%} at worst")
    for share in sorted({row["share"] for found in rounds for row in found["rated"]}):
        rows, runs = [], []
        for found, known in zip(rounds, knows, strict=True):
            for row in found["rated"]:
                if row["share"] == share:
                    rows.append(row)
                    runs += simulations(found, row, *known)
        count = sum(row["completed"] for row in rows)
        print(f"  {rows[0]['request_rate']:.3g} requests a second, {count} in all")
        tell("output_throughput", mean(row["output_throughput"] for row in rows), mean(run.throughput for run in runs))
        for name in FIGURES:
            tell(name, *figure(name, rows, runs))


def simulations(found: dict[str, Any], row: dict[str, Any], fitted: Fit, around: Around) -> list[Run]:
    """The requests of ``row``, on a machine as fast as it was before and after it."""
    prefills = int(found["part"] == "apart")
    time = fitted.time.times(mean(row["probes"]) / found["probe"])
    size_in, size_out = (str(row[f"total_{way}_tokens"] // row["completed"]) for way in ("input", "output"))
    asks = drawn(row["seed"], row["completed"], row["request_rate"], size_in, size_out, 0)
    engines = len(ROLES[found["part"]]) - prefills
    return [
        simulate(asks, time, LIMITS, engines, around, prefills, seed) for seed in range(DRAWS if engines > 1 else 1)
    ]


def tell(name: str, real: float, simulated: float) -> None:
    print(f"    {name:18} measured {real:8.2f}  simulated {simulated:8.2f}  {simulated / real - 1:+.1%}")


def figure(name: str, rows: Sequence[dict[str, Any]], runs: Sequence[Run]) -> tuple[float, float]:
    """Of all requests: measured, simulated."""
    percent, kind, _ = name.split("_")
    real = [value for row in rows for value in row[f"{kind}_s"] if value is not None]
    simulated = [getattr(one, kind) for run in runs for one in run.served]
    measured, guessed = (1000 * float(np.percentile(values, float(percent[1:]))) for values in (real, simulated))
    return measured, guessed


def flags(around: Around) -> str:
    told = {
        "cores": around.cores, "threads": around.threads, "step-us": 1e6 * around.step,
        "outside-us": 1e6 * around.token, "route-ms": 1e3 * around.way,
        "handover-ms": 1e3 * around.handing, "handover-us": 1e6 * around.handing_token,
    }  # fmt: skip
    return " ".join(f"--{name} {value:.3g}" for name, value in told.items() if value)
