"""Triton kernels, interpreted on CPU tensors, against the reference: op × case × dtype, from the registry.

The root ``conftest.py`` sets TRITON_INTERPRET before triton is imported. What holds here of the arithmetic holds on a
GPU; ``scripts/gpu_check`` repeats it there.
"""

from __future__ import annotations

import pytest

from toolkit.kernels import registry
from toolkit.kernels.op import Target
from toolkit.kernels.tolerances import compare


def _all_cases():
    for op in registry.load().values():
        implementation = op.implementations.get("triton")
        if implementation is None:
            continue
        for number, case in enumerate(op.cases()):
            on_gpu = {dtype: Target("cuda", dtype, 90, case.traits) for dtype in op.dtypes}
            taken = [dtype for dtype in op.dtypes if implementation.unsupported(on_gpu[dtype]) is None]
            for i, dtype in enumerate(taken):  # types by turns: the interpreter is slow
                marks = () if i == number % len(taken) else pytest.mark.slow
                target = Target("cpu", dtype, None, case.traits)
                yield pytest.param(op, implementation, case, target, id=f"{op.name}-{case.label}-{dtype}", marks=marks)


@pytest.mark.parametrize("op, implementation, case, target", _all_cases())
def test_interpreted_kernel_equals_reference(op, implementation, case, target):
    assert compare(op, implementation, case, target, seed=3) is None
