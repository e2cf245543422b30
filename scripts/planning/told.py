"""What a simulation is told of one round of ``scripts/check_plan.py``: from batches and from one request at a time,
measured between the loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import compress, pairwise
from statistics import median
from typing import Any

import numpy as np
from planning.servers import ALL, BATCH, OTHERS, PAIRS, REST

from toolkit.planner.engine import HOLDS, Limits
from toolkit.planner.fit import fit, read_row
from toolkit.planner.fleet import Around, Served, simulate
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import Ask

LIMITS = Limits(max_batch_size=BATCH)
DRAWS = 8  # of the moments at which steps vary, where few requests are simulated


def told(found: dict[str, Any]) -> tuple[StepTime, Around]:
    """Of an engine on this round's machine, and what is around it."""
    alone = fit([read_row(found["part"], row) for row in joined(found["batches"])], LIMITS).time
    probes = [turn["probe"] for turn in found["turns"]]
    cold = _cold(found["turns"])
    woken = cold * REST  # by which first tokens of probes came later
    short = each(probes, *_short(probes))
    varies = {"jitter": _jitter(probes), "cold": cold}
    noise = _noise([_seconds(probe[i]) for probe in compress(probes, _count(probes)) for i in _short(probes)])
    if found["part"] == "one":
        time = served(alone, probes, woken, float(short["tpot_s"].mean()))
        return time, Around(noise=noise, mixed=_mixed(found["turns"], time, varies), **varies)
    at_once = [turn["beside"] for turn in found["turns"]]
    alone_turns, busy_turns = ([turn[name] for turn in found["turns"]] for name in ("outside", "busy"))
    usual = each(alone_turns, 1)
    brief, busy = (each(busy_turns, i) for i in (0, 1))
    # Two at once also wait for what is around the engines, which finds a core where there is one request alone. Without
    # rests, as those beside others: what tokens take longer behind a rest would hide what they take longer there.
    time = served(alone, probes, woken, float(each([turn["alone"] for turn in found["turns"]], 0)["tpot_s"].mean()))
    token = max(0.0, (busy["outside"] - brief["outside"]) / (busy["out"] - brief["out"]))
    request = busy["outside"] - token * busy["out"]
    rested = max(0.0, usual["outside"] - busy["outside"])  # what work that finds its caches cold takes longer
    taken = short["ttft_s"].mean() - woken - time.wait + (short["out"] - 1) * short["tpot_s"].mean()
    threads = short["engine"] / float(taken)
    varies["mixed"] = _mixed(found["turns"], time, varies)
    around = Around(cores=float(len(ALL)), threads=threads, token=token, request=request, noise=noise, **varies)
    beside = [each(at_once, i) for i in range(len(at_once[0]))]
    share = beside[0]["outside"] / (around.request + around.token * beside[0]["out"])
    direct = replace(around, request=share * around.request, token=share * around.token)  # without the proxy
    around = replace(around, step=_beside(beside, time, direct), rested=rested)
    if found["part"] == "two":
        return time, replace(around, way=_more(usual, time, 0, woken))
    tiny = each(alone_turns, 2)
    late = [_more(row, time, 1, woken) for row in (tiny, usual)]
    each_token = max(0.0, (late[1] - late[0]) / (usual["in"] - tiny["in"]))
    handing = max(0.0, late[1] - each_token * usual["in"])
    return time, replace(around, handing_token=each_token, handing=handing)


def _count(probes: list[list[dict[str, Any]]]) -> list[bool]:
    """Which turns others did not disturb; where they disturbed all of them, all."""
    found = [all(row["others"] <= OTHERS for row in probe) for probe in probes]
    return found if any(found) else [True] * len(probes)


def _noise(turns: list[Any]) -> float:
    """Of the moments at which the machine is slow, beside the drift, which ``paces`` has: from what requests one at a
    time took, turn by turn, with a rest before each, for without rests slow moments are fewer. Neighbours are alike,
    for a moment lasts: a short turn varies less than all moments do."""
    squares, shares = [], []
    for seconds in turns:
        starts = np.concatenate([[0.0], np.cumsum(seconds + REST)[:-1]]) / HOLDS
        alike = np.exp(-np.abs(starts[:, None] - starts[None, :]))
        squares.append(np.var(np.log(seconds)))
        shares.append(1 - alike.mean())
    return float(np.sqrt(np.sum(squares) / np.sum(shares)))


def paces(found: dict[str, Any]) -> list[float]:
    """Of each load that is compared: times the mean that requests one at a time took just before and after it; beside
    a turn that others disturbed the other one says it."""
    probes = [turn["probe"] for turn in found["turns"]]
    sums = [sum(float(_seconds(row).sum()) for row in probe) for probe in probes]
    turns = [one if counts else math.nan for one, counts in zip(sums, _count(probes), strict=True)]
    usual = float(np.nanmean(turns))
    near = [[one for one in pair if not math.isnan(one)] or [usual] for pair in pairwise(turns)]
    between = [float(np.mean(some)) / usual for some in near]
    loads = len(found["rated"]) // len(between)
    return [pace for pace in between for _ in range(loads)]


def _seconds(row: dict[str, Any]) -> Any:
    """Of each request of a load, from first to last."""
    later = row["total_output_tokens"] // row["completed"] - 1
    return np.array(row["ttft_s"]) + later * np.array(row["tpot_s"])


def joined(passes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of the batches of all passes each one's median time, so that they are of the same time as the loads between. Not
    the mean: of nine prompts of 8 tokens one took 211 ms, the others 10, and the first 32 tokens came out as free."""
    rows = []
    for same in zip(*passes, strict=True):
        usual = {name: median(row[name] for row in same) for name in ("prefill_throughput", "decode_throughput")}
        rows.append(same[0] | usual)
    return rows


def _cold(turns: list[dict[str, Any]]) -> float:
    """By how much a request's way is longer for each second that its engine has rested: the slope of first tokens by
    the rests before them, turn by turn and server by server, for all drift."""
    if "rests" not in turns[0].get("rested", [{}])[0]:
        return 0.0
    loads = [row for turn in turns for row in turn["rested"]]
    rows = [row for row in loads if row["others"] <= OTHERS] or loads
    rests = np.array([row["rests"] for row in rows])
    rests -= rests.mean(axis=1, keepdims=True)
    return max(0.0, float(np.sum(rests * np.array([row["ttft_s"] for row in rows])) / np.sum(np.square(rests))))


def _jitter(probes: list[list[dict[str, Any]]]) -> float:
    """Standard deviation of single steps, by the gaps between tokens of requests one at a time; none of those that
    waited for something else."""
    rows = [probe[i] for probe in compress(probes, _count(probes)) for i in _short(probes)]
    return median(row["p90_itl_ms"] - row["p50_itl_ms"] for row in rows) / 1000 / 1.2816  # 90 % of a normal one


def _more(row: dict[str, Any], time: StepTime, prefills: int, woken: float) -> float:
    """Seconds by which first tokens came later than with what is known so far: the engine that is lent to has work with
    a prompt, too. ``woken``: of which each engine's rest is a cause."""
    (known,) = simulate([Ask(0.0, row["in"], row["out"])], time, LIMITS, 1, prefills=prefills).served
    return float(row["ttft_s"].mean()) - known.ttft - (1 + prefills) * woken


def served(alone: StepTime, probes: list[list[dict[str, Any]]], woken: float, tpot: float) -> StepTime:
    """The steps of an engine that serves: as fast as the difference of usual and tiny prompts says, for batches are
    measured in fewer moments. What each takes beyond those of ``alone`` are tokens sent, about as long for four of them
    as for one; and a first token has a way to come and go. ``woken``: seconds by which their way was longer;
    ``tpot``: of one request alone."""
    short, tiny = each(probes, *_short(probes)), each(probes, *_tiny(probes))
    alone = replace(alone, wait=0.0)

    def known_of(row: dict[str, Any]) -> Served:
        return simulate([Ask(0.0, row["in"], row["out"])], alone, LIMITS, 1).served[0]

    more = float(short["ttft_s"].mean() - tiny["ttft_s"].mean())
    alone = alone.times(more / (known_of(short).ttft - known_of(tiny).ttft))
    known = known_of(short)
    sent = tpot - (known.tpot or 0.0)
    return replace(alone, start=alone.start + sent, wait=float(short["ttft_s"].mean()) - woken - known.ttft - sent)


def _short(probes: list[list[dict[str, Any]]]) -> range:
    """Places of the rows of requests of the load's lengths, a server's after another's; then come tiny ones."""
    return range(len(probes[0]) // 2)


def _tiny(probes: list[list[dict[str, Any]]]) -> range:
    return range(len(probes[0]) // 2, len(probes[0]))


def each(loads: list[list[dict[str, Any]]], *which: int) -> dict[str, Any]:
    """Of all requests of some of several loads, in all turns that others did not disturb: their times, tokens in and
    out, and the core-seconds of each outside of engines and in them."""
    all_rows = [row[i] for row in loads for i in which]
    rows = [row for row in all_rows if row["others"] <= OTHERS] or all_rows
    found: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in ("ttft_s", "tpot_s")}
    tokens = {way: rows[0][f"total_{way}put_tokens"] // rows[0]["completed"] for way in ("in", "out")}
    outside = sum(row["outside_s"] * row["total_output_tokens"] for row in rows) / sum(row["completed"] for row in rows)
    count = sum(row["completed"] for row in rows)
    engine = sum(row["engine_s"] * row["completed"] for row in rows) / count
    return found | tokens | {"outside": outside, "engine": engine, "completed": count}


def _beside(rows: list[dict[str, Any]], time: StepTime, around: Around) -> float:
    """What a step takes longer while others write answers: as much as those of all engines at once took longer."""
    taken = float(np.mean([row["tpot_s"].mean() for row in rows]))
    asks = [Ask(0.0, rows[0]["in"], rows[0]["out"])] * len(rows) * rows[0]["completed"]

    def seconds(step: float) -> float:
        there = replace(around, step=step)
        runs = [simulate(asks, time, LIMITS, len(rows), there, at_once=len(rows), seed=seed) for seed in range(DRAWS)]
        return float(np.mean([one.tpot for run in runs for one in run.served]))

    return _least(seconds, taken)


def _mixed(turns: list[dict[str, Any]], time: StepTime, varies: dict[str, float]) -> float:
    """What a step takes beyond its tokens that has answers and prompts, for each request: as much as requests took
    longer of which one server alone had two at a time. No batch has such steps, for all its requests begin together.
    Tokens of the second ones, which are alone by then, tell how fast the engine was: behind long rests it is slower."""
    loads = [turn["pairs"] for turn in turns]
    row = each(loads, *range(len(loads[0])))
    taken = float(row["ttft_s"].mean() + (row["out"] - 1) * row["tpot_s"].mean())
    asks = [Ask(start, row["in"], row["out"]) for start in PAIRS]
    (alone,) = simulate(asks[:1], time, LIMITS, 1).served
    time = time.times(float(row["tpot_s"].reshape(-1, len(PAIRS))[:, 1::2].mean()) / (alone.tpot or math.nan))

    def seconds(mixed: float) -> float:
        runs = [simulate(asks, time, LIMITS, 1, Around(mixed=mixed, **varies), seed=seed) for seed in range(DRAWS)]
        return float(np.mean([one.e2e for run in runs for one in run.served]))

    return _least(seconds, taken)


def _least(seconds: Callable[[float], float], taken: float) -> float:
    """From 0 to 0.02 for what ``seconds`` reaches ``taken``."""
    low, high = 0.0, 0.02
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < taken else (low, middle)
    return low
