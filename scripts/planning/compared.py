"""What was measured beside what is simulated, of all rounds of a part of ``scripts/check_plan.py``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from planning.servers import OTHERS, ROLES
from planning.told import LIMITS, paces, told

from toolkit.planner.fleet import Around, Run, simulate
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import drawn

DRAWS = 24  # of the proxy's lots and of the moments at which the machine is slow; all requests come once in each
RUN, RESAMPLES = 10, 400
GOAL = 0.1
FIGURES = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms")


def compare(rounds: Sequence[dict[str, Any]]) -> None:
    """Of all requests of all rounds at a rate, measured and simulated; of the latter the median of all draws, how far
    they lie apart (standard deviation), and how many are within ``GOAL`` of it: what was measured is one such draw."""
    print(f"\n{rounds[0]['part']}, rounds: {len(rounds)}")
    knows = [told(found) for found in rounds]
    for found, (time, around) in zip(rounds, knows, strict=True):
        left = sum(row["others"] > OTHERS for row in found["rated"])
        print(f"as tool plan takes it: {flags(around)}; way to a first token {1e3 * time.wait:.1f} ms; ", end="")
        print(f"pieces that others disturbed: {left} of {len(found['rated'])}")
    for share in sorted({row["share"] for found in rounds for row in found["rated"]}):
        rows, draws = [], []
        for found, known in zip(rounds, knows, strict=True):
            time, around = known
            for row, pace in zip(found["rated"], paces(found), strict=True):
                if row["share"] == share and row["others"] <= OTHERS:
                    rows.append(row)
                    draws.append(simulations(found, row, time.times(pace), around))
        if not rows:
            continue
        rates = " and ".join(sorted({f"{row['request_rate']:.3g}" for row in rows}))
        print(f"  {rates} requests a second, {sum(row['completed'] for row in rows)} in all")
        speeds = [mean(run.throughput for run in draw) for draw in zip(*draws, strict=True)]
        tell("output_throughput", mean(row["output_throughput"] for row in rows), speeds)
        for name in FIGURES:
            figure(name, rows, draws)


def simulations(found: dict[str, Any], row: dict[str, Any], time: StepTime, around: Around) -> list[Run]:
    """The requests of ``row``."""
    prefills = int(found["part"] == "apart")
    size_in, size_out = (str(row[f"total_{way}_tokens"] // row["completed"]) for way in ("input", "output"))
    asks = drawn(row["seed"], row["completed"], row["request_rate"], size_in, size_out, 0)
    engines = len(ROLES[found["part"]]) - prefills
    return [simulate(asks, time, LIMITS, engines, around, prefills, row["seed"] + seed) for seed in range(DRAWS)]


def tell(name: str, real: float, simulated: Sequence[float], chance: str = "") -> None:
    guessed, apart = median(simulated), stdev(simulated) / mean(simulated)
    near = mean(abs(one / guessed - 1) <= GOAL for one in simulated)  # as often as a right simulation would be
    error = f"{guessed / real - 1:+.1%}{chance}"
    draws = f"(draws ±{apart:.0%}, {near:.0%} of them within {GOAL:.0%})"
    print(f"    {name:18} measured {real:8.2f}  simulated {guessed:8.2f} {draws}  {error}")


def figure(name: str, rows: Sequence[dict[str, Any]], draws: Sequence[Sequence[Run]]) -> None:
    """A percentile, and between which deviations it lies by chance (90 %): of the same loads made anew of runs of
    ``RUN`` neighbours, measured and simulated alike, for the requests of a busy moment are all late."""
    percent, kind, _ = name.split("_")
    real = [np.array([np.nan if value is None else value for value in row[f"{kind}_s"]]) for row in rows]
    guessed = [np.array([[getattr(one, kind) for one in run.served] for run in piece]) for piece in draws]
    pairs = [np.vstack([one, several]) for one, several in zip(real, guessed, strict=True)]  # piece by piece
    whole = np.concatenate(pairs, axis=1)
    runs = [pair[:, i : i + RUN] for pair in pairs for i in range(0, pair.shape[1], RUN)]

    def found(of: Any) -> Any:
        return 1000 * np.nanpercentile(of, float(percent[1:]), axis=1)

    lots = np.random.default_rng(0).integers(0, len(runs), (RESAMPLES, len(runs)))
    again = [found(np.concatenate([runs[i] for i in lot], axis=1)) for lot in lots]
    low, high = np.percentile([np.median(one[1:]) / one[0] - 1 for one in again], (5, 95))
    each = found(whole)
    tell(name, each[0], each[1:].tolist(), f" ({low:+.0%} to {high:+.0%})")


def flags(around: Around) -> str:
    told = {
        "noise": around.noise, "jitter-ms": 1e3 * around.jitter, "mixed-us": 1e6 * around.mixed,
        "cold-ms": 1e3 * around.cold, "cores": around.cores, "threads": around.threads, "step-us": 1e6 * around.step,
        "outside-us": 1e6 * around.token, "outside-ms": 1e3 * around.request,
        "outside-rested-ms": 1e3 * around.rested, "route-ms": 1e3 * around.way, "handover-ms": 1e3 * around.handing,
        "handover-us": 1e6 * around.handing_token,
    }  # fmt: skip
    return " ".join(f"--{name} {value:.3g}" for name, value in told.items() if value)
