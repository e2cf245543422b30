"""From what ``tool profile generation`` or ``tool profile api_server`` wrote to the time of a step.

Each row is simulated. How many steps of which content it had hardly depends on how long they took, so the times are
what least squares find from the contents, in a few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.artifacts.json_file import read_json
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.planner.engine import Job, Limits
from toolkit.planner.fleet import closed
from toolkit.planner.step_time import Features, StepTime, made, non_negative

ROUNDS = 24  # at most: how prompts are cut depends on the times, and settles slowly
SETTLED = 1e-3  # change of all errors below which it has
FIRST = 3  # of them with a bend at each size that was measured; then few enough are chosen
GOOD = 0.02  # relative error below which a smaller one is no better
MOST_AT_ONCE, MOST_REQUESTS = 4096, 100_000  # of a run: all of them are simulated, in each round
MOST_TOKENS = 10**9  # likewise, of all its prompts, and of an answer
GUESS = StepTime(0.01, (), (0.001,))


@dataclass(frozen=True)
class Measured:
    """A row of a file: ``at_once`` requests at a time, ``count`` in all; seconds, mean over requests, until the first
    token and from it to the last. ``served``: over HTTP, so that requests have a way to the engine, and it paces its
    steps. ``together``: all began at once, and the seconds are until the last of their first tokens, and after it.
    ``cut``: prompt tokens of a step at most, where prompts have more."""

    at_once: int
    count: int
    input_len: int
    output_len: int
    ttft: float
    decode: float
    served: bool
    together: bool
    cut: int | None = None


@dataclass(frozen=True)
class Fit:
    """``errors``: of each measured figure, simulated / measured - 1."""

    time: StepTime
    errors: list[float]

    @property
    def worst(self) -> float:
        return max(self.errors, key=abs)


def read_profile(path: Path, named_by: str = "--profile") -> list[Measured]:
    """``named_by``: the option, or the place in its file, that messages begin with. Raises UsageError where it is none,
    or was measured at a rate."""
    if not path.exists():
        write = f"write it with tool profile api_server ADDRESS --concurrency 1,2,4,8 --json {path.name}"
        raise UsageError(f"{named_by}: {path}: no such file; {write}")
    try:
        found = read_json(path)
    except ToolkitError as error:
        raise UsageError(f"{named_by}: {error}") from None
    rows = found if isinstance(found, list) else [found]
    made = [read_row(f"{named_by}: {path}", row) for row in rows]
    if not made:
        raise UsageError(f"{named_by}: {path}: expected a row a run, found none")
    return made


def read_row(where: str, row: Any) -> Measured:
    """``where``: what messages name. Raises UsageError where it is none, or was measured at a rate."""
    kinds = "expected what `tool profile generation` or `tool profile api_server` write with --json"
    if not isinstance(row, dict):
        raise UsageError(f"{where}: {kinds}, found {type(row).__name__}")
    try:
        if "decode_throughput" in row:
            size, length, out = (int(row[key]) for key in ("concurrency", "prompt_tokens", "completion_tokens"))
            if out < 2:
                raise UsageError(
                    f"{where}: completion_tokens: expected 2 or more, for a speed of decoding, found {out}"
                )
            ttft, decode = size * length / row["prefill_throughput"], size * (out - 1) / row["decode_throughput"]
            most = int(row.get("max_prefill_token_num", size * length))
            cut = most if most < size * length else None
            return _possible(where, Measured(size, size, length, out, ttft, decode, False, True, cut))
        if "max_concurrency" in row:
            count, most = int(row["completed"]), row["max_concurrency"]
            if row.get("request_rate") is not None or most is None:
                raise UsageError(
                    f"{where}: measured at a rate; expected --concurrency alone (1,2,4,8, say): times of steps show "
                    "where the number of requests is known"
                )
            length, out = round(row["total_input_tokens"] / count), round(row["total_output_tokens"] / count)
            if out < 2:
                raise UsageError(f"{where}: expected answers of 2 tokens or more, for a speed of decoding")
            decode = row["mean_tpot_ms"] / 1000 * (out - 1)
            ttft = row["mean_ttft_ms"] / 1000
            return _possible(where, Measured(int(most), count, length, out, ttft, decode, True, False))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{where}: {kinds} ({type(error).__name__}: {error})") from None
    raise UsageError(f"{where}: {kinds}, found {', '.join(map(str, list(row)[:4])) or 'nothing'}")


def _possible(where: str, row: Measured) -> Measured:
    """``row``, unless a figure of it is none that can be measured, or no simulation would end: then UsageError."""
    figures = {
        "concurrency": row.at_once,
        "requests": row.count,
        "prompt tokens": row.input_len,
        "seconds until the first token": row.ttft,
        "seconds from it to the last": row.decode,
        "prompt tokens of a step": row.input_len if row.cut is None else row.cut,
    }
    for name, value in figures.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{where}: {name}: expected a number above 0, found {value:g}; measure again")
    bounds = {
        "concurrency": (min(row.at_once, row.count), MOST_AT_ONCE),
        "requests": (row.count, MOST_REQUESTS),
        "prompt tokens of all requests": (row.count * row.input_len, MOST_TOKENS),
        "tokens of an answer": (row.output_len, MOST_TOKENS),
    }
    for name, (count, most) in bounds.items():
        if count > most:
            raise UsageError(f"{where}: {name}: expected at most {most:,}, found {count:g}; measure a shorter run")
    return row


def fit(rows: Sequence[Measured], limits: Limits) -> Fit:
    """The times of steps with which the simulated runs are nearest to the measured ones, by relative error. Of a few
    figures that another program spoiled the others know nothing: errors count as they are, not squared."""
    knots, most = _sizes(rows, limits), max(1, 4 * len(rows) // 3 - 6)
    time = replace(GUESS, knots=knots, slopes=(*(0.0 for _ in knots), GUESS.slopes[0]))
    target = np.array([seconds for row in rows for seconds in (row.ttft, row.decode)])
    waits = np.array([[float(row.served), float(not row.served)] for row in rows])
    ways = np.stack([waits, np.zeros_like(waits)], axis=1).reshape(-1, 2)  # to a first token, over HTTP and without
    best = now = Fit(time, [np.inf] * len(target))
    way, counts = 0.0, np.ones(len(target))
    runs = [simulated(row, time, limits) for row in rows]
    for turn in range(ROUNDS):
        matrix = np.array([line for row, run in zip(rows, runs, strict=True) for line in _contents(row, run)])
        whole = np.column_stack([matrix, ways]) * (counts / target)[:, None]
        if chosen := turn == FIRST and len(knots) > most:
            knots, whole = _chosen(knots, whole, counts, most)
        found = non_negative(whole, counts)
        last = np.array([time.start, *time.slopes, time.context, time.pairs, time.row, time.wait, way])
        found = found if turn == 0 or chosen else (found + last) / 2
        *coefficients, wait, way = found.tolist()
        time = made(knots, coefficients, wait)
        runs = [simulated(row, time, limits) for row in rows]
        takes = [s for row, run in zip(rows, runs, strict=True) for s in seconds_of(row, run, time)]
        before, now = now, Fit(time, ((np.array(takes) + way * ways[:, 1]) / target - 1).tolist())
        counts = 1 / np.sqrt(np.maximum(np.abs(now.errors), GOOD))
        if len(knots) <= most:
            best = min(best, now, key=lambda one: sum(map(abs, one.errors)))
        if turn > FIRST and np.abs(np.subtract(now.errors, before.errors)).max() < SETTLED:
            break
    return best


def _sizes(rows: Sequence[Measured], limits: Limits) -> tuple[float, ...]:
    """Of steps whose times were measured: those of batches, and of prompts that were alone, or of their pieces."""
    alone = {row.cut or row.input_len for row in rows if row.together and row.at_once == 1}
    return tuple(sorted(map(float, {min(row.at_once, limits.max_batch_size) for row in rows} | alone)))


def _chosen(
    sizes: tuple[float, ...], whole: Features, target: Features, count: int
) -> tuple[tuple[float, ...], Features]:
    """At which ``count`` (fewer) of ``sizes``, the largest among them, the line of a step's tokens bends, so that it is
    nearest to what was measured, and ``whole`` for these: there have to be more figures than coefficients."""
    found: tuple[float, tuple[float, ...], Features] | None = None
    for some in combinations(range(len(sizes) - 1), count - 1):
        ends = [0, *(i + 1 for i in some), len(sizes)]  # columns 1 to len(sizes) are of tokens up to a size
        merged = [whole[:, 1 + low : 1 + high].sum(axis=1) for low, high in pairwise(ends)]
        matrix = np.column_stack([whole[:, 0], *merged, whole[:, 1 + len(sizes) :]])
        left = float(np.square(matrix @ non_negative(matrix, target) - target).sum())
        if found is None or left < found[0]:
            found = left, (*(sizes[i] for i in some), sizes[-1]), matrix
    assert found is not None
    return found[1:]


def simulated(row: Measured, time: StepTime, limits: Limits) -> list[Job]:
    """Its requests, in the order in which they end."""
    own = replace(limits, max_batch_size=max(limits.max_batch_size, row.at_once), kv_tokens=None)
    own = own if row.served else replace(own, paced=False)
    own = own if row.cut is None else replace(own, max_prefill_token_num=row.cut)
    return closed(row.count, row.input_len, row.output_len, row.at_once, time, own).done


def _contents(row: Measured, jobs: list[Job]) -> tuple[Features, Features]:
    """What the steps held, until the first token and after it, as ``row`` has its seconds."""
    starts, firsts, ends = (
        np.array([getattr(job, name) for job in jobs]) for name in ("at_start", "at_first", "at_end")
    )
    if row.together:
        last = firsts[np.argmax([job.first for job in jobs])]
        return last, ends[np.argmax([job.end for job in jobs])] - last
    return (firsts - starts).mean(axis=0), (ends - firsts).mean(axis=0)


def seconds_of(row: Measured, jobs: list[Job], time: StepTime) -> tuple[float, float]:
    """As ``row`` has them, of its simulated requests."""
    first = max(job.first for job in jobs)
    if row.together:
        return first, max(job.end for job in jobs) - first
    ttft = float(np.mean([job.first - job.came for job in jobs])) + time.wait
    return ttft, float(np.mean([job.end - job.first for job in jobs]))
