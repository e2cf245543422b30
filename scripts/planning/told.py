"""What a simulation is told of one round of ``scripts/check_plan.py``, all from its closed loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planning.servers import BATCH, CORES

from toolkit.planner.engine import Engine, Limits
from toolkit.planner.fit import Fit, fit, read_row
from toolkit.planner.fleet import Around, Fleet, Group, Run, simulate
from toolkit.planner.traffic import Ask

LIMITS = Limits(max_batch_size=BATCH)


def told(found: dict[str, Any]) -> tuple[Fit, Around]:
    fitted = fit([read_row(found["part"], row) for row in (*found["batches"], *found["alone"])], LIMITS)
    if found["part"] == "one":
        return fitted, Around()
    through = found["handed" if found["part"] == "apart" else "routed"]
    around = Around(cores=float(CORES), token=through[0]["outside_s"])
    around = replace(around, step=_beside(found["beside"], fitted, around))
    if found["part"] == "apart":
        return fitted, _handing(through, fitted, around)
    way = max(0.0, through[0]["mean_ttft_ms"] - found["alone"][0]["mean_ttft_ms"]) / 1000
    around = replace(around, way=way)
    return fitted, around


def _beside(loops: Sequence[Sequence[dict[str, Any]]], fitted: Fit, around: Around) -> float:
    """What a step takes longer while others compute: as much as loops on all engines at once took longer."""

    def longer(step: float) -> float:
        there = replace(around, step=step)
        return sum(_loops(rows, fitted, there) / sum(row["duration"] for row in rows) for rows in loops)

    return _until(longer, len(loops), 0.02)


def _until(seconds: Callable[[float], float], taken: float, most: float) -> float:
    low, high = 0.0, most
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < taken else (low, middle)
    return low


def _loops(rows: Sequence[dict[str, Any]], fitted: Fit, around: Around) -> float:
    there = replace(around, token=rows[0]["outside_s"], way=0.0)
    return sum(_loop(row, fitted, there, len(rows)) for row in rows)


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


def _handing(rows: Sequence[dict[str, Any]], fitted: Fit, around: Around) -> Around:
    """What handing over takes of the engine that lends: as much as loops of one and of several requests at a time took
    longer together; and what one at a time then needs beyond that until its first token."""
    one, many = rows[0], rows[-1]

    def run(row: dict[str, Any], there: Around) -> Run:
        sizes = (row[f"total_{way}_tokens"] // row["completed"] for way in ("input", "output"))
        asks = [Ask(0.0, *sizes)] * row["completed"]
        there = replace(there, token=row["outside_s"])
        return simulate(asks, fitted.time, LIMITS, 1, there, 1, at_once=row["max_concurrency"])

    def first(there: Around) -> float:
        return 1000 * run(one, there).percentile("ttft", 50) - one["mean_ttft_ms"]

    def longer(each: float) -> float:
        there = replace(around, handing_token=each)
        return first(there) / one["mean_ttft_ms"] + run(many, there).seconds / many["duration"]

    around = replace(around, handing_token=_until(longer, 1.0, 1e-3))
    return replace(around, handing=max(0.0, -first(around) / 1000))
