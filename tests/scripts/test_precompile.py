"""``precompile`` without a GPU: what it compiles is what a launch then finds in Triton's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled(code: str, cache: Path) -> list[str]:
    """Lines that ``code`` prints in a process without the interpreter, with Triton's cache in ``cache``."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "scripts"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


COMPILE = """
import json
from triton.runtime import driver
from gpu.compiling import launches, precompile

driver.set_active(precompile.TargetDriver(90))
todo = precompile.distinct(launches.of_ops(["rms_norm", "embedding"], 90, "first"))
done = list(precompile.compile_all(todo, workers=2))
print(len(todo), sum(d.hit for d in done), [d.error for d in done if d.error])
"""
# Everything of a launch but the GPU: the same functions are called on tensors, Triton binds the arguments, looks for
# the kernel in its cache and hands it to a launcher, which only counts.
LAUNCH = """
from types import SimpleNamespace
import torch, triton
from triton.runtime import driver
from gpu.compiling.precompile import TargetDriver
from toolkit.kernels.op import Target
from toolkit.kernels.registry import load

class Launcher:
    launched = []
    def __init__(self, source, metadata): self.name = source.fn.__name__
    def __call__(self, *arguments): Launcher.launched.append(self.name)

class Driver(TargetDriver):
    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, kernel, shared, device: (0, 0, 32, 0, 1024),
    )

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
driver.set_active(Driver(90))
for name in ("rms_norm", "embedding"):
    op = load()[name]
    for dtype in op.dtypes:
        case = next(iter(op.cases()))
        inputs = case.make(getattr(torch, dtype), "cpu", torch.Generator().manual_seed(1))
        op.implementations["triton"].run(**inputs)
print(sorted(set(Launcher.launched)), len(hits), all(hits))
"""


def test_launches_find_what_was_compiled_before(tmp_path):
    first, second = compiled(COMPILE, tmp_path), compiled(COMPILE, tmp_path)
    assert first == ["6 0 []"] and second == ["6 6 []"], (first, second)
    assert compiled(LAUNCH, tmp_path) == ["['embedding_kernel', 'rms_norm_kernel'] 6 True"]


@pytest.mark.slow
def test_keys_do_not_depend_on_the_order_of_kernels(tmp_path):
    code = """
import importlib, pkgutil, sys
import triton
from toolkit.kernels import triton as package
from toolkit.kernels.triton.launch import settle

found = {}
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    for name, value in vars(importlib.import_module(module.name)).items():
        if isinstance(value, triton.JITFunction) and value.module == module.name:
            found[f"{module.name}.{name}"] = value
for name in sorted(found, reverse=REVERSE):
    settle(found[name])
for name in sorted(found):
    print(name, found[name].cache_key)
"""

    forward, backward = (compiled(code.replace("REVERSE", order), tmp_path) for order in ("False", "True"))
    assert len(forward) > 60 and forward == backward


@pytest.mark.slow
def test_what_the_scripts_launch_is_recorded_without_a_gpu(tmp_path):
    (line,) = compiled(
        """
import json
from gpu.compiling import launches
from gpu.measuring import engine
from gpu.compiling.precompile import TargetDriver, distinct
from triton.runtime import driver
from toolkit.kernels.triton.tuning import tuned_for, _file
from toolkit.kernels.triton import tuning

driver.set_active(TargetDriver(90))
kernels = lambda found: sorted({x.kernel.__name__ for x in distinct(found)})
case = next(c for c in engine.CASES if c.label == "moe bf16")
served = launches.of_case(case, 90)
warps = {x.warps for x in served if x.kernel.__name__ == "attend_kernel"}
choice = {"attend_kernel": {"decode-128-float": {"warps": 2}}}
tuning._file = lambda device: choice if device == "some-gpu" else {}
with tuned_for("some-gpu"):
    others = {x.warps for x in launches.of_case(case, 90) if x.kernel.__name__ == "attend_kernel"}
small = kernels(launches.of_check("qwen2", 0, 90))
print(json.dumps([kernels(served), small, kernels(launches.of_kernels(90)), sorted(warps), sorted(others)]))
""",
        tmp_path,
    )
    served, small, measured, warps, others = json.loads(line)
    assert {"attend_kernel", "merge_kernel", "expert_linear_kernel", "rope_kv_write_kernel", "draw_kernel"} <= set(
        served
    )
    assert {"attend_kernel", "rms_norm_kernel"} <= set(small) and "expert_linear_kernel" not in small
    assert {"group_linear_kernel", "attend_kernel", "act_kernel", "chunk_kernel"} <= set(measured)
    assert 2 in others and 2 not in warps  # choices of the GPU that it is compiled for, not of the one it compiles on


def test_after_warm_up_no_step_needs_another_kernel(tmp_path):
    (line,) = compiled(
        """
import json
import numpy as np
from gpu.compiling import launches
from gpu.models import CONFIGS
from gpu.compiling.precompile import TargetDriver, distinct
from testing.modules import of_tests
from toolkit.kernels.triton.launch import recording
from triton.runtime import driver

driver.set_active(TargetDriver(90))
steps, rng = of_tests("steps"), np.random.default_rng(0)
short = [{0: n} for n in (2, 17, 40, 70, 150, 300, 700)]
others = [{0: 3, 1: 50}, {1: 1, 2: 700, 3: 1}, {i: 1 for i in range(3)}, {4: 5000}, {4: 3400}, {4: 30, 1: 1}, {4: 1}]

def ruled(rows):
    every, ones = np.arange(rows + 1, dtype=np.int32), np.ones(rows, np.int32)
    history = {"repetition_penalty": 1.5, "history_ptr": every, "history_ids": ones, "history_count": ones}
    return steps.sampling(rows, temperature=1.0, top_p=0.5, grammar=np.full((rows, 10), -1, np.int32), **history)

late = {}
for family, policy in (("llama", 4), ("mixtral", 8), ("mistral", 0), ("awq", 16)):
    config = CONFIGS[family] | {"dtype": "float16", "num_hidden_layers": 1, "max_position_embeddings": 16384}
    with recording(90) as found, launches.meta_runner(config, 90, policy, 64) as runner:
        served = steps.Driver(runner, 400)
        for _ in range(5):
            served.add()
        runner.warm_up(4, 9000, 5000)
        known = len(distinct(found))
        for new in (*short, *others):
            numbers = {number: rng.integers(3, 300, n).tolist() for number, n in new.items()}
            served.step(numbers, sampling=ruled(len(new)) if len(new) == 2 else steps.sampling(len(new)))
        late[family] = [known, sorted(x.kernel.__name__ for x in distinct(found)[known:])]
print(json.dumps(late))
""",
        tmp_path,
    )
    late = json.loads(line)
    assert set(late) == {"llama", "mixtral", "mistral", "awq"}
    for known, names in late.values():
        assert known > 10 and names == []


def test_a_compiler_that_dies_or_hangs_costs_its_variant_alone(tmp_path):
    (line,) = compiled(
        """
import json, os, time
from types import SimpleNamespace
from gpu.compiling import precompile
from gpu.compiling.precompile import compile_all
from toolkit.kernels.triton.launch import Launch

precompile.settle = lambda kernel: None

def launch(name, what):
    kernel = SimpleNamespace(__name__=name, warmup=lambda *args, **kwargs: what())
    return Launch(kernel, (1,), {}, {}, 4, 2, None)

def fails(): raise ValueError("no such\\nlayout")

todo = [launch("dies", lambda: os._exit(3)), launch("hangs", lambda: time.sleep(60)), launch("fails", fails)]
print(json.dumps({d.kernel: d.error for d in compile_all(todo, workers=2, limit=3)}))
""",
        tmp_path,
    )
    assert json.loads(line) == {
        "dies": "the compiler died (exit code 3)",
        "hangs": "took longer than 3 s",
        "fails": "ValueError: no such layout",
    }


def test_the_cuda_kernels_are_built_where_they_are_missing(tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo release 13.0, ;; *) echo no such GPU >&2; exit 1 ;; esac\n'
    )
    compiler.chmod(0o755)
    code = f"""
import os
os.environ["CUDACXX"] = {str(compiler)!r}
from gpu.compiling import precompile
from toolkit.kernels.cuda import build, driver

driver.fatbin_note = lambda path: dict(cuda=13000, sources=build.sources())
print(precompile.precompile(["cuda"], 90, None, 1, 60.0))
driver.fatbin_note = lambda path: dict(cuda=13000, sources="others")
print(precompile.precompile(["cuda"], 90, None, 1, 60.0)["errors"])
"""
    first, *_, said = [line for line in compiled(code, tmp_path) if not line.startswith("precompile")]
    assert "'cuda': False, 'errors': []" in first
    assert said.startswith("['CUDA kernels: toolkit: the CUDA kernels are not built:") and "no such GPU" in said


def test_a_cuda_build_that_hangs_is_an_error_and_leaves_nothing(tmp_path):
    """nvcc's own children too, in the build's group, are ended; so are those of a command that ran out of time."""
    code = """
import subprocess, sys, time
from pathlib import Path
from gpu.compiling import precompile
from gpu.process import run_limited

def ended(pid):
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False

hangs = 'import subprocess, sys, time; p = subprocess.Popen(["sleep", "60"]); print(p.pid, flush=True); time.sleep(60)'
build = subprocess.Popen(
    [sys.executable, "-c", hangs], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
)
child = int(build.stdout.readline())
build.stdout = None
print(precompile.finish_nvcc(build, 0.5), ended(child))
starts = hangs.replace('"60"]', '"60"], process_group=0')
done = run_limited([sys.executable, "-c", starts], 1.0)
print(done.code, ended(int(done.out)))
"""
    assert compiled(code, tmp_path) == ["['CUDA kernels: nvcc was not ready in time'] True", "None True"]


@pytest.mark.slow
def test_choices_are_compiled_and_judged_without_a_gpu(tmp_path):
    lines = compiled(
        f"""
import sys
from gpu.compiling import prune
from gpu.measuring import tune

tune.POLICIES, tune.ROWS = (0,), (1,)
tune.ALL["attend_kernel"] = [{{"keys": 64, "warps": 4, "stages": 6}}, {{"keys": 128, "warps": 4, "stages": 12}}]
tune.ALL["group_linear_kernel"] = [{{"cols": 32, "k": 128, "warps": 4}}]
sys.argv = ["prune", "--arch", "90", "--jobs", "2", "--out", {str(tmp_path / "out.json")!r}]
prune.main()
""",
        tmp_path,
    )
    assert len(lines) == 3 and any("bytes of shared memory" in line for line in lines), lines
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "90": {
            "attend_kernel": {"decode-128-float": [{"keys": 64, "warps": 4, "stages": 6}]},
            "group_linear_kernel": {"rows16": [{"cols": 32, "k": 128, "warps": 4}]},
        }
    }


@pytest.mark.slow
def test_the_smoke_stage_is_compiled_within_its_time(tmp_path):
    script = [sys.executable, "-P", str(ROOT / "scripts/gpu/compiling/precompile.py"), "smoke", "--arch", "90"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=900)
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and found["variants"] == found["compiled"] > 20, done.stdout
    short = subprocess.run([*script, "--seconds", "0"], env=environment, capture_output=True, text=True, timeout=900)
    assert "variants are left" in short.stdout and short.returncode == 1


@pytest.mark.slow
def test_kernels_that_are_carried_are_found_there(tmp_path):
    """What one process compiled for another's Triton lies in an archive; unpacked elsewhere, nothing is compiled."""
    other = tmp_path / "libtriton.so"
    other.write_bytes(b"of another Python")
    code = f"""
import sys
from pathlib import Path
from triton import knobs
from triton.runtime import driver
from gpu.compiling import carry, launches, precompile

carry.other_key(Path({str(other)!r}))
driver.set_active(precompile.TargetDriver(90))
todo = precompile.distinct(launches.of_ops(["embedding"], 90, "first"))
done = list(precompile.compile_all(todo, workers=2))
print(len(todo), sum(d.hit for d in done), [d.error for d in done if d.error])
archive = Path({str(tmp_path)!r}) / "kernels.tar.xz"
if not archive.exists():
    print(carry.pack((Path(knobs.cache.dir) / d.folder for d in done), archive) < 200_000)
"""
    first, small = compiled(code, tmp_path / "here")
    variants = int(first.split()[0])
    assert variants > 0 and first == f"{variants} 0 []" and small == "True"
    unpack = f"""
from pathlib import Path
from gpu.compiling import carry
print(carry.unpack(Path({str(tmp_path)!r}) / "kernels.tar.xz", Path({str(tmp_path / "there")!r})))
"""
    assert compiled(unpack, tmp_path / "there") == [str(variants)]
    assert compiled(code, tmp_path / "there") == [f"{variants} {variants} []"]


def test_a_carried_fatbin_of_other_sources_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from gpu.compiling import carry

    from toolkit.kernels.cuda import build, driver

    here, carried = tmp_path / "here.fatbin", tmp_path / "carried"
    monkeypatch.setattr(driver, "FATBIN", here)
    assert carry.use(carried) is None
    carried.mkdir()
    assert carry.use(carried) == "carried: no CUDA kernels"
    (carried / here.name).write_bytes(b"kernels")
    for digest, used in (("others", False), (build.sources(), True)):
        note = {"cuda": 13000, "architectures": [90], "sources": digest}
        (carried / here.with_suffix(".json").name).write_text(json.dumps(note))
        said = carry.use(carried)
        assert here.exists() == used and ("for 90" if used else "are not used") in said
    assert driver.fatbin_note(here) == note
