"""What the planner says of files and options that cannot be: the whole line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refused import refusing
from toolkit.errors import UsageError
from toolkit.planner.fit import read_profile
from toolkit.planner.machines import read_machines
from toolkit.planner.options import Demand
from toolkit.planner.traffic import lengths, read_trace

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lognormal:9:9", "--x: expected lognormal:MEDIAN:P99 with 1 <= MEDIAN < P99, found lognormal:9:9"),
        ("9:8", "--x: expected MIN:MAX with 1 <= MIN <= MAX, found 9:8"),
        ("0", "--x: expected 1 token or more, found 0"),
        ("many", "--x: expected tokens, MIN:MAX, or lognormal:MEDIAN:P99, found 'many'"),
    ],
)
def test_lengths(text: str, told: str) -> None:
    assert refused(lambda: lengths("--x", text)) == told


def test_drawn_lengths_have_a_bound() -> None:
    found = lengths("--x", "lognormal:1:999999999")(np.random.default_rng(0), 100_000)
    assert 1 <= min(found) and max(found) < 10**9


@pytest.mark.parametrize(
    ("demand", "told"),
    [
        (Demand(request_rate=1.0, prefill=10**9), "prefill: expected at most 999999, found 1000000000"),
        *(
            (
                Demand(request_rate=1.0, **dict[str, Any]({name: math.inf})),
                f"{name}: expected a number that is not infinite, found inf",
            )
            for name in (
                "route_ms",
                "handover_ms",
                "cold_ms",
                "threads",
                "outside_us",
                "step_us",
                "jitter_ms",
                "mixed_us",
            )
        ),
    ],
)
def test_demands_that_no_simulation_ends(demand: Demand, told: str) -> None:
    assert refused(demand.check) == told


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", "", "trace: expected a .jsonl or .csv file, found {path}"),
        ("a.jsonl", "\n", "trace: {path}: expected a line a request, found none"),
        ("a.csv", "\xff", "trace: {path}: cannot be read ("),
        ("a.jsonl", '{"time": 1%s}' % ("0" * 400), "trace: {path}, line 1: time: expected a number, found 1000"),
        (
            "a.jsonl",
            '{"time": 0, "input_len": 1e300, "output_len": 1}',
            "trace: {path}, line 1: input_len: expected fewer than 1,000,000,000 tokens, found 1e+300",
        ),
    ],
)
def test_a_trace(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    assert refused(lambda: read_trace(path, 0)).startswith(told.format(path=path))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], 'expected {"model": {…}, "machines": [{"name": …}, …]}'),
        ({"machines": []}, 'expected {"model": {…}, "machines": [{"name": …}, …]}'),
        ({"machines": [5]}, "expected an object with a name, found 5"),
        ({"machines": [{"name": 5}]}, "expected an object with a name, found {'name': 5}"),
        (
            {"machines": [{"name": "a"}]},
            "a: expected a profile, or a model in the file from which its times can be predicted",
        ),
        ({"machines": [{"name": "a", "profile": []}]}, "a: profile: expected names of files, found []"),
    ],
)
def test_machines(tmp_path: Path, data: object, told: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(data))
    assert refused(lambda: read_machines(path, Demand())) == f"--machines: {path}: {told}"


def test_a_profile_that_is_not_there_is_named_by_who_names_it(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"machines": [{"name": "two cores", "profile": ["short.json"]}]}))
    told = f"{tmp_path / 'short.json'}: no such file; "
    told += "write it with tool profile api_server ADDRESS --concurrency 1,2,4,8 --json short.json"
    assert refused(lambda: read_machines(path, Demand())) == f"--machines: {path}: two cores: profile: {told}"
    assert refused(lambda: read_profile(tmp_path / "short.json")) == f"--profile: {told}"


MADE_BY = "expected what `tool profile generation` or `tool profile api_server` write with --json"
SERVED = {"max_concurrency": 4, "completed": 4, "total_input_tokens": 40, "mean_ttft_ms": 1.0, "mean_tpot_ms": 1.0}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "expected a row a run, found none"),
        ([5], f"{MADE_BY}, found int"),
        ({"a": 1}, f"{MADE_BY}, found a"),
        (
            {"decode_throughput": 1.0, "concurrency": 1, "prompt_tokens": 8, "completion_tokens": 1},
            "completion_tokens: expected 2 or more, for a speed of decoding, found 1",
        ),
        ({"decode_throughput": 1.0}, f"{MADE_BY} (KeyError: 'concurrency')"),
        (
            {**SERVED, "total_output_tokens": 4},
            "expected answers of 2 tokens or more, for a speed of decoding",
        ),
        (
            {**SERVED, "request_rate": 2.0},
            "measured at a rate; expected --concurrency alone (1,2,4,8, say): times of steps show where the number of "
            "requests is known",
        ),
        (
            {**SERVED, "total_output_tokens": 40, "mean_ttft_ms": float("nan")},
            "seconds until the first token: expected a number above 0, found nan; measure again",
        ),
        (
            {**SERVED, "total_output_tokens": 40, "max_concurrency": 0},
            "concurrency: expected a number above 0, found 0; measure again",
        ),
        (
            {**SERVED, "completed": 10**7, "total_input_tokens": 10**9, "total_output_tokens": 10**9},
            "requests: expected at most 100,000, found 1e+07; measure a shorter run",
        ),
        (
            {
                **SERVED,
                "completed": 5000,
                "max_concurrency": 5000,
                "total_input_tokens": 5000,
                "total_output_tokens": 10**5,
            },
            "concurrency: expected at most 4,096, found 5000; measure a shorter run",
        ),
        (
            {**SERVED, "total_input_tokens": 10**12, "total_output_tokens": 40},
            "prompt tokens of all requests: expected at most 1,000,000,000, found 1e+12; measure a shorter run",
        ),
    ],
)
def test_profiles(tmp_path: Path, data: object, told: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    assert refused(lambda: read_profile(path)) == f"--profile: {path}: {told}"
