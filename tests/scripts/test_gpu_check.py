"""``scripts/gpu_check`` without a GPU, and what it may import on a machine that has little more than torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("fastapi", "uvicorn", "starlette", "typer", "rich", "xgrammar", "datasets", "pydantic", "prometheus_client")
LIGHT = ("toolkit.kernels", "toolkit.engine", "toolkit.runners", "toolkit.profile")


@pytest.fixture
def gpu_check(monkeypatch):
    import importlib.util

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_writes_rows_that_agree(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-P", str(ROOT / "scripts/gpu_check.py"), "--dry-run", "--smoke", "--only", "sample"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert rows and all(r["error"] is None for r in rows if r["skipped"] is None)
    assert "smoke: sample [torch]: 1 of 1 agree" in done.stdout


def test_stages_come_in_order_and_a_process_that_dies_is_one_row(gpu_check):
    todo = gpu_check.items(["triton", "cuda"], False, False, "/usr/bin/compute-sanitizer", 30)
    stages = [i.stage for i in todo]
    assert list(dict.fromkeys(stages)) == ["smoke", "runner", "ops", "sanitizer"]
    assert all(i.limit <= 60 for i in todo if i.stage == "smoke")
    assert {"paged_attention [triton]", "linear_group_int [cuda]"} <= {i.name for i in todo if i.stage == "ops"}
    assert todo[-1].wrapper[0] == "/usr/bin/compute-sanitizer"
    dies = gpu_check.Item("ops", "nothing", (), 60, (sys.executable, "-c", "import os; os.abort()"))
    (row,) = gpu_check.run(dies, "cpu")
    assert row["error"].startswith("exit code") and "nothing: 0 of 1 agree" in gpu_check.report(dies, [row])
    slow = gpu_check.Item("ops", "slow", (), 0.2, (sys.executable, "-c", "import time; time.sleep(9)"))
    assert "took longer" in gpu_check.run(slow, "cpu")[0]["error"]


@pytest.mark.slow
def test_the_runner_is_checked_step_by_step(gpu_check):
    from gpu.runner_check import check_runner

    rows = check_runner("qwen2", 0, "cpu")
    assert len(rows) == 8 and [r["error"] for r in rows] == [None] * 8


@pytest.mark.slow
def test_the_torch_runners_tests_are_rows(gpu_check):
    item = gpu_check.Item("runner", "tests", ("--tests", "test_steps.py"), 600)
    rows = gpu_check.run(item, "cpu")
    assert len(rows) > 20 and all(r["error"] is None for r in rows)


def test_a_wrong_kernel_is_found(gpu_check, monkeypatch):
    from toolkit.kernels.registry import load

    implementation = load()["rms_norm"].implementations["torch"]
    wrong = type(implementation)(
        **{**vars(implementation), "run": lambda x, weight, eps, weight_offset=0.0: x * weight}
    )
    monkeypatch.setitem(load()["rms_norm"].implementations, "torch", wrong)
    assert any(r.get("error") for r in gpu_check.check_op("rms_norm", "torch", "cpu", True))


def test_kernels_engine_and_profile_need_none_of_the_servers_packages():
    code = f"""
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
for package in {LIGHT!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), package + "."):
        if not found.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(found.name)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
