"""The ahead-of-time build of the Triton kernels, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.kernels import registry
from toolkit.kernels.triton.ahead_of_time import manifest

ROOT = Path(__file__).resolve().parents[2]


def compiled(code: str) -> str:
    """Standard output of ``code`` in a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


B16, F16, F32 = "bfloat16", "float16", "float32"
HARD = [
    ("paged_attention", "decode-128-x4-int4", B16, 1, "attend_kernel"),
    ("rms_norm", "hidden4096", B16, 0, "rms_norm_kernel"),
    ("linear_group_int", "int4-g128-1", B16, 0, "group_linear_kernel"),
    ("sample", "vocab128256", F32, 1, "draw_kernel"),
    ("paged_attention", "decode-80-x1-int8", B16, 0, "attend_kernel"),
    ("paged_attention", "latent-decode-x16", B16, 0, "latent_kernel"),
    ("delta_rule", "decode", B16, 0, "delta_rule_kernel"),
    ("delta_rule", "prompt", B16, 0, "delta_prepare_kernel"),
    ("delta_rule", "prompt", F16, 0, "delta_prepare_kernel"),
    ("delta_rule", "prompt", B16, 1, "delta_walk_kernel"),
    ("state_scan", "prompt", B16, 0, "scan_walk_kernel"),
]


@pytest.mark.parametrize("architecture, count", [(80, 1), (90, len(HARD)), (120, 1)])
def test_one_variant_of_each_hard_kernel_compiles_without_a_gpu(architecture, count):
    out = compiled(f"""
from toolkit.kernels.triton.ahead_of_time.build import Variant, build_one
for op, label, dtype, index, _ in {HARD[:count]}:
    built = build_one(Variant(op, label, dtype, index, {architecture}))
    print(built.kernel, built.shared, *built.faults)
""")
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows] == [kernel for *_, kernel in HARD[:count]]
    assert all(len(row) == 2 for row in rows), "faults: " + out
    assert int(rows[0][1]) > 8192  # tiles of keys wait in shared memory


def test_what_does_not_hold_is_reported():
    out = compiled("""
from toolkit.kernels.triton.ahead_of_time import build
build.claims = lambda *_: frozenset({"mma"})
build.shared_limit = lambda capability: 8
print(build.build_one(build.Variant("rms_norm", "hidden4096", "bfloat16", 0, 90)).faults)
""")
    assert "mma missing" in out and "bytes of shared memory, more than 8" in out


def test_costly_instructions_are_found_in_compiled_loops_alone(tmp_path):
    (tmp_path / "loops.py").write_text("""
import triton, triton.language as tl
@triton.jit
def inside(x, y, n, d, KIND: tl.constexpr):
    total = tl.zeros([128], tl.float32)
    for i in range(n):
        code = tl.load(x + i * 128 + tl.arange(0, 128))
        if KIND == 0:
            total += code.to(tl.float32)
        if KIND == 1:
            total += (code // d).to(tl.float32, bitcast=True)
        if KIND == 2:
            total += (code.to(tl.int64) // d).to(tl.int32).to(tl.float32, bitcast=True)
        if KIND == 3:
            total += (code // 8).to(tl.float32, bitcast=True)
    tl.store(y + tl.arange(0, 128), total + (n // d).to(tl.float32))
""")
    out = compiled(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import triton
from loops import inside
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from toolkit.kernels.machine_code import costly, listings
types = {{"x": "*i32", "y": "*fp32", "n": "i32", "d": "i32", "KIND": "constexpr"}}
for kind in range(4):
    source = ASTSource(inside, types, {{"KIND": kind}}, {{}})
    print(costly(listings(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])["inside"][1]))
""")
    assert out.splitlines() == ["['integer to float']", "['integer division']", "['integer division', 'call']", "[]"]


def test_wide_tiles_claim_wgmma_on_hopper_alone():
    assert "wgmma" in manifest.claims("attend_kernel", 90, 64)
    for kernel, architecture, rows in (("attend_kernel", 80, 64), ("attend_kernel", 90, 16), ("act_kernel", 90, 0)):
        assert "wgmma" not in manifest.claims(kernel, architecture, rows)


def test_variants_differ_by_architecture_and_float8_needs_hardware():
    out = compiled("""
from toolkit.kernels.triton.ahead_of_time.build import variants
for a in (80, 90):
    found = list(variants(a, "moe_experts_fp8")), list(variants(a, "rope"))
    print(*(len(f) for f in found))
""")
    (no_float8, ropes), (float8, same) = (map(int, line.split()) for line in out.splitlines())
    assert no_float8 == 0 and float8 > 0 and ropes == same > 0


def test_every_triton_implementation_is_in_the_manifest():
    ops = {name for name, op in registry.load().items() if "triton" in op.implementations}
    missing = ops - {call.op for call in manifest.calls()}
    told = "no Call in kernels/triton/ahead_of_time/manifest.py"
    assert missing == {"act"}, told  # compiled as act_and_mul's kernel without the gate; no served model has it


@pytest.mark.slow
@pytest.mark.timeout(3600)  # on a machine that does something else too
def test_the_whole_manifest_compiles_for_hopper_without_faults():
    done = subprocess.run([ROOT / "scripts/gpu_build", "--arch", "90"], capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(
        line for line in done.stdout.splitlines() if "FAULT" in line or "ERR" in line
    )
