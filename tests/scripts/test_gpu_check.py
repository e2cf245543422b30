"""``scripts/gpu_check`` without a GPU, and what it may import on a machine that has little more than torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ABSENT = (
    *("fastapi", "uvicorn", "starlette", "typer", "rich", "xgrammar", "datasets", "pydantic", "prometheus_client"),
    "prompt_toolkit",
)
# What the package asks for beside torch, triton, numpy and safetensors, which are all that the scripts may use.
BESIDES = (
    *ABSENT,
    *("transformers", "tokenizers", "huggingface_hub", "gguf", "sentencepiece", "google", "psutil", "auto_round"),
    *("orjson", "matplotlib", "hypothesis", "pytest"),
)
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


def test_stages_come_in_order(gpu_check):
    where = gpu_check.Where(("triton", "cuda"), capability=90, gpu="nvidia-h200")
    todo = gpu_check.items(where, False, "/usr/bin/compute-sanitizer", 30)
    stages = [i.stage for i in todo]
    assert list(dict.fromkeys(stages)) == [
        *("prepare", "smoke", "compile", "runner", "ops", "compile served", "manifest", "sanitizer")
    ]
    assert todo[0].name == "compile cuda, smoke" and todo[0].script.is_file()
    assert todo[0].arguments[:6] == ("cuda", "smoke", "--arch", "90", "--device", "nvidia-h200")
    assert all(i.limit <= 60 for i in todo if i.stage == "smoke")
    assert {"paged_attention [triton]", "linear_group_int [cuda]"} <= {i.name for i in todo if i.stage == "ops"}
    assert "served paged_attention" in {i.name for i in todo if i.stage == "manifest"}
    assert "/usr/bin/compute-sanitizer" in todo[-1].wrapper
    assert not [i for i in gpu_check.items(where, False, None, 30) if i.stage == "sanitizer"]


def test_a_process_that_dies_or_hangs_is_one_row(gpu_check):
    dies = gpu_check.Item("ops", "nothing", (), 60, (sys.executable, "-c", "import os; os.abort()"))
    (row,) = gpu_check.run(dies, "cpu")
    assert row["error"].startswith("exit code -6") and "nothing: 0 of 1 agree" in gpu_check.report(dies, [row])
    # one that starts another, which holds its output and would end later
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    slow = gpu_check.Item("ops", "slow", (), 1.0, (sys.executable, "-c", code))
    start = time.perf_counter()
    assert "took longer than 1 s" in gpu_check.run(slow, "cpu")[0]["error"]
    assert time.perf_counter() - start < 20
    silent = gpu_check.Item("ops", "silent", (), 60, (sys.executable, "-c", "print('nothing')"))
    assert "printed no result" in gpu_check.run(silent, "cpu")[0]["error"]
    found = 'print(\'{"what": "x", "case": "y", "error": null}\'); raise SystemExit(99)'  # as the sanitizer does
    rows = gpu_check.run(gpu_check.Item("sanitizer", "x", (), 60, (sys.executable, "-c", found)), "cpu")
    assert [bool(r["error"]) for r in rows] == [False, True] and "exit code 99" in rows[1]["error"]


def test_an_item_that_hangs_keeps_its_rows_and_names_the_case(gpu_check):
    found = '{"what": "x", "case": "y", "error": null, "seconds": 0.1}'
    code = f"import time; print('{found}'); print('{{\"begun\": \"z\"}}', flush=True); time.sleep(60)"
    item = gpu_check.Item("ops", "x", (), 1.0, (sys.executable, "-c", code))
    first, last = gpu_check.run(item, "cpu")
    assert first["case"] == "y" and last["case"] == "z" and "took longer than 1 s" in last["error"]
    died = gpu_check.run(gpu_check.Item("ops", "x", (), 60, (*item.wrapper[:2], code.replace("sleep(60)", "x"))), "cpu")
    assert died[-1]["case"] == "z" and "exit code 1" in died[-1]["error"]


def test_an_item_that_got_less_than_its_time_is_left_for_later(gpu_check, tmp_path):
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    log = gpu_check.Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    todo = [gpu_check.Item("ops", "short", (), limit, sleeps) for limit in (1.0, 300)]
    assert gpu_check.run_stage([todo[0]], "cpu", 1, log, time.perf_counter() + 60) == 0
    assert log.result["done"] == [["ops", "short"]] and len(log.failed()) == 1
    log.result |= {"rows": [], "done": []}
    assert gpu_check.run_stage([todo[1]], "cpu", 1, log, time.perf_counter() + 1) == 1
    assert log.result == {"rows": [], "done": [], "running": []}


def test_compiling_is_done_again_for_what_is_left(gpu_check, tmp_path):
    where = gpu_check.Where(("triton",), capability=90, gpu="nvidia-h200")
    found = gpu_check.items(where, False, None, 30)
    log = gpu_check.Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    for item in found:
        if item.stage != "manifest":
            log.add(item, [{"what": item.name, "case": "", "error": None}])
    wanted = gpu_check.still_wanted(found, None, log)
    assert [i.name for i in wanted if i.stage != "manifest"] == ["compile manifest"]
    rows = len(log.result["rows"])
    log.add(wanted[0], [{"what": wanted[0].name, "case": "", "error": "new"}])
    assert len(log.result["rows"]) == rows and [r["error"] for r in log.failed()] == ["new"]
    for item in wanted[1:]:
        log.add(item, [])
    assert gpu_check.still_wanted(found, None, log) == []


def test_a_sanitizer_that_does_not_work_is_found_out_first(gpu_check):
    from gpu.checks import sanitizer_fails

    assert sanitizer_fails(("env", "true")) is None
    assert "exit code 9: no such driver" in sanitizer_fails(("sh", "-c", "echo no such driver >&2; exit 9"))


def test_a_run_that_is_killed_leaves_what_it_found_and_can_go_on(tmp_path):
    report = tmp_path / "report.json"
    script = [sys.executable, "-P", str(ROOT / "scripts/gpu_check.py"), "--dry-run", "--smoke", "--only", "[torch]"]
    command = [*script, "--json", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("smoke:"):
                process.kill()
    first = json.loads(report.read_text())
    assert len(first["done"]) == 1 and first["rows"] and len(first["running"]) <= 1
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    last = json.loads(report.read_text())
    assert len(last["done"]) == 5 and last["rows"][: len(first["rows"])] == first["rows"]
    assert len({tuple(d) for d in last["done"]}) == 5 and not last["running"]
    late = subprocess.run(
        [*script, "--seconds", "0", "--json", str(tmp_path / "none.json")], capture_output=True, text=True
    )
    assert late.returncode == 1 and "5 items were left out" in late.stdout


def test_calls_of_the_manifest_are_filled_with_what_ops_may_be_given(gpu_check):
    """Tensors of every op's cases made anew by shape alone: torch's kernels then agree with the reference."""
    from gpu.manifest_check import filled

    from toolkit.kernels.registry import Case, Target, load
    from toolkit.kernels.tolerances import compare
    from toolkit.kernels.triton.manifest import calls

    tried = 0
    for name in {call.op for call in calls()}:
        op = load()[name]
        other = op.implementations.get("torch", op.implementations["reference"])
        for case in list(op.cases())[:3]:
            target = Target("cpu", op.dtypes[0], None, case.traits)

            def make(dtype, device, generator, case=case):
                arguments = case.make(dtype, "cpu", torch.Generator().manual_seed(0))
                empty = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
                return filled(empty, device)

            if other.unsupported(target) is None:
                assert compare(op, other, Case(case.label, make), target) is None
                made = [v for v in make(torch.float32, "cpu", None).values() if isinstance(v, torch.Tensor)]
                assert all(bool((v.float() != 0).any()) for v in made if v.is_floating_point())
                tried += 1
    assert tried > 40


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
    from gpu import checks

    from toolkit.kernels.registry import load

    implementation = load()["rms_norm"].implementations["torch"]
    wrong = type(implementation)(
        **{**vars(implementation), "run": lambda x, weight, eps, weight_offset=0.0: x * weight}
    )
    monkeypatch.setitem(load()["rms_norm"].implementations, "torch", wrong)
    assert any(r.get("error") for r in checks.check_op("rms_norm", "torch", "cpu", True))


def test_a_case_that_raises_costs_itself_alone(gpu_check, monkeypatch):
    from gpu import checks

    from toolkit.kernels.registry import load

    implementation, calls = load()["rms_norm"].implementations["torch"], []

    def run(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("no\nmemory")
        return implementation.run(*arguments, **more)

    broken = type(implementation)(**{**vars(implementation), "run": run})
    monkeypatch.setitem(load()["rms_norm"].implementations, "torch", broken)
    begun = []
    rows = list(checks.check_op("rms_norm", "torch", "cpu", True, begun.append))
    assert [r.get("error") for r in rows] == ["RuntimeError: no memory", *[None] * (len(rows) - 1)] and len(rows) > 1
    assert [r["case"] for r in begun] == [r["case"] for r in rows if r["skipped"] is None]
    calls.clear()
    monkeypatch.setattr(checks, "answers", lambda device: False)
    (row,) = checks.check_op("rms_norm", "torch", "cpu", True)
    assert "does not answer any more" in row["error"]


def without(packages: tuple[str, ...], code: str) -> list[str]:
    """Lines that ``code`` prints where ``packages`` are not installed."""
    blocked = f"""
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-P", "-c", blocked + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_engine_and_profile_need_none_of_the_servers_packages():
    code = f"""
import importlib, pkgutil
for package in {LIGHT!r}:
    module = importlib.import_module(package)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), package + "."):
        if not found.name.rpartition(".")[2].startswith("_"):
            importlib.import_module(found.name)
"""
    assert without(ABSENT, code) == []


def test_the_scripts_need_torch_triton_numpy_and_safetensors_alone():
    code = """
from gpu import checks, engine, launches, manifest_check, peers, precompile, prune, runner_check, tune
import bench_gpu, gpu_check
print(next(checks.check_op("rms_norm", "torch", "cpu", True))["error"])
runner_check._drivers("qwen2", 0, "cpu")
print([row.get("tokens") for row in engine.measure(engine.TINY[0], "cpu", "pytorch")])
"""
    assert without(BESIDES, code) == ["None", "[None, 4, 12]"]


def test_a_tree_that_is_not_installed_is_what_runs(tmp_path):
    """As on a machine that got the files of this tree and nothing else: the wrapper makes it the toolkit there is."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("toolkit", "kernels", "commands", "templates", "scripts", "tests"):
        (tree / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": ""}
    code = "import os, toolkit, toolkit.kernels; print(os.environ['PYTHONPATH'], toolkit.__file__)"
    run = f'cd "{tree}"; source scripts/gpu/environment.sh; exec "$python" -c "{code}"'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", run], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    path, module = done.stdout.split()
    assert path == f"{tree}/build/import" and module == f"{tree}/build/import/toolkit/__init__.py"
