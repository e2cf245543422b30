"""Triton kernels without a GPU: against the reference in the interpreter, and compiled ahead for two generations."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

from toolkit.kernels.registry import load  # noqa: E402

OPS = sorted(name for name, op in load().items() if "triton" in op.implementations)

INTERPRET = """
import json
from toolkit.kernels.registry import Target, load
from toolkit.kernels.tolerances import compare

found = {}
for op in load().values():
    if "triton" in op.implementations:
        for dtype in ("float32", "float16"):
            for case in op.cases():
                target = Target("cpu", dtype, None, case.traits)
                reason = op.implementations["triton"].unsupported(target)
                error = reason or compare(op, op.implementations["triton"], case, target)
                found.setdefault(op.name, {})[f"{case.label}-{dtype}"] = error
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def interpreted():
    """Op -> case -> what differs from the reference (None: nothing), from a process with the interpreter on."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRET], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("op", OPS)
def test_interpreted_kernels_equal_the_reference(op, interpreted):
    assert interpreted[op] and {k: v for k, v in interpreted[op].items() if v is not None} == {}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["rms_norm_kernel", "add_rms_norm_kernel", "rope_kernel", "act_and_mul_kernel"])
def test_kernels_compile_without_a_gpu(name, dtype, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from toolkit.kernels.triton import rowwise

    kernel = getattr(rowwise, name)
    pointers = {"x", "residual", "weight", "out", "total"}
    kinds = {"cos": "*fp32", "sin": "*fp32", "eps": "fp32", "offset": "fp32"}
    constants = {"BLOCK": 1024, "KIND": "gelu_tanh"}
    signature = {}
    for argument in kernel.arg_names:
        known = "constexpr" if argument in constants else kinds.get(argument, "i32")
        signature[argument] = f"*{dtype}" if argument in pointers else known
    given = {k: v for k, v in constants.items() if k in kernel.arg_names}
    compiled = triton.compile(ASTSource(kernel, signature, given), target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"] and len(compiled.asm["cubin"]) > 1000
