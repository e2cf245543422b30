"""What a simulation is told of one round of ``scripts/check_plan.py``: from batches and from one request at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planning.servers import ALL, BATCH

from toolkit.planner.engine import Limits
from toolkit.planner.fit import Fit, fit, read_row
from toolkit.planner.fleet import Around, simulate
from toolkit.planner.traffic import Ask

LIMITS = Limits(max_batch_size=BATCH)


def told(found: dict[str, Any]) -> tuple[Fit, Around]:
    fitted = fit([read_row(found["part"], row) for row in (*found["batches"], *found["alone"])], LIMITS)
    if found["part"] == "one":
        return fitted, Around()
    alone, through = found["alone"], found["through"]
    around = Around(cores=float(len(ALL)), token=through[0]["outside_s"])
    around = replace(around, step=_beside(found["beside"], fitted, around))
    later = [(there["p50_ttft_ms"] - here["p50_ttft_ms"]) / 1000 for here, there in zip(alone, through, strict=False)]
    if found["part"] == "two":
        return fitted, replace(around, way=max(0.0, later[0]))
    sizes = [row["total_input_tokens"] / row["completed"] for row in through]
    token = max(0.0, (later[1] - later[0]) / (sizes[1] - sizes[0]))
    return fitted, replace(around, handing_token=token, handing=max(0.0, later[0] - token * sizes[0]))


def _beside(rows: list[dict[str, Any]], fitted: Fit, around: Around) -> float:
    """What a step takes longer while others compute: as much as answers of all engines at once took longer."""
    taken = sum(row["mean_tpot_ms"] for row in rows) / len(rows) / 1000
    row = rows[0]
    sizes = (row[f"total_{way}_tokens"] // row["completed"] for way in ("input", "output"))
    asks = [Ask(0.0, *sizes)] * len(rows) * row["completed"]
    there = replace(around, token=row["outside_s"])

    def seconds(step: float) -> float:
        run = simulate(asks, fitted.time, LIMITS, len(rows), replace(there, step=step), at_once=len(rows))
        return run.percentile("tpot", 50)

    low, high = 0.0, 0.02
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < taken else (low, middle)
    return low
