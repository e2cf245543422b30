"""``scripts/bench_gpu`` without a GPU: every part with tiny shapes, and predictions beside what was measured."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench_gpu(monkeypatch, script):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return script("gpu/bench.py")


@pytest.mark.parametrize(
    "part, rows", [("copy_rate", 1), ("linears", 4), ("attention", 6), ("kept", 9), ("row_wise", 8), ("tune", 2)]
)
def test_every_part_runs_dry(part, rows, bench_gpu):
    found = list(bench_gpu.rows_of(part, 0, True))
    assert len(found) == rows and all(row["value"] > 0 for row in found), found


def test_the_engine_runs_dry(bench_gpu):
    found = list(bench_gpu.rows_of("engine", 0, True))
    assert [row["name"] for row in found] == ["tiny, start", "tiny, batch 1", "tiny, 20/4"]
    assert found[1]["tokens"] == 4 and found[2]["tokens"] == 12 and all(row["value"] > 0 for row in found)
    assert [row["compiled_late"] for row in found] == [0, 0, 0]


def test_a_load_is_run_once_before_it_is_timed(bench_gpu, monkeypatch):
    from gpu.measuring import engine

    missed, fed = ["start"], []

    def answer(core):
        missed.extend(["late"] * (3 if len(fed) == 1 else 1))
        return 40, 0.5, 1.5

    monkeypatch.setattr(engine, "feed", lambda core, load, vocabulary, new=None: fed.append(new))
    monkeypatch.setattr(engine, "answer_of", answer)
    row = engine._run(None, engine.TINY[0], engine.ONE, missed)
    assert fed == [engine.WARM, None] and (row["compiled_late"], row["compiled_timed"]) == (4, 1)
    assert row["value"] == 39 / 1.0 and row["first_token_seconds"] == 0.5


def test_a_replay_before_the_timed_one_hides_its_launch(bench_gpu, monkeypatch):
    from contextlib import nullcontext

    from gpu.measuring import timing

    calls = []

    class Event:
        def __init__(self, enable_timing):
            self.record = lambda: calls.append("record")
            self.synchronize = lambda: calls.append("wait")
            self.elapsed_time = lambda end: 64.0

    graph = SimpleNamespace(replay=lambda: calls.append("replay"))
    for name, stand_in in {
        "synchronize": lambda: None,
        "CUDAGraph": lambda: graph,
        "Stream": lambda: None,
        "Event": Event,
        "graph": lambda graph, stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert timing.seconds([lambda: None], "cuda") == pytest.approx(1e-3)
    assert calls[:5] == ["replay", "record", "replay", "record", "wait"]


def test_zeros_of_measured_weights_are_not_dropped(bench_gpu):
    from gpu.measuring import kernels

    found = []
    kernels._grouped(
        SimpleNamespace(prepare=lambda *arguments, scratch: found.append(arguments[2])),
        64,
        256,
        64,
        kernels.Where("cpu", ("torch",)),
    )
    assert bool((found[0] != 8).any()) and int(found[0].max()) <= 15


def test_what_was_tuned_is_in_the_report_too(bench_gpu, tmp_path, monkeypatch):
    tuned = tmp_path / "nvidia-h200.json"
    tuned.write_text('{"attend_kernel": {"a": {"keys": 64}}}')
    row = {"name": "tune attend_kernel a", "value": 1.0, "unit": "s", "file": str(tuned)}
    monkeypatch.setattr("gpu.machine.machine", lambda program, dry: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(bench_gpu, "figures", lambda *_: iter([row]))
    report = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--tune", "--json", str(report)])
    assert bench_gpu.main() == 0
    assert json.loads(report.read_text())["tuned"] == {"attend_kernel": {"a": {"keys": 64}}}


def test_one_call_writes_figures_as_they_come(tmp_path):
    report = tmp_path / "bench.json"
    command = [sys.executable, "-P", str(ROOT / "scripts/gpu/bench.py"), "--dry-run", "--only", "copy_rate"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(report.read_text())["rows"]
    assert row["name"] == "copy" and row["predicted"] == [4.2e12, 4.4e12] and row["as_predicted"] is False
    assert "4.20 TB/s .. 4.40 TB/s" in done.stdout
    assert (
        "8b w4 head 8, batch 1" in done.stdout and "goal 600 tok/s" in done.stdout
    )  # all that a GPU would be asked for


def test_a_turn_goes_on_where_it_ended(tmp_path):
    def turn(*more):
        command = [str(ROOT / "scripts/gpu_turn"), "--dry-run", "--out", str(tmp_path), *more]
        environment = os.environ | {"PYTHON": sys.executable}
        return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)

    late = turn("--seconds", "5", "--only", "check")
    assert late.returncode == 1 and late.stdout == "check: left out, time was over\n"
    failed = turn("--only", "user", "--model", str(tmp_path / "none"))
    assert failed.returncode == 1 and failed.stdout.startswith("user: exit code 1")
    assert "no such file" in (tmp_path / "log.txt").read_text()
    first = turn("--only", "row_wise")
    assert first.returncode == 0 and first.stdout.startswith("row_wise: exit code 0"), first
    assert all("value" in row for row in json.loads((tmp_path / "row_wise.json").read_text())["rows"])
    again = turn("--only", "row_wise")
    assert again.returncode == 0 and again.stdout == "row_wise: done before\n"
    assert turn("--no-such").returncode == 2


def test_a_part_that_dies_is_one_row_and_names_its_reason(bench_gpu):
    (row,) = bench_gpu.child("nothing", 0, True, 60)
    assert row["error"].startswith("exit code 1") and "nothing" in row["error"]
    assert "exit code 1" in bench_gpu.line(row, None)


def test_a_part_may_warn_as_much_as_it_likes(bench_gpu, tmp_path, monkeypatch):
    part = tmp_path / "part.py"
    part.write_text("import sys\nsys.stderr.write('warning ' * 40000)\nprint('{\"name\": \"x\"}')\n")
    monkeypatch.setattr(bench_gpu, "__file__", str(part))
    assert list(bench_gpu.child("x", 0, True, 60)) == [{"name": "x"}]


def test_a_part_ends_with_the_turn_that_ends_its_script(tmp_path):
    """As ``gpu_turn`` ends it: what is measured next has the GPU for itself."""
    part, mark = tmp_path / "part.py", tmp_path / "pid"
    part.write_text(f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    code = f"from gpu import bench; bench.__file__ = {str(part)!r}; list(bench.child('engine', 0, True, 500))"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'scripts'}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(["timeout", "500", sys.executable, "-P", "-c", code], env=environment) as turn:
        while not mark.is_file() or not mark.read_text():
            assert turn.poll() is None
            time.sleep(0.05)
        turn.terminate()  # "timeout" then does what it does when time is over
    until = time.monotonic() + 20
    while Path(f"/proc/{mark.read_text()}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_goals_and_predictions_stand_beside_a_figure(bench_gpu):
    predictions = {
        "kernels": {"fast": {"predicted": [1e-6, 2e-6], "goal": 3e-6, "unit": "s"}},
        "engine": {"whole": {"goal": 100, "unit": "tok/s"}},
    }
    row = bench_gpu.beside({"name": "fast", "value": 1.5e-6, "unit": "s", "bytes": 3000}, predictions)
    assert row["as_predicted"] and row["of_goal"] == 2.0
    assert bench_gpu.line(row, 4e9).split() == "fast 1.5 µs 1.0 µs .. 2.0 µs 50% of copy 2.00 × goal 3.0 µs".split()
    assert bench_gpu.beside({"name": "whole", "value": 50, "unit": "tok/s"}, predictions)["of_goal"] == 0.5
    assert bench_gpu.beside({"name": "other", "value": 1, "unit": "s"}, predictions) == {
        "name": "other",
        "value": 1,
        "unit": "s",
    }


def test_every_figure_is_predicted(bench_gpu, monkeypatch):
    """Names are those that the parts give on a GPU, each has a prediction, and there is none beside them."""
    from gpu.measuring import engine, kept, kernels

    said = json.loads(bench_gpu.PREDICTIONS.read_text())
    figures = {**said["kernels"], **said["engine"]}
    assert sorted(figures) == sorted(bench_gpu.names())
    for name, figure in figures.items():
        low, high = figure["predicted"]
        assert 0 < low < high <= 2 * low or "start" in name, name
        assert bench_gpu.prediction(name, said).startswith(name)
    monkeypatch.setattr(kernels, "seconds", lambda runs, device: 1.0)
    monkeypatch.setattr(kernels, "measured", lambda name, *_, **more: {"name": name, "value": 1.0, "unit": "s"} | more)
    monkeypatch.setattr(kernels, "copies", lambda size, device: 1)
    where = kernels.meta(90)
    parts = (kernels.linears, kernels.attention, kernels.row_wise)
    given = [row["name"] for part in parts for row in part(kernels.Size(), where)]
    given += [row["name"] for row in kept.kept(where)]
    given = [name for name in given if name != "linears w4 cuda"]  # the reason why it cannot run here
    assert {n for n in kernels.names(kernels.Size()) if n not in given} == {
        "copy",
        "attention decode flash_attn",
        *(f"linears w4 {how}, {n} rows" for how in ("cuda", "marlin") for n in kernels.Size().rows),
    }
    assert set(given) <= set(figures)
    assert [c.label for c in engine.CASES if c.config.get("quantization_config", {}).get("lm_head")] == ["8b w4 head 8"]


def test_a_run_begins_with_compiling_and_says_what_it_left_out(bench_gpu, monkeypatch):
    from gpu import process

    commands = []

    def compiled(command, limit, environment=None):
        commands.append(command)
        return process.Finished(0, 'precompile: …\n{"variants": 3, "errors": []}\n', "", 2.0)

    monkeypatch.setattr(process, "run_limited", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(bench_gpu, "child", lambda part, case, dry, limit: iter([{"name": part, "limit": limit}]))
    options = SimpleNamespace(dry_run=False, only=None, tune=False, no_compile=False)
    result = {"machine": {"gpu": "NVIDIA H200"}, "done": []}
    rows = list(bench_gpu.figures(options, time.perf_counter(), result))
    assert (
        rows[0]["name"] == "compile"
        and rows[0]["variants"] == 3
        and [r["name"] for r in rows[1:3]] == ["copy_rate", "linears"]
    )
    assert commands[0][2:] == [
        "cuda",
        "kernels",
        "self-test",
        "engine",
        "--arch",
        "90",
        "--device",
        "nvidia-h200",
        "--seconds",
        "150.0",
    ]
    late = list(bench_gpu.figures(options, time.perf_counter() - 566, result | {"done": []}))
    assert all("left out" in row["error"] for row in late[1:]) and len(late) == len(rows)


def test_figures_that_are_there_are_not_measured_again(bench_gpu, tmp_path, monkeypatch):
    """A part whose process ended before its time has none that count; the others keep theirs."""
    report, asked, ends = tmp_path / "bench.json", [], {"engine 0"}

    def child(part, case, dry, limit):
        asked.append(name := f"{part} {case}")
        yield {"name": f"{name}, start", "value": 1.0, "unit": "s"}
        if name not in ends:
            yield {"name": name, "error": "exit code 124: took longer than 160 s"}

    monkeypatch.setattr(bench_gpu, "child", child)
    monkeypatch.setattr("gpu.machine.machine", lambda program, dry: {"gpu": "none"})
    command = ["bench_gpu", "--dry-run", "--only", "engine", "--resume", "--json", str(report)]
    monkeypatch.setattr(sys, "argv", command)
    assert bench_gpu.main() == 0 and asked == ["engine 0", "engine 1"]
    ends.add("engine 1")
    assert bench_gpu.main() == 0 and asked[2:] == ["engine 1"]
    assert [row["name"] for row in json.loads(report.read_text())["rows"]] == ["engine 0, start", "engine 1, start"]
    assert bench_gpu.main() == 0 and len(asked) == 3


def test_choices_of_a_key_are_made_by_all_its_jobs_and_kept_at_once(bench_gpu, tmp_path, monkeypatch):
    """Three jobs on a GPU that is not there, two of one key: one gains most with 64 keys, but both together with 128.
    The file is there before the second key's jobs end, and what is in it is used on that GPU alone.
    """
    from gpu.measuring import tune

    times = {
        "short": {32: 1.0, 64: 0.5, 128: 0.6},
        "long": {32: 1.0, 64: 1.5, 128: 0.7},
        "other": {32: 1, 64: 1, 128: 1},
    }

    def job(name, key):
        def measure():
            found = tune.tuning.tuned("attend_kernel", key, {"keys": 32}, torch.device("cuda", 0))
            return {"name": name, "value": times[name][found["keys"]], "unit": "s"}

        return tune.Job("attend_kernel", name, measure)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA Test GPU")
    monkeypatch.setattr(tune, "candidates", lambda *_: [{"keys": 64}, {"keys": 128}])
    monkeypatch.setattr(tune, "jobs", lambda *_: iter([job("short", "a"), job("long", "a"), job("other", "b")]))
    monkeypatch.setattr(tune, "write", functools.partial(tune.write, folder=tmp_path))
    rows = tune.tune(None, SimpleNamespace(target=lambda dtype: SimpleNamespace(capability=90)), dry=False)
    row = next(rows)
    assert row["jobs"] == ["short", "long"] and row["choice"] == {"keys": 128} and row["best_of_default"] < 0.7
    assert json.loads((tmp_path / "nvidia-test-gpu.json").read_text()) == {"attend_kernel": {"a": {"keys": 128}}}
    (last,) = rows
    assert last["choice"] is None and "file" not in last  # nothing gained
    monkeypatch.setattr(tune.tuning, "_FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA Test GPU", "NVIDIA Other"].__getitem__)
    used = [tune.tuning.tuned("attend_kernel", "a", {"keys": 32}, torch.device("cuda", i)) for i in (0, 1)]
    assert used == [{"keys": 128}, {"keys": 32}]
    tune.tuning._file.cache_clear()


def test_choices_that_cannot_be_fast_are_not_measured(bench_gpu, tmp_path, monkeypatch):
    from gpu.compiling import prune
    from gpu.measuring import tune

    from toolkit.kernels.machine_code import Usage

    assert prune.judge(Usage(64, 0, 0), 40_000, 4, 90).why is None
    assert prune.judge(Usage(255, 16, 0), 40_000, 4, 90).why == "spills 16 bytes"
    assert "shared memory" in prune.judge(Usage(64, 0, 0), 300_000, 4, 90).why
    assert "warps a multiprocessor" in prune.judge(Usage(64, 0, 0), 200_000, 4, 90).why
    kept = {"attend_kernel": {"decode-128-float": [{"keys": 64, "warps": 4, "stages": 4}], "decode-128-int4": []}}
    file = tmp_path / "candidates.json"
    file.write_text(prune.as_text({"90": kept}))
    assert json.loads(file.read_text()) == {"90": kept}
    monkeypatch.setattr(tune, "CANDIDATES", file)
    assert tune.candidates("attend_kernel", "decode-128-float", 90) == kept["attend_kernel"]["decode-128-float"]
    assert tune.candidates("attend_kernel", "decode-128-int4", 90) == []
    for kernel, key, capability in (("attend_kernel", "new", 90), ("attend_kernel", "decode-128-float", 80)):
        assert tune.candidates(kernel, key, capability) == tune.ALL[kernel]  # nobody compiled them


def test_tuned_choices_are_merged_into_the_devices_file(bench_gpu, tmp_path):
    from gpu.measuring import tune

    (tmp_path / "nvidia-h200.json").write_text('{"a": {"x": {"keys": 1}, "y": {"keys": 2}}}')
    path = tune.write({"a": {"x": {"keys": 64}}, "b": {"z": {"k": 3}}}, "NVIDIA H200", tmp_path)
    assert json.loads(path.read_text()) == {"a": {"x": {"keys": 64}, "y": {"keys": 2}}, "b": {"z": {"k": 3}}}
    trial = tune.Trial("a", {"keys": 5})
    assert trial.get("b", {}) == {} and trial.get("a", {}).get("x", {}) == {"keys": 5} and trial.keys == {"x"}
