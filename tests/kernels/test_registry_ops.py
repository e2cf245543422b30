"""Every implementation of every op against its reference: op × implementation × case × dtype, from the registry."""

from __future__ import annotations

import pytest

from toolkit.kernels import registry
from toolkit.kernels.op import Target
from toolkit.kernels.tolerances import compare


def _all_cases():
    for op in registry.load().values():
        for family, implementation in op.implementations.items():
            if family == "reference":
                continue
            for dtype in op.dtypes:
                for case in op.cases():
                    target = Target("cpu", dtype, None, case.traits)
                    if implementation.unsupported(target) is None:
                        yield pytest.param(
                            op, implementation, case, target, id=f"{op.name}-{family}-{case.label}-{dtype}"
                        )


@pytest.mark.parametrize("op, implementation, case, target", _all_cases())
@pytest.mark.parametrize("seed", [0, 1])
def test_implementation_equals_reference(op, implementation, case, target, seed):
    assert compare(op, implementation, case, target, seed) is None
