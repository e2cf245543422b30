"""Linears by tiles give the bits of those without: on AMX where this processor has it, with modelled tiles anywhere."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.runners.native import build, library
from toolkit.runners.native.packing.pack import pack_weight

OTHER = next((isa for isa in library.isas() if isa != "amx"), "")
FORMS = [
    (4, 32, "zeros", torch.float16),
    (4, 64, "zeros", torch.bfloat16),
    (4, 64, "minima", torch.float32),
    (4, 128, "symmetric", torch.float16),
    (4, 384, "minima", torch.float16),
    (8, 32, "minima", torch.float16),
    (8, 48, "symmetric", torch.float32),
    (8, 64, "symmetric", torch.bfloat16),
    (8, 80, "symmetric", torch.float16),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any, support: Any) -> ctypes.CDLL:
    """The kernels compiled without AMX, for this processor otherwise."""
    found = support("compiled").compiled(tmp_path_factory.mktemp("amx"), OTHER, "amx_model.cpp", "amx/linear.cpp")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(params=["model", "amx"])
def tiles(request: Any, support: Any) -> Any:
    """Ops whose linears are multiplied by tiles."""
    ops = support("native_ops").NativeOps
    if request.param == "model":
        return ops(OTHER, linears=request.getfixturevalue("model"))
    if "amx" not in library.isas():
        pytest.skip("this processor has no AMX")
    return ops("amx")


@pytest.mark.parametrize("bits, group, form, dtype", FORMS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_tiles_give_the_same_bits(bits, group, form, dtype, tiles, quantize_groups, support, data) -> None:
    tokens = data.draw(st.integers(9, 70) | st.sampled_from([16, 17, 256, 257, 300]), "tokens")
    rows, groups = data.draw(st.integers(1, 80), "rows"), data.draw(st.integers(1, 9 if group < 100 else 3), "groups")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    weights = [torch.from_numpy(rng.standard_normal((rows, groups * group), np.float32)) for _ in range(2)]
    gate, up = (pack_weight(quantize_groups(w, group, bits, form, dtype)) for w in weights)
    x, base = rng.standard_normal((tokens, groups * group), np.float32), rng.standard_normal((tokens, rows), np.float32)
    bias, plain = rng.standard_normal(rows, np.float32), support("native_ops").NativeOps(OTHER)
    x[rng.random(x.shape) < 0.02] *= 9
    first = data.draw(st.integers(0, gate.meta.tiles - 1), "first tile")
    for more in ({}, {"bias": bias, "add": base, "alpha": 0.5}, {"tiles": (first, gate.meta.tiles)}):
        np.testing.assert_array_equal(tiles.linear(gate, x, **more), plain.linear(gate, x, **more))
    np.testing.assert_array_equal(tiles.gated(gate, up, x, 3), plain.gated(gate, up, x, 3))


REFUSED = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
from toolkit.check_env.native import native_variants
for row in native_variants():
    print(row["isa"], row["chosen"], row["why_not"])
"""


@pytest.mark.skipif("amx" not in library.isas(), reason="this processor has no AMX")
def test_where_the_system_refuses_its_registers_the_next_best_runs() -> None:
    """Linux does where a thread's stack for signals could not hold them."""
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    amx, second = done.stdout.splitlines()[:2]
    assert amx == "amx False instruction set amx: the system does not keep its registers for this process"
    assert second == f"{OTHER} True None"


def test_the_table_is_not_made_when_the_library_is_loaded(tmp_path: Path) -> None:
    """Processors without AVX-512 load it too: code compiled for AMX that ran then would be an illegal instruction."""
    compiler, kernels = build.compiler(), build.kernel_folder()
    if compiler is None or "amx" not in build.wanted_isas(compiler):
        pytest.skip("no C++ compiler that knows AMX")
    flags = [*build.COMMON, *build.ISAS["x86_64"]["amx"].flags.split(), "-DTK_ISA=amx", f"-I{kernels}"]
    file = tmp_path / "table.o"
    subprocess.run([*compiler.split(), *flags, "-c", kernels / "amx" / "table.cpp", "-o", file], check=True)
    assert b".init_array" not in file.read_bytes()
