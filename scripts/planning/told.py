"""What a simulation is told of one round of ``scripts/check_plan.py``: from batches and from one request at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from planning.servers import ALL, BATCH, OTHERS

from toolkit.planner.engine import Limits
from toolkit.planner.fit import fit, read_row
from toolkit.planner.fleet import Around, simulate
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import Ask

LIMITS = Limits(max_batch_size=BATCH)


def told(found: dict[str, Any]) -> tuple[StepTime, Around]:
    """Of an engine alone on this round's machine, and what is around it."""
    alone = fit([read_row(found["part"], row) for row in found["batches"]], LIMITS).time
    time = served(alone, found["probes"])
    short = each(found["probes"], 0)
    around = Around(noise=float(np.std(np.log(short["ttft_s"] + (short["out"] - 1) * short["tpot_s"]))))
    if found["part"] == "one":
        return time, around
    through = found["through"]
    around = replace(around, cores=float(len(ALL)), token=through[0]["outside_s"])
    around = replace(around, step=_beside(found["beside"], time, around))
    if found["part"] == "two":
        return time, replace(around, way=max(0.0, _more(through[0], time, 0)))
    later = [_more(row, time, 1) for row in through]
    sizes = [row["total_input_tokens"] / row["completed"] for row in through]
    token = max(0.0, (later[1] - later[0]) / (sizes[1] - sizes[0]))
    return time, replace(around, handing_token=token, handing=max(0.0, later[0] - token * sizes[0]))


def _more(row: dict[str, Any], time: StepTime, prefills: int) -> float:
    """Seconds by which first tokens came later than with what is known so far: the engine that is lent to has work with
    a prompt, too."""
    sizes = (row[f"total_{way}_tokens"] // row["completed"] for way in ("input", "output"))
    (known,) = simulate([Ask(0.0, *sizes)], time, LIMITS, 1, prefills=prefills).served
    return float(row["mean_ttft_ms"]) / 1000 - known.ttft


def served(alone: StepTime, probes: list[list[dict[str, Any]]]) -> StepTime:
    """The steps of an engine that serves, now: as many times as long as long prompts have taken longer than short ones.
    What a step takes beyond that are tokens sent, about as long for four of them as for one, and a first token has a
    way to come and go."""
    short, long = each(probes, 0), each(probes, 1)
    alone = replace(alone, wait=0.0)
    steps = [simulate([Ask(0.0, one["in"], one["out"])], alone, LIMITS, 1).served[0] for one in (short, long)]
    speed = float(long["ttft_s"].mean() - short["ttft_s"].mean()) / (steps[1].ttft - steps[0].ttft)
    sent = max(0.0, float(short["tpot_s"].mean()) - speed * (steps[0].tpot or 0.0))
    wait = max(0.0, float(short["ttft_s"].mean()) - speed * steps[0].ttft - sent)
    return replace(alone.times(speed), start=speed * alone.start + sent, wait=wait)


def each(probes: list[list[dict[str, Any]]], which: int) -> dict[str, Any]:
    """Of all short (0) or long (1) requests that others did not disturb: their times, and tokens in and out."""
    rows = [row[which] for row in probes if row[which]["others"] <= OTHERS]
    found: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in ("ttft_s", "tpot_s")}
    tokens = {way: rows[0][f"total_{way}put_tokens"] // rows[0]["completed"] for way in ("in", "out")}
    return found | tokens


def _beside(rows: list[dict[str, Any]], time: StepTime, around: Around) -> float:
    """What a step takes longer while others compute: as much as answers of all engines at once took longer."""
    taken = sum(row["mean_tpot_ms"] for row in rows) / len(rows) / 1000
    row = rows[0]
    sizes = (row[f"total_{way}_tokens"] // row["completed"] for way in ("input", "output"))
    asks = [Ask(0.0, *sizes)] * len(rows) * row["completed"]
    there = replace(around, token=row["outside_s"], noise=0.0)

    def seconds(step: float) -> float:
        run = simulate(asks, time, LIMITS, len(rows), replace(there, step=step), at_once=len(rows))
        return float(np.mean([one.tpot for one in run.served]))

    low, high = 0.0, 0.02
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < taken else (low, middle)
    return low
