"""Triton's kernels as Triton compiles them, their PTX executed by numpy: threads, layouts, memory that warps share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Compiled, not interpreted: in a process of its own, where kernels' texts may be changed before they run.
RUN = """
import json, re, sys
sys.path.insert(0, "scripts")
from gpu.ptx import triton_kernels

op, only, pattern, other = sys.argv[1:]
read = triton_kernels.read
if pattern:
    triton_kernels.read = lambda text, symbols: read(re.sub(pattern, other, text), symbols)
for row in triton_kernels.check(op, only=only, smoke=True):
    print(json.dumps(row), flush=True)
"""

pytestmark = pytest.mark.slow  # Triton's compiler


def rows(op, only="", wrong=("", "")):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", RUN, op, only, *wrong]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "op, only",
    [
        ("rms_norm", ""),
        ("act_and_mul", ""),
        ("rope_kv_write", ""),
        ("rope_kv_write", "int8"),
        ("paged_attention", "decode"),
        ("linear_group_int", ""),
        ("linear_int8", ""),
        ("moe_route", ""),
        ("causal_conv", "decode"),
        ("sample", "top_p"),
    ],
)
def test_compiled_kernels_equal_the_reference(op, only):
    found = rows(op, only)
    assert found and all(row["error"] is None and row["kernels"] for row in found), found


@pytest.mark.parametrize(
    "op, wrong",
    [
        ("rms_norm", (r", 16, 31, -1;", ", 0, 31, -1;")),  # of a shuffle
        ("rms_norm", (r"bar\.sync\s+\d+;", "")),
        ("linear_group_int", (r"cp\.async\.wait_group\s+\S+;", "")),
        ("linear_group_int", (r"(ldmatrix\S+\.x\d)\.shared", r"\1.trans.shared")),
    ],
)
def test_wrong_ptx_is_found(op, wrong):
    found = rows(op, wrong=wrong)
    assert any("values differ" in str(row["error"]) for row in found), found
