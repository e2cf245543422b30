"""``tool plan``: what it answers, and which limit it names where there is no answer."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import UsageError
from toolkit.planner.engine import Limits
from toolkit.planner.fit import Measured, seconds_of, simulated
from toolkit.planner.fleet import Around, simulate
from toolkit.planner.machines import Machine, Model, predicted
from toolkit.planner.options import Demand
from toolkit.planner.plan import doubled, met, plan
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import Ask, drawn, read_trace

TIME = StepTime(0.008, (4.0,), (0.0005, 0.0009), 2e-6, 5e-8, 0.003)
Run = Callable[..., subprocess.CompletedProcess[str]]
H200 = {"name": "H200", "price": 4.5, "memory_gb": 141, "bandwidth_gb_s": 4300, "tflops": 790}
MODEL = {"weights_gb": 15.0, "operations_g": 15, "kv_kb": 131, "layers": 32}


@pytest.fixture
def run(support: Any) -> Run:
    return lambda *given: support("command").tool("plan", *given)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tool profile api_server --json`` writes, of an engine whose times are known."""
    rows = []
    for size in (1, 2, 4, 8, 16):
        count = 4 * size
        asked = Measured(size, count, 128, 32, 0, 0, True, False)
        ttft, decode = seconds_of(asked, simulated(asked, TIME, Limits(16)), TIME)
        rows.append(
            {"request_rate": None, "max_concurrency": size, "completed": count, "total_input_tokens": 128 * count}
            | {"total_output_tokens": 32 * count, "mean_ttft_ms": ttft * 1000, "mean_tpot_ms": decode / 31 * 1000}
        )
    path = tmp_path_factory.mktemp("profile") / "loops.json"
    path.write_text(json.dumps(rows))
    return path


def test_a_measured_engine(run: Run, profile: Path, tmp_path: Path) -> None:
    load = ["--request-rate", 12, "--num-prompts", 100, "--random-input-len", 128, "--random-output-len", "16:64"]
    files = ["--json", tmp_path / "a.json", "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.png"]
    goals = ["--slo", "ttft:400", "--slo", "tpot:p50:30", "--price", 0.5, "--max-batch-size", 16]
    done = run("--profile", profile, *load, *goals, *files)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert row["replicas"] >= 2 and row["p99_ttft_ms"] <= 400 and row["p50_tpot_ms"] <= 30
    assert row["one_less_keeps_slo"] is False and row["replicas_for_double"] > row["replicas"]
    assert row["price_an_hour"] == pytest.approx(0.5 * row["replicas"])
    per_second = row["price_an_hour"] / 3600
    assert row["cost_million_output_tokens"] == pytest.approx(per_second / row["output_throughput"] * 1e6)
    (line,) = csv.DictReader((tmp_path / "a.csv").open())
    assert line["machine"] == "this machine" and float(line["busy"]) == pytest.approx(row["busy"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "One fails" in done.stdout


def test_the_number_is_the_smallest_that_keeps_the_goals(profile: Path) -> None:
    demand = Demand(request_rate=15.0, num_prompts=100, random_output_len="32", slo=("ttft:300",), max_batch_size=16)
    machine = Machine("m", None, TIME, Limits(16), "measured")
    (answer,) = plan(demand, [machine])
    assert answer.replicas is not None and answer.replicas > 1
    asks = demand.asks()
    assert met(simulate(asks, TIME, machine.limits, answer.replicas), demand.slos)
    assert not met(simulate(asks, TIME, machine.limits, answer.replicas - 1), demand.slos)
    assert answer.doubled is not None and met(
        simulate(doubled(asks), TIME, machine.limits, answer.doubled), demand.slos
    )


def test_engines_for_prompts_are_paid_for() -> None:
    more: dict[str, Any] = {"slo": ("tpot:40",), "max_batch_size": 16, "prefill": 2, "random_input_len": "500"}
    demand = Demand(request_rate=4.0, num_prompts=60, random_output_len="32", **more)
    (answer,) = plan(demand, [Machine("m", 0.5, TIME, Limits(16), "measured")])
    assert answer.replicas is not None and answer.price == 0.5 * (answer.replicas + 2)
    assert answer.run == simulate(demand.asks(), TIME, Limits(16), answer.replicas, prefills=2)
    assert answer.row(demand.slos)["prefill_replicas"] == 2


def test_what_is_around_engines_counts() -> None:
    """Two cores for two engines and what speaks for them: less than two engines on machines of their own."""
    load: dict[str, Any] = {
        "request_rate": 8.0,
        "num_prompts": 60,
        "random_output_len": "32",
        "replicas": "2",
        "max_batch_size": 16,
    }
    machine = Machine("m", None, TIME, Limits(16), "measured")
    shared: dict[str, Any] = {
        "cores": 2.0,
        "threads": 1.2,
        "outside_us": 900.0,
        "outside_ms": 3.0,
        "outside_rested_ms": 1.0,
    }
    shared["route_ms"] = 4.0
    runs = []
    for given in ({}, shared, shared | {"prefill": 1, "replicas": "1", "handover_ms": 9.0, "handover_us": 50.0}):
        (answer,) = plan(Demand(**(load | given)), [machine])
        assert answer.run is not None
        runs.append(answer.run)
    own, both, apart = (run.percentile("tpot", 50) for run in runs)
    assert own < both and apart < both
    asks = Demand(**load).asks()
    around = Around(0.004, 0.0, 0.0, 2.0, 1.2, 0.0009, request=0.003, rested=0.001)
    assert runs[1] == simulate(asks, TIME, Limits(16), 2, around)
    assert runs[2] == simulate(asks, TIME, Limits(16), 1, replace(around, handing=0.009, handing_token=5e-5), 1)


def test_a_goal_that_slow_moments_alone_would_miss_can_be_kept() -> None:
    """Half of the requests take no longer than on a machine that is always as fast."""
    more: dict[str, Any] = {"random_input_len": "64", "random_output_len": "16", "replicas": "20", "noise": 0.1}
    demand = Demand(request_rate=2.0, num_prompts=100, slo=("tpot:p50:22.5",), **more)
    machine = Machine("m", None, StepTime(0.02, (), (0.001,)), Limits(16), "measured")
    (answer,) = plan(demand, [machine])
    assert answer.replicas == 20 and not answer.why
    (answer,) = plan(replace(demand, slo=("tpot:p50:20",)), [machine])
    assert "a request alone on an engine takes 21 ms" in answer.why


def test_whether_a_goal_can_be_kept_is_asked_of_all_requests() -> None:
    """The longest of a hundred says little of the longest hundredth of a thousand."""
    demand = Demand(
        request_rate=5.0, random_input_len="lognormal:200:1000", random_output_len="8", slo=("ttft:1200",), seed=2
    )
    machine = Machine("m", None, StepTime(0.02, (), (0.001,)), Limits(16), "measured")
    (answer,) = plan(replace(demand, replicas="200"), [machine])
    assert answer.run is not None and answer.run.percentile("ttft", 99) < 1.2
    assert answer.replicas == 200 and not answer.why


def test_twice_the_load_is_twice_the_requests_in_the_same_time() -> None:
    asks = drawn(0, 50, 3.0, "10:20", "5", 0)
    twice = doubled(asks)
    assert len(twice) == 100 and twice[-1].arrival == asks[-1].arrival
    assert sum(a.input_len for a in twice) == 2 * sum(a.input_len for a in asks)
    assert [a.arrival for a in twice] == sorted(a.arrival for a in twice)


def test_machines_to_choose_from(run: Run, tmp_path: Path, profile: Path) -> None:
    """Predicted ones, beside a measured one whose file is named by the folder of the list."""
    (tmp_path / "loops.json").write_bytes(profile.read_bytes())
    slow = H200 | {"name": "slow", "bandwidth_gb_s": 1000, "tflops": 300, "memory_gb": 80, "price": 1.5}
    machines = [H200, slow, {"name": "old", "price": 0.2, "profile": "loops.json"}]
    (tmp_path / "machines.json").write_text(json.dumps({"model": MODEL, "machines": machines}))
    flags = ["--request-rate", 12, "--num-prompts", 80, "--random-output-len", 32, "--slo", "ttft:500", "--json", "-"]
    done = run("--machines", tmp_path / "machines.json", *flags)
    assert done.returncode == 0, done.stderr
    fast, slow_row, old = json.loads(done.stdout)
    assert (fast["times"], old["times"]) == ("predicted", "measured, 5 runs")
    assert fast["p50_tpot_ms"] < slow_row["p50_tpot_ms"] and fast["replicas"] <= slow_row["replicas"] < old["replicas"]


def test_a_predicted_step_is_that_of_the_documentation() -> None:
    """One request of 8B in bf16 on an H200: 222 to 251 tokens a second (docs/figures/kernel-predictions.md)."""
    made = predicted("H200", None, Model(15.0, 15.0, 131.0, 32), 141, 4300, 790, Demand(request_rate=1.0))
    assert 222 <= 1 / made.time.seconds(1, 300) <= 251
    assert made.limits.kv_tokens == int((141 * 0.9 - 15) * 1e6 / 131) and not made.limits.paced


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--slo", "ttft:5"], 1, "p99 ttft of 5 ms: a request alone on an engine takes"),
        (["--slo", "ttft:600", "--replicas", "1:2"], 1, "--replicas 2: p99 ttft of 600 ms is missed,"),
        (
            ["--slo", "ttft:600", "--replicas", "1:20", "--prefill", "1"],
            1,
            "--prefill 1: p99 ttft of 600 ms is missed,",
        ),
        (["--slo", "tpot:20", "--replicas", "1:2", "--prefill", "20"], 1, "--replicas 2: p99 tpot of 20 ms is missed,"),
        (["--kv-tokens", "100"], 1, "memory: a request of 384 tokens, the KV cache holds 100"),
        (["--slo", "speed:5"], 2, "--slo: expected ttft, tpot, e2e with milliseconds"),
        (["--replicas", "5:2"], 2, "--replicas: expected MIN:MAX with 1 <= MIN <= MAX, found '5:2'"),
        (["--random-input-len", "9:3"], 2, "--random-input-len: expected MIN:MAX with 1 <= MIN <= MAX, found 9:3"),
        (["--random-output-len", "0"], 2, "--random-output-len: expected 1 token or more"),
        (["--random-output-len", "some"], 2, "--random-output-len: expected tokens, MIN:MAX, or lognormal"),
        (["--request-rate", "0"], 2, "--request-rate: expected requests a second above 0"),
        (["--trace", "nothing.jsonl"], 2, "--request-rate: expected either --request-rate or --trace"),
        (["--cores", "0"], 2, "--cores"),
        (["--handover-ms", "-1"], 2, "--handover-ms"),
        (["--price", "-1"], 2, "--price: expected a number above 0"),
        (["--paced", "maybe"], 2, "--paced: expected yes, no or auto"),
        (["--machines", "nothing.json"], 2, "--machines"),
    ],
)
def test_what_cannot_be(flags: list[str], code: int, message: str, run: Run, profile: Path) -> None:
    done = run("--profile", profile, "--request-rate", 30, "--num-prompts", 60, *flags)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_profiles_that_say_nothing_of_steps(run: Run, tmp_path: Path, profile: Path) -> None:
    rows = json.loads(profile.read_text())
    bad = tmp_path / "bad.json"
    for row, message in (
        (rows[0] | {"request_rate": 2.0}, "measured at a rate"),
        ({"something": 1}, "expected what `tool profile generation`"),
        ({k: v for k, v in rows[0].items() if k != "mean_ttft_ms"}, "KeyError"),
        ([], "expected a row a run, found none"),
    ):
        bad.write_text(json.dumps(row))
        done = run("--profile", bad, "--request-rate", 1)
        assert done.returncode == 2 and f"{bad}" in done.stderr and message in done.stderr, done.stderr
    assert run("--request-rate", 1).returncode == 2
    done = run("--profile", tmp_path / "none.json", "--request-rate", 1)
    assert done.returncode == 2 and "none.json" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": 12}, "the weights take 15 GB of 12 GB"),
        ({"bandwidth_gb_s": None}, "bandwidth_gb_s: expected a number above 0, found nothing"),
        ({"price": "much"}, "price: expected a number above 0, found 'much'"),
        ({"memory": 141}, "found memory"),
        ({"profile": []}, "profile: expected names of files"),
    ],
)
def test_machines_that_cannot_be(change: dict[str, Any], message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps({"model": MODEL, "machines": [H200 | change]}))
    done = run("--machines", tmp_path / "m.json", "--request-rate", 1)
    assert done.returncode in (1, 2) and message in done.stderr and "H200" in done.stderr, done.stderr


def test_traces(tmp_path: Path) -> None:
    """Ours, and the columns of vLLM's, Mooncake's (milliseconds) and Azure's."""
    ours, theirs, azure = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.csv"
    ours.write_text(
        '{"arrival": 7.5, "input_len": 10, "output_len": 3}\n\n{"arrival": 5, "input_len": 8, "output_len": 2}\n'
    )
    assert read_trace(ours, 9) == [Ask(0.0, 8, 2, 7), Ask(2.5, 10, 3, 9)]
    theirs.write_text('{"timestamp": 1500, "input_length": 4, "output_length": 1}\n')
    assert read_trace(theirs, 0) == [Ask(0.0, 4, 1)]
    for encoding in ("utf-8", "utf-8-sig"):  # as Excel writes it
        azure.write_text("arrival_s,ContextTokens,GeneratedTokens\n0.5,4,1\n1.5,6,2\n", encoding=encoding)
        assert [a.arrival for a in read_trace(azure, 0)] == [0.0, 1.0]
    for zone in ("", "+00:00"):  # as of 2023, with ticks of 100 ns, and of 2024
        moments = f"2023-11-16 23:59:59.9799600{zone},4808,10\n2023-11-17 00:00:01.2299600{zone},3180,8\n"
        azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + moments)
        assert read_trace(azure, 0) == [Ask(0.0, 4808, 10), Ask(pytest.approx(1.25), 3180, 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no JSON", "line 2: expected a JSON object"),
        ("[1]", "line 2: expected a JSON object"),
        ("[" * 100_000, "line 2: expected a JSON object"),
        ('{"arrival": 1, "input_len": 5}', "line 2: input_len: expected 1 token or more".replace("input", "output")),
        ('{"arrival": 1, "input_len": 0, "output_len": 5}', "line 2: input_len: expected 1 token or more, found 0"),
        ('{"arrival": "soon", "input_len": 5, "output_len": 5}', "line 2: arrival: expected a number, found 'soon'"),
        ('{"arrival": -1, "input_len": 5, "output_len": 5}', "line 2: arrival: expected seconds from 0 up"),
        ('{"input_len": 5, "output_len": 5}', "line 2: expected arrival (seconds)"),
        ('{"arrival": NaN, "input_len": 5, "output_len": 5}', "line 2: arrival: expected a number"),
        (
            '{"TIMESTAMP": "noon", "input_len": 5, "output_len": 5}',
            "line 2: TIMESTAMP: expected a date and time, found",
        ),
    ],
)
def test_a_bad_line_of_a_trace_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival": 0, "input_len": 5, "output_len": 5}\n' + line + "\n")
    with pytest.raises(UsageError) as refused:
        read_trace(path, 0)
    assert f"trace: {path}, {message}" in str(refused.value)


def test_lengths_are_what_was_asked_for() -> None:
    demand = Demand(
        request_rate=2.0, num_prompts=20_000, random_input_len="lognormal:200:2000", random_output_len="5:9"
    )
    asks = demand.asks()
    ins = sorted(a.input_len for a in asks)
    assert ins[10_000] == pytest.approx(200, rel=0.05) and ins[19_800] == pytest.approx(2000, rel=0.1)
    assert {a.output_len for a in asks} == {5, 6, 7, 8, 9}
    assert asks[-1].arrival == pytest.approx(10_000, rel=0.03) and demand.asks() == asks
    assert replace(demand, seed=1).asks() != asks
