"""``scripts/gpu_check`` without a GPU, and what it may import on a machine that has little more than torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
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
def gpu_check(monkeypatch, script):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return script("gpu/check.py")


def test_a_dry_run_writes_rows_that_agree(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-P", str(ROOT / "scripts/gpu/check.py"), "--dry-run", "--smoke", "--only", "sample"]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert rows and all(r["error"] is None for r in rows if r["skipped"] is None)
    assert "smoke: sample [torch]: 1 of 1 agree" in done.stdout


@pytest.fixture
def h200(gpu_check):
    from gpu.checking.items import Where

    return Where(("triton", "cuda"), capability=90, gpu="nvidia-h200")


def test_what_matters_most_comes_first(gpu_check, h200):
    from gpu.checking.items import items

    todo = items(h200, False, "/usr/bin/compute-sanitizer", 300)
    checks = [i for i in todo if not i.compiles]
    stages = list(dict.fromkeys(i.stage for i in checks))
    assert stages == ["smoke", "linears", "served", "runner", "ops", "sanitizer"]
    names = [i.name for i in checks if i.stage not in ("smoke", "linears")]
    assert names[:4] == ["served paged_attention", "served rope_kv_write", "served kv_write", names[3]]
    assert names[3].startswith("runner wide awq")
    assert len({(i.stage, i.name) for i in todo}) == len(todo)
    assert all(i.silence <= 60 for i in checks)
    compiling = {i.name: i for i in todo if i.compiles}
    assert list(compiling)[:2] == ["compile cuda", "compile smoke"]
    assert compiling["compile cuda"].arguments[:5] == ("cuda", "--arch", "90", "--device", "nvidia-h200")
    assert all(set(i.after) <= set(compiling) for i in todo)
    behind = {i.name: i.after for i in checks}
    assert behind["linear_group_int [cuda]"] == ("compile cuda",) == behind["served linears, 4 bits, float16"]
    tools = [i.wrapper[i.wrapper.index("--tool") + 1] for i in checks if i.stage == "sanitizer"]
    assert tools[0] == "racecheck" and tools.count("memcheck") == 6 and tools.count("racecheck") == 4
    assert not [i for i in items(h200, False, None, 30) if i.stage == "sanitizer"]


def test_where_all_was_carried_nothing_is_compiled_first(gpu_check, h200):
    from gpu.checking.items import items

    checks = [i.name for i in items(h200, False, None, 300) if not i.compiles]
    assert [i.name for i in items(replace(h200, compiled=True), False, None, 300)] == checks


def test_ranks_are_left_out_where_gpus_are_too_few(gpu_check, monkeypatch):
    from gpu.checking.ranks import check_ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    alone, row = check_ranks("cuda")
    assert "NCCL" in alone["error"] or torch.cuda.is_available()
    assert row["skipped"] == "1 GPU here, and NCCL takes none twice: ranks need 2" and row["error"] is None


def test_a_rank_that_speaks_to_itself_is_a_row(gpu_check):
    from gpu.checking.ranks import alone

    assert alone("cpu")["error"] is None
    assert "no such" in alone("no such")["error"]


def process(code, stage="ops", name="x", limit=60.0, **more):
    from gpu.checking.items import Item

    return Item(stage, name, (), limit, (sys.executable, "-c", code), **more)


def test_a_process_that_dies_or_hangs_is_one_row(gpu_check):
    from gpu.checking.running import report, run

    dies = process("import os; os.abort()", name="nothing")
    (row,) = run(dies, "cpu")
    assert row["error"].startswith("exit code -6") and "nothing: 0 of 1 agree" in report(dies, [row])
    # one that starts another, which holds its output and would end later
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    start = time.perf_counter()
    assert "took longer than 1 s" in run(process(code, limit=1.0), "cpu")[0]["error"]
    assert time.perf_counter() - start < 200
    assert "printed no result" in run(process("print('nothing')"), "cpu")[0]["error"]
    found = 'print(\'{"what": "x", "case": "y", "error": null}\'); raise SystemExit(99)'  # as the sanitizer does
    rows = run(process(found, stage="sanitizer"), "cpu")
    assert [bool(r["error"]) for r in rows] == [False, True] and "exit code 99" in rows[1]["error"]


CASES = """
import json, sys, time
behind = sys.argv[sys.argv.index("--behind") + 1] if "--behind" in sys.argv else None
only = sys.argv[sys.argv.index("--case") + 1] if "--case" in sys.argv else None
for case in "abcd":
    if behind is not None and case <= behind or only not in (None, case):
        continue
    print(json.dumps({"begun": case}), flush=True)
    if "--trace" in sys.argv:
        print(json.dumps({"launched": "kernel_" + case}), flush=True)
    if case == "b": BROKEN
    error = "wrong" if case == "d" else None
    print(json.dumps({"what": "x", "case": case, "error": error, "seconds": 0.0}), flush=True)
"""


@pytest.mark.parametrize("broken, said", [("time.sleep(600)", "wrote nothing for 4 s"), ("sys.exit(3)", "exit code 3")])
def test_a_case_that_hangs_or_dies_costs_itself_alone(gpu_check, broken, said):
    from gpu.checking.running import run

    start = time.perf_counter()
    rows = run(process(CASES.replace("BROKEN", broken), silence=4.0, cases=True), "cpu")
    assert [row["case"] for row in rows] == list("abcd") and time.perf_counter() - start < 200
    assert [said in str(row["error"]) for row in rows] == [False, True, False, False]


def test_what_fails_is_run_once_more_and_names_its_kernel(gpu_check, tmp_path):
    from gpu.checking.running import Log, report, run_all

    log = Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    todo = [process(CASES.replace("BROKEN", "pass"), cases=True)]
    assert run_all(todo, "cpu", 1, log, time.perf_counter() + 60) == 0
    (bad,) = log.failed()
    assert bad["case"] == "d" and bad["again"] == {"error": "wrong", "launched": ["kernel_d"]}
    assert "with blocking launches: wrong; launched last: kernel_d" in report(todo[0], [bad])


def test_a_hang_is_tried_once_more_but_not_for_as_long(gpu_check, tmp_path, monkeypatch):
    from gpu.checking import running

    given, run_limited = [], running.run_limited

    def limited(command, limit, environment=None, silence=0.0):
        given.append(silence)
        return run_limited(command, limit, environment, silence)

    monkeypatch.setattr(running, "run_limited", limited)
    monkeypatch.setattr(running, "SECOND_SILENCE", 3.0)
    log = running.Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    todo = [process(CASES.replace("BROKEN", "time.sleep(600)"), silence=6.0, cases=True)]
    assert running.run_all(todo, "cpu", 1, log, time.perf_counter() + 300) == 0
    assert given == [6.0, 3.0, 3.0], "the item, its cases behind the one that hung, that one once more"
    hung = next(r for r in log.failed() if r["case"] == "b")
    assert hung["silent"] and hung["again"] == {"error": "did not end", "launched": ["kernel_b"]}
    assert next(r for r in log.result["rows"] if r["case"] == "c")["error"] is None


def test_an_item_that_got_less_than_its_time_is_left_for_later(gpu_check, tmp_path):
    from gpu.checking.running import Log, run_all

    log = Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    sleeps = "import time; time.sleep(60)"
    assert run_all([process(sleeps, limit=1.0)], "cpu", 1, log, time.perf_counter() + 60) == 0
    assert log.result["done"] == [["ops", "x"]] and len(log.failed()) == 1
    log.result |= {"rows": [], "done": []}
    assert run_all([process(sleeps, limit=300)], "cpu", 1, log, time.perf_counter() + 6) == 1
    assert log.result == {"rows": [], "done": [], "running": [], "left": [["ops", "x"]]}


def test_checks_wait_for_what_compiles_for_them_and_for_the_smoke_stage(gpu_check, h200):
    from gpu.checking.items import items
    from gpu.checking.running import Line

    line, order = Line(items(h200, False, None, 300), jobs=2), []

    def begin():
        while (item := line.next()) is not None:
            line.running[len(order)] = (item, 0.0)
            order.append(item)

    begin()
    assert [i.name for i in order] == ["compile cuda", "compile smoke"], (
        "nvcc and Triton's compilers, beside each other"
    )
    while line.running:
        oldest = min(line.running)
        del line.running[oldest]
        begin()
        now = [item for item, _ in line.running.values()]
        assert sum(not i.compiles for i in now) <= 2 and sum(i.compiles for i in now) <= 2
        assert len({i.stage == "smoke" for i in now if not i.compiles}) <= 1, "the smoke stage is over first"
    assert not line.waiting and [i.stage for i in order if not i.compiles][:7] == ["smoke"] * 7
    place = {i.name: n for n, i in enumerate(order)}
    assert all(place[name] < place[i.name] for i in order for name in i.after)


def test_nothing_goes_on_where_nothing_of_the_smoke_stage_works(gpu_check, tmp_path):
    from gpu.checking.running import Log, run_all

    log = Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    todo = [process("raise SystemExit(1)", stage="smoke"), process(CASES, name="later")]
    assert run_all(todo, "cpu", 2, log, time.perf_counter() + 60) == 1
    assert log.dead() and log.result["done"] == [["smoke", "x"]]


def test_compiling_is_done_again_for_what_is_left(gpu_check, h200, tmp_path):
    from gpu.checking.items import items
    from gpu.checking.running import Log

    found = items(h200, False, None, 30)
    log = Log(tmp_path / "r.json", {"rows": [], "done": [], "running": []})
    for item in found:
        if item.stage != "served":
            log.add(item, [{"what": item.name, "case": "", "error": None}])
    wanted = gpu_check.still_wanted(found, None, log)
    assert [i.name for i in wanted if i.stage != "served"] == ["compile attention", "compile served"]
    rows = len(log.result["rows"])
    log.add(wanted[0], [{"what": wanted[0].name, "case": "", "error": "new"}])
    assert len(log.result["rows"]) == rows and [r["error"] for r in log.failed()] == ["new"]
    log.forget_failed()
    assert not log.failed() and not log.has(wanted[0]) and len(log.result["rows"]) == rows - 1
    for item in wanted[1:]:
        log.add(item, [])
    assert gpu_check.still_wanted(found, None, log) == []


def test_a_sanitizer_that_does_not_work_is_found_out_first(gpu_check):
    from gpu.checking.checks import sanitizer_fails

    assert sanitizer_fails(("env", "true")) is None
    assert "exit code 9: no such driver" in sanitizer_fails(("sh", "-c", "echo no such driver >&2; exit 9"))


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_what_it_found_and_can_go_on(tmp_path):
    report = tmp_path / "report.json"
    script = [sys.executable, "-P", str(ROOT / "scripts/gpu/check.py"), "--dry-run", "--smoke", "--only", "[torch]"]
    command = [*script, "--json", str(report)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("smoke:"):
                process.kill()
    first = json.loads(report.read_text())
    assert 1 <= len(first["done"]) < 5 and first["rows"] and len(first["running"]) <= 1
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    last = json.loads(report.read_text())
    assert len(last["done"]) == 5 and last["rows"][: len(first["rows"])] == first["rows"]
    assert len({tuple(d) for d in last["done"]}) == 5 and not last["running"]
    late = subprocess.run(
        [*script, "--seconds", "0", "--json", str(tmp_path / "none.json")], capture_output=True, text=True
    )
    assert late.returncode == 1 and "5 items were left out" in late.stdout
    assert "(smoke 5)" in late.stdout and len(json.loads((tmp_path / "none.json").read_text())["left"]) == 5


def test_calls_of_the_manifest_are_filled_with_what_ops_may_be_given(gpu_check):
    """Tensors of every op's cases made anew by shape alone: torch's kernels then agree with the reference."""
    from gpu.checking.manifest import filled

    from toolkit.kernels.op import Case, Target
    from toolkit.kernels.registry import load
    from toolkit.kernels.tolerances import compare
    from toolkit.kernels.triton.ahead_of_time.manifest import calls

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
@pytest.mark.parametrize("through_graphs", [True, False])
def test_the_runner_is_checked_step_by_step(through_graphs, gpu_check, monkeypatch):
    from gpu.checking import runner

    drivers, devices = runner._drivers, []

    def seen(*which):
        ours, oracle = drivers(*which)
        devices.append(ours.runner._on)
        return ours, oracle

    monkeypatch.setattr(runner, "_drivers", seen)
    rows = list(runner.check_runner("qwen2", 0, "cpu", through_graphs))
    assert len(rows) == 11 and [r["error"] for r in rows] == [None] * 11
    assert (devices[0].captures > 0) == (devices[0].replays > 0) == through_graphs


@pytest.mark.slow
def test_the_torch_runners_tests_are_rows(gpu_check):
    from gpu.checking.items import Item
    from gpu.checking.running import run

    rows = run(Item("runner", "tests", ("--tests", "test_steps.py"), 600, silence=600), "cpu")
    assert len(rows) > 20 and all(r["error"] is None for r in rows)


def test_a_wrong_kernel_is_found(gpu_check, monkeypatch):
    from gpu.checking import checks

    from toolkit.kernels.registry import load

    implementation = load()["rms_norm"].implementations["torch"]
    wrong = type(implementation)(
        **{**vars(implementation), "run": lambda x, weight, eps, weight_offset=0.0: x * weight}
    )
    monkeypatch.setitem(load()["rms_norm"].implementations, "torch", wrong)
    assert any(r.get("error") for r in checks.check_op("rms_norm", "torch", "cpu", True))


def test_a_case_that_raises_costs_itself_alone(gpu_check, monkeypatch):
    from gpu.checking import checks

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
    rows = list(checks.check_op("rms_norm", "torch", "cpu", True, lambda case: not begun.append(case)))
    assert [r.get("error") for r in rows] == ["RuntimeError: no memory", *[None] * (len(rows) - 1)] and len(rows) > 1
    assert begun == [r["case"] for r in rows if r["skipped"] is None]
    one = list(checks.check_op("rms_norm", "torch", "cpu", False, checks.chosen(begun[1], None)))
    assert [r["case"] for r in one] == [begun[1]]
    rest = list(checks.check_op("rms_norm", "torch", "cpu", True, checks.chosen(None, begun[0])))
    assert rest and begun[0] not in [r["case"] for r in rest]
    calls.clear()
    monkeypatch.setattr(checks, "answers", lambda device: False)
    (row,) = checks.check_op("rms_norm", "torch", "cpu", True)
    assert row["error"] and row["dead"]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_linears_are_checked_where_a_compiler_builds_them_for_the_cpu(gpu_check, bits, support):
    """As on a GPU, with fewer inputs: bits of every run, early launches, chains of them, kernels and splits by name."""
    from gpu.checking import linears

    host = support("cuda_host").host
    on, sizes = (
        (host(multiprocessors=8), host(multiprocessors=8, dependent=True)),
        linears.Sizes((1088,), (40,), (64,), (1, 17), 2),
    )
    rows = list(linears.check_linears(bits, "float16", "cpu", on, sizes))
    assert [r["error"] for r in rows] == [None, None], rows
    assert [r["kernel"][:4] for r in rows] == ["few_", "tile"] and rows[1]["splits"] > 1
    assert rows[0]["case"] == "g64 40x1088, 1 tokens"


@pytest.mark.parametrize(
    "fault, said",
    [
        ("wrong", "values differ"),
        ("shaky", "run 2 of 3 gave other bits"),
        ("early", "early launch 1 of 3 gave other bits"),
    ],
)
def test_a_linear_that_does_not_hold_is_found(gpu_check, fault, said):
    """A product in one go in the place of the kernels', with what may be wrong with them."""
    from gpu.checking import linears

    g = torch.Generator().manual_seed(0)
    dense, bias = torch.randn(24, 64, generator=g) / 8, torch.zeros(24, dtype=torch.float16)
    calls = []

    class Product:
        weight = type("Weight", (), {"n_in": 64, "n_out": 24})

        def __init__(self, early):
            self.early, self.bias = early, bias

        def __call__(self, x, residual=None, *, out=None):
            calls.append(x)
            found = (x.float() @ dense.T).half()
            if fault == "wrong" or (fault == "shaky" and len(calls) == 4) or (fault == "early" and self.early):
                found[0, 3] += 0.25
            return found if out is None else out.copy_(found)

    made = linears.Made(Product(False), Product(True), dense.double())
    assert said in linears._check(made, 2, None, 3)


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
        name = found.name.rpartition(".")[2]
        if not name.startswith("_") and "grammar" not in name:  # xgrammar is imported when a request brings a grammar
            importlib.import_module(found.name)
"""
    assert without(ABSENT, code) == []


def test_the_scripts_need_torch_triton_numpy_and_safetensors_alone():
    code = """
from gpu import bench, check
from gpu.checking import checks, items, linears, manifest, runner, running
from gpu.compiling import carry, launches, precompile, prune
from gpu.measuring import engine, peers, tune
print(next(checks.check_op("rms_norm", "torch", "cpu", True))["error"])
runner._drivers("qwen2", 0, "cpu")
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
