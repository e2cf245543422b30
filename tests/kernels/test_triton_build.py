"""The ahead-of-time build of the Triton kernels, without a GPU."""

from __future__ import annotations

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
