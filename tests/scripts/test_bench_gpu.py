"""``scripts/bench_gpu`` without a GPU: every part with tiny shapes, and predictions beside what was measured."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("bench_gpu", ROOT / "scripts" / "bench_gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_gpu", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "part, rows", [("copy_rate", 1), ("linears", 4), ("attention", 6), ("row_wise", 6), ("tune", 5)]
)
def test_every_part_runs_dry(part, rows, bench_gpu):
    found = list(bench_gpu.rows_of(part, 0, True))
    assert len(found) == rows and all(row["value"] > 0 for row in found), found


def test_the_engine_runs_dry(bench_gpu):
    found = list(bench_gpu.rows_of("engine", 0, True))
    assert [row["name"] for row in found] == ["tiny, start", "tiny, batch 1", "tiny, 20/4"]
    assert found[1]["tokens"] == 4 and found[2]["tokens"] == 12 and all(row["value"] > 0 for row in found)


def test_one_call_writes_figures_as_they_come(tmp_path):
    report = tmp_path / "bench.json"
    command = [sys.executable, "-P", str(ROOT / "scripts/bench_gpu.py"), "--dry-run", "--only", "copy_rate"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(report.read_text())["rows"]
    assert row["name"] == "copy" and row["predicted"] == [4.2e12, 4.4e12] and row["as_predicted"] is False
    assert "4.20 TB/s .. 4.40 TB/s" in done.stdout


def test_a_part_that_dies_is_one_row_and_names_its_reason(bench_gpu):
    (row,) = bench_gpu.child("nothing", 0, True, 60)
    assert row["error"].startswith("exit code 1") and "nothing" in row["error"]
    assert "exit code 1" in bench_gpu.line(row, None)


def test_a_part_may_warn_as_much_as_it_likes(bench_gpu, tmp_path, monkeypatch):
    part = tmp_path / "part.py"
    part.write_text("import sys\nsys.stderr.write('warning ' * 40000)\nprint('{\"name\": \"x\"}')\n")
    monkeypatch.setattr(bench_gpu, "__file__", str(part))
    assert list(bench_gpu.child("x", 0, True, 60)) == [{"name": "x"}]


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


def test_every_prediction_has_a_figure_on_a_gpu(bench_gpu):
    """Names in the file are those that the parts give, so that none is waited for in vain."""
    from gpu import engine, kernels

    said = json.loads(bench_gpu.PREDICTIONS.read_text())
    rows = kernels.Size().rows
    names = {"copy", "attention prefill"} | {f"attention decode {p}" for p in (0, 8, 4, 16, 17)}
    names |= {f"linears {how}, {n} rows" for how in ("w4 cuda", "w4 triton") for n in rows}
    names |= {f"{op}, {n} rows" for op in ("add_rms_norm", "act_and_mul") for n in (1, 64)}
    names |= {f"sample {how}, {n} rows" for how in ("greedy", "top-p") for n in (1, 64, 256)}
    assert set(said["kernels"]) <= names
    assert set(said["engine"]) <= {f"{c.label}, {load.label}" for c in engine.CASES for load in c.loads}


def test_a_choice_is_kept_when_its_job_ends(bench_gpu, tmp_path, monkeypatch):
    """Two jobs on a GPU that is not there: keys of 64 are fastest, and the file is there before the second job ends."""
    from gpu import kernels, tune

    def measure():
        found = tune.tuning.tuned("attend_kernel", "decode-128-float", {"keys": 32}, torch.device("cuda", 0))
        return {"name": "job", "value": 1.0 if found["keys"] == 64 else 2.0, "unit": "s"}

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(tune.tuning, "_name", lambda index: "nvidia-h200")
    monkeypatch.setattr(tune.tuning, "_file", lambda device: {})
    monkeypatch.setattr(tune, "_jobs", lambda size, where: iter([("attend_kernel", measure)] * 2))
    monkeypatch.setattr(tune, "write", functools.partial(tune.write, folder=tmp_path))
    row = next(tune.tune(kernels.TINY, kernels.Where("cuda", ("triton",)), dry=False))
    assert row["best"] == 1.0 and row["choice"]["keys"] == 64
    written = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert written == {"attend_kernel": {"decode-128-float": row["choice"]}}


def test_tuned_choices_are_merged_into_the_devices_file(bench_gpu, tmp_path):
    from gpu import tune

    (tmp_path / "nvidia-h200.json").write_text('{"a": {"x": {"keys": 1}, "y": {"keys": 2}}}')
    path = tune.write({"a": {"x": {"keys": 64}}, "b": {"z": {"k": 3}}}, "NVIDIA H200", tmp_path)
    assert json.loads(path.read_text()) == {"a": {"x": {"keys": 64}, "y": {"keys": 2}}, "b": {"z": {"k": 3}}}
    trial = tune.Trial("a", {"keys": 5})
    assert trial.get("b", {}) == {} and trial.get("a", {}).get("x", {}) == {"keys": 5} and trial.keys == {"x"}
