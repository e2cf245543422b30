"""The ahead-of-time build of the Triton kernels, and the check for a real GPU, both without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.kernels import registry
from toolkit.kernels.triton import manifest

ROOT = Path(__file__).resolve().parents[2]


def compiled(code: str) -> str:
    """Standard output of ``code`` in a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("architecture", [80, 90])
def test_one_variant_of_each_hard_kernel_compiles_without_a_gpu(architecture):
    out = compiled(f"""
from toolkit.kernels.triton.build import Variant, build_one
for op, label, index in (("rms_norm", "hidden4096", 0), ("paged_attention", "decode-128-x4-int4", 1),
                         ("linear_group_int", "int4-g128-1", 0)):
    built = build_one(Variant(op, label, "bfloat16", index, {architecture}))
    print(built.kernel, built.shared, *built.faults)
""")
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows] == ["rms_norm_kernel", "attend_kernel", "group_linear_kernel"]
    assert all(len(row) == 2 for row in rows), "faults: " + out
    assert int(rows[1][1]) > 8192  # tiles of keys wait in shared memory


def test_what_does_not_hold_is_reported():
    out = compiled("""
from toolkit.kernels.triton import build
build.CLAIMS["rms_norm_kernel"] = frozenset({"mma"})
build.shared_limit = lambda capability: 8
print(build.build_one(build.Variant("rms_norm", "hidden4096", "bfloat16", 0, 90)).faults)
""")
    assert "mma missing" in out and "bytes of shared memory, more than 8" in out


def test_variants_differ_by_architecture_and_float8_needs_hardware():
    out = compiled("""
from toolkit.kernels.triton.build import variants
for a in (80, 90):
    found = list(variants(a, "moe_experts_fp8")), list(variants(a, "rope"))
    print(*(len(f) for f in found))
""")
    (no_float8, ropes), (float8, same) = (map(int, line.split()) for line in out.splitlines())
    assert no_float8 == 0 and float8 > 0 and ropes == same > 0


def test_every_triton_implementation_is_in_the_manifest():
    ops = {name for name, op in registry.load().items() if "triton" in op.implementations}
    missing = ops - {call.op for call in manifest.calls()}
    assert missing == {"act"}  # compiled as act_and_mul's kernel without the gate; no served model has it


@pytest.mark.slow
def test_the_whole_manifest_compiles_for_hopper_without_faults():
    done = subprocess.run([ROOT / "scripts/gpu_build", "--arch", "90"], capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if "FAULT" in line or "ERR" in line
    )


@pytest.fixture
def gpu_check(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_gpu", lambda: {"gpu": "none"})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", str(tmp_path / "out.json")])
    return module


def test_the_check_goes_on_after_an_op_that_crashes_and_fails_at_the_end(gpu_check, monkeypatch, tmp_path, capsys):
    def run(name, family, smoke, limit, wrapper):
        return [{"op": name, "dtype": "float16", "case": "x", "error": "crashed" if name == "sample" else None}]

    monkeypatch.setattr(gpu_check, "_run", run)
    assert gpu_check.main() == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert {r["op"] for r in found["ops"]} == {n for n, op in registry.load().items() if "triton" in op.implementations}
    assert "float16 x: crashed" in capsys.readouterr().out


def test_the_check_stops_where_nothing_of_the_smoke_stage_works(gpu_check, monkeypatch, tmp_path):
    monkeypatch.setattr(
        gpu_check, "_run", lambda name, *_: [{"op": name, "dtype": "", "case": "", "error": "no driver"}]
    )
    assert gpu_check.main() == 1
    assert json.loads((tmp_path / "out.json").read_text())["ops"] == []


def test_an_op_that_hangs_or_dies_becomes_a_row(gpu_check, monkeypatch):
    row = gpu_check._run("no_such_op", "triton", True, 100, [])[0]
    assert row["op"] == "no_such_op" and "exit code 1" in row["error"] and "KeyError" in row["error"]
    assert "took longer than" in gpu_check._run("rms_norm", "triton", True, 0.01, [])[0]["error"]
