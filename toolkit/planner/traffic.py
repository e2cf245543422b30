"""What is asked, and when: drawn by a seed, or read from a trace."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.base.arrivals import poisson_starts
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError

# A trace's columns: ours, then what vLLM's, Mooncake's and Azure's traces call them.
COLUMNS = {
    "arrival": ("arrival", "arrival_s", "timestamp_s", "time"),
    "input": ("input_len", "prompt_tokens", "input_length", "ContextTokens"),
    "output": ("output_len", "completion_tokens", "output_length", "GeneratedTokens"),
}
MILLISECONDS, MOMENT = "timestamp", "TIMESTAMP"  # Mooncake's; Azure's, a date and a time of day
MOST = 10**9  # tokens: no model has as many, and each step of such a request would be simulated
Z99 = 2.326347874  # of the normal distribution, below which 99 % lie


@dataclass(frozen=True)
class Ask:
    """One request: seconds at which it comes, tokens in and out, ``cached``: of the former, in the prefix cache."""

    arrival: float
    input_len: int
    output_len: int
    cached: int = 0


def lengths(flag: str, text: str) -> Callable[[np.random.Generator, int], list[int]]:
    """What draws so many lengths: "256" (all alike), "64:1024" (uniform), "lognormal:256:2048" (median, 99th
    percentile). Raises UsageError that names ``flag``."""
    if found := re.fullmatch(r"\d{1,9}", text):
        fixed = int(text)
        if fixed < 1:
            raise UsageError(f"{flag}: expected 1 token or more, found {text}")
        return lambda rng, count: [fixed] * count
    if found := re.fullmatch(r"(\d{1,9}):(\d{1,9})", text):
        low, high = int(found[1]), int(found[2])
        if not 1 <= low <= high:
            raise UsageError(f"{flag}: expected MIN:MAX with 1 <= MIN <= MAX, found {text}")
        return lambda rng, count: rng.integers(low, high + 1, count).tolist()
    if found := re.fullmatch(r"lognormal:(\d{1,9}):(\d{1,9})", text):
        median, most = int(found[1]), int(found[2])
        if not 1 <= median < most:
            raise UsageError(f"{flag}: expected lognormal:MEDIAN:P99 with 1 <= MEDIAN < P99, found {text}")
        sigma = math.log(most / median) / Z99
        return lambda rng, count: rng.lognormal(math.log(median), sigma, count).clip(1, MOST - 1).astype(int).tolist()
    raise UsageError(f"{flag}: expected tokens, MIN:MAX, or lognormal:MEDIAN:P99, found {text!r:.40}")


def drawn(seed: int, count: int, rate: float, inputs: str, outputs: str, cached: int) -> list[Ask]:
    """``count`` requests that come at random, ``rate`` a second (Poisson); ``cached``: of each prompt's first tokens,
    always all but one at most."""
    rng = np.random.default_rng([seed, 1])
    ins = lengths("random_input_len", inputs)(rng, count)
    outs = lengths("random_output_len", outputs)(rng, count)
    starts = poisson_starts(seed, count, rate)
    return [Ask(t, i, o, min(cached, i - 1)) for t, i, o in zip(starts, ins, outs, strict=True)]


def read_trace(path: Path, cached: int) -> list[Ask]:
    """Requests of a .jsonl or .csv file, by arrival, the first at 0. Raises UsageError that names the line."""
    found = []
    for number, row in _rows(path):
        where = f"trace: {path}, line {number}"
        time = _arrival(where, row)
        sizes = [_value(where, row, name, int) for name in ("input", "output")]
        for name, size in zip(("input", "output"), sizes, strict=True):
            if size is None or size < 1:
                told = "nothing" if size is None else size
                raise UsageError(f"{where}: {COLUMNS[name][0]}: expected 1 token or more, found {told}")
            if size >= MOST:
                raise UsageError(f"{where}: {COLUMNS[name][0]}: expected fewer than {MOST:,} tokens, found {size:g}")
        if not time >= 0:
            raise UsageError(f"{where}: {COLUMNS['arrival'][0]}: expected seconds from 0 up, found {time:g}")
        size_in, size_out = (int(size or 0) for size in sizes)
        found.append(Ask(time, size_in, size_out, min(cached, size_in - 1)))
    if not found:
        raise UsageError(f"trace: {path}: expected a line a request, found none")
    found.sort(key=lambda ask: ask.arrival)
    first = found[0].arrival
    return [Ask(a.arrival - first, a.input_len, a.output_len, a.cached) for a in found]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix not in (".jsonl", ".csv"):
        raise UsageError(f"trace: expected a .jsonl or .csv file, found {path}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                reader = csv.DictReader(file)
                for entry in reader:
                    yield reader.line_num, {str(k): v for k, v in entry.items() if v not in (None, "")}
                return
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UsageError(f"trace: {path}, line {number}: expected a JSON object ({error})") from None
                if not isinstance(row, dict):
                    raise UsageError(
                        f"trace: {path}, line {number}: expected a JSON object, found {line.strip()!r:.40}"
                    )
                yield number, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"trace: {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _arrival(where: str, row: dict[str, Any]) -> float:
    """In seconds, from whatever moment on."""
    time: float | None = _value(where, row, "arrival", float)
    if time is not None:
        return time
    if (milliseconds := row.get(MILLISECONDS)) is not None:
        return _number(where, MILLISECONDS, milliseconds) / 1000
    if MOMENT not in row:
        raise UsageError(f"{where}: expected {COLUMNS['arrival'][0]} (seconds), found {', '.join(row) or 'nothing'}")
    try:
        moment = datetime.fromisoformat(row[MOMENT])
    except (TypeError, ValueError):
        raise UsageError(f"{where}: {MOMENT}: expected a date and time, found {row[MOMENT]!r:.40}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _value(where: str, row: dict[str, Any], name: str, kind: Callable[[float], Any]) -> Any:
    key = next((key for key in COLUMNS[name] if key in row), None)
    return None if key is None else kind(_number(where, key, row[key]))


def _number(where: str, key: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):  # the last of an integer of hundreds of digits
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{where}: {key}: expected a number, found {value!r:.40}")
    return number
