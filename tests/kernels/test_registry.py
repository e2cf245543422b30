"""How implementations are chosen, described and tested; and that a wrong one is caught."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from toolkit.kernels import registry
from toolkit.kernels.op import Case, Implementation, KernelError, Target
from toolkit.kernels.registry import choose, describe, gate_cases, load, self_test
from toolkit.kernels.tolerances import OVERRIDES, TOLERANCES, compare

CPU = Target("cpu", "float32")


@pytest.fixture
def toy(monkeypatch):
    """An op of our own: doubling, with an implementation for the GPU and one for even sizes."""
    monkeypatch.setattr(registry, "_OPS", load())  # all of them first: what is declared meanwhile is gone afterwards

    def cases():
        yield Case("four", lambda dtype, device, g: {"x": torch.randn(4, generator=g).to(device, dtype)})

    @registry.op(cases)
    def double(x):
        """2·x"""
        return x + x

    @double.register("triton", devices=("cuda",))
    def on_gpu(x):
        return x * 2

    @double.register("torch", unsupported=lambda t: "odd sizes" if t.traits.get("size", 0) % 2 else None)
    def even(x):
        return x * 2

    return double


def test_priority_decides_and_reasons_are_asked(toy):
    assert choose(toy, CPU).family == "torch"
    assert choose(toy, Target("cpu", "float32", None, {"size": 3})).family == "reference"
    assert choose(toy, Target("cuda", "float32")).family == "triton"
    torch.testing.assert_close(toy(torch.ones(3)), torch.full((3,), 2.0))


def test_asking_by_name_raises_with_the_reason(toy):
    with pytest.raises(KernelError, match="triton implementation cannot run: runs on cuda, not on cpu"):
        choose(toy, CPU, "triton")
    with pytest.raises(KernelError, match="odd sizes"):
        choose(toy, Target("cpu", "float32", None, {"size": 3}), "torch")
    with pytest.raises(KernelError, match="no implementation 'cuda'; there are reference, triton, torch"):
        choose(toy, CPU, "cuda")
    with pytest.raises(KernelError, match=r"takes .* not int8"):
        choose(toy, Target("cpu", "int8"), "torch")


def test_the_environment_forces_a_family(toy, monkeypatch):
    monkeypatch.setenv("TOOLKIT_KERNELS", "reference")
    assert choose(toy, CPU).family == "reference"
    monkeypatch.setenv("TOOLKIT_KERNELS", "triton")
    with pytest.raises(KernelError, match="cannot run"):
        choose(toy, CPU)
    monkeypatch.setenv("TOOLKIT_KERNELS", "cuda")  # does not implement it: the priority list stands
    assert choose(toy, CPU).family == "torch"
    monkeypatch.setenv("TOOLKIT_KERNELS", "cpu")  # there are no such kernels
    with pytest.raises(KernelError, match="'cpu' selects nothing"):
        choose(toy, CPU)
    monkeypatch.setenv("TOOLKIT_KERNELS", "fast")
    with pytest.raises(KernelError, match="TOOLKIT_KERNELS: expected one of"):
        choose(toy, CPU)


@pytest.mark.parametrize(
    ("kernel", "said"), [(lambda x: x * 3, "4 of 4 values differ"), (lambda x: 1 // 0, "ZeroDivisionError")]
)
def test_a_compiled_kernel_that_fails_its_self_test_is_not_used(toy, monkeypatch, caplog, kernel, said):
    monkeypatch.setattr(registry, "TRUSTED", ("reference",))  # what can run here stands in for a GPU's
    ran = []

    def wrong(x):
        ran.append(x)
        return kernel(x)

    toy.implementations["torch"] = Implementation("torch", wrong, ("cpu",), ("float32",))
    assert choose(toy, CPU).family == "torch" and not ran
    assert choose(toy, CPU, trusted=False).family == "reference"
    assert choose(toy, CPU, trusted=False).family == "reference"
    assert len(ran) == 1, "once a process"
    assert [r.levelname for r in caplog.records] == ["WARNING"] and said in caplog.text and "double" in caplog.text
    assert choose(toy, CPU, "torch", trusted=False).family == "torch", "who asks by name gets it"


def test_the_self_test_tries_each_path_of_the_form_asked_for(toy, monkeypatch, caplog):
    monkeypatch.setattr(registry, "TRUSTED", ("reference",))

    def cases():
        for label, rows, traits in (
            ("one", 1, {}),
            ("many", 9, {}),
            ("codes", 9, {"bits": 8}),
            ("far", 1, {"alibi": 1}),
        ):
            inputs = {"x": torch.ones(rows)}
            yield Case(label, lambda dtype, device, g, inputs=inputs: inputs, {"bits": 0, "size": 2} | traits)

    toy.cases, toy.gate = cases, ("one", "many", "codes", "far")
    wrong_for_many = Implementation("torch", lambda x: x * (2 if len(x) == 1 else 3), ("cpu",), ("float32",))
    toy.implementations["torch"] = wrong_for_many
    plain, coded = (Target("cpu", "float32", None, {"bits": bits, "size": 64}) for bits in (0, 8))
    assert [c.label for c in gate_cases(toy, wrong_for_many, plain)] == ["one", "many"]
    assert [c.label for c in gate_cases(toy, wrong_for_many, coded)] == ["codes"]
    far = Target("cpu", "float32", None, {"bits": 0, "alibi": True})
    assert [c.label for c in gate_cases(toy, wrong_for_many, far)] == ["one", "many", "far"], "what few models need"
    assert [c.label for c in gate_cases(toy, wrong_for_many, Target("cpu", "float32", None, {"bits": 3}))] == ["one"]
    assert choose(toy, plain, trusted=False).family == "reference"
    assert "case many" in caplog.text and "9 of 9 values differ" in caplog.text
    assert choose(toy, Target("cpu", "float32", None, {"bits": 3}), trusted=False).family == "torch"


def test_gates_name_cases_and_hold_every_form_of_them():
    for op in load().values():
        cases = {case.label: case for case in op.cases()}
        assert set(op.gate) <= set(cases), op.name
        gate = [cases[label] for label in op.gate] or [next(iter(cases.values()))]
        assert {c.traits.get("bits") for c in gate} == {c.traits.get("bits") for c in cases.values()}, op.name
        assert {c.traits.get("cache") for c in gate} == {c.traits.get("cache") for c in cases.values()}, op.name


def test_a_compiled_kernel_that_passes_its_self_test_is_used(toy, monkeypatch):
    monkeypatch.setattr(registry, "TRUSTED", ("reference",))
    assert choose(toy, CPU, trusted=False).family == "torch"


def test_describe_names_every_implementation(toy):
    rows = {(r.op, r.implementation): r for r in describe(CPU)}
    assert rows["double", "torch"].chosen and rows["double", "torch"].reason is None
    assert rows["double", "triton"].reason == "runs on cuda, not on cpu"
    for op in load().values():
        assert (op.name, "reference") in rows
        assert sum(r.chosen for (name, _), r in rows.items() if name == op.name) == 1


def test_a_kernel_that_raises_is_a_row_of_the_self_test(toy, monkeypatch):
    monkeypatch.setattr(registry, "load", lambda: {"double": toy})

    def broken(x):
        raise ValueError("no such instruction\nand more")

    found = toy.implementations["torch"]
    toy.implementations["torch"] = Implementation("torch", broken, found.devices, found.dtypes, None, None, None)
    rows = {row.implementation: row.error for row in self_test(CPU)}
    assert rows == {"reference": None, "torch": "ValueError: no such instruction"}


def test_the_self_test_agrees_here():
    rows = self_test(CPU, budget_seconds=5)
    assert {r.op for r in rows} >= set(load())
    assert [r.error for r in rows if r.error] == []
    assert all(r.cases > 0 for r in rows)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("rms_norm", lambda run: lambda **a: run(**(a | {"eps": 0.5}))),
        ("rope", lambda run: lambda **a: run(**(a | {"sin": -a["sin"]}))),
        ("act_and_mul", lambda run: lambda **a: run(**(a | {"x": a["x"].flip(-1)}))),
        ("linear_group_int", lambda run: lambda **a: run(**(a | {"scales": a["scales"].roll(1, 1)}))),
        ("linear_int8", lambda run: lambda **a: run(**(a | {"scales": a["scales"].roll(1)}))),
        ("paged_attention", lambda run: lambda **a: run(**(a | {"seq_lens": a["seq_lens"].clip(2) - 1}))),
        ("kv_write", lambda run: lambda **a: run(**(a | {"k": a["v"]}))),
        ("rope_kv_write", lambda run: lambda **a: run(**(a | {"q_weight": a.get("k_weight")}))),
        ("moe_experts", lambda run: lambda **a: run(**(a | {"weights": a["weights"].flip(1)}))),
        ("sample", lambda run: lambda **a: run(**(a | {"u": 1 - a["u"]}))),
        ("apply_bitmask", lambda run: lambda **a: run(**(a | {"bitmask": ~a["bitmask"]}))),
        ("penalize", lambda run: lambda **a: run(**(a | {"counts": a["counts"] + 1}))),
    ],
)
def test_a_wrong_implementation_is_caught(name, wrong):
    op = load()[name]
    broken = Implementation("torch", wrong(op.reference), ("cpu",), op.dtypes)
    assert any(compare(op, broken, case, CPU) for case in op.cases())


def test_every_dtype_of_every_op_has_a_tolerance():
    for op in load().values():
        assert set(op.dtypes) <= set(TOLERANCES)
    for (name, family, dtype), (_, reason) in OVERRIDES.items():
        known = {*load()[name].implementations, "cpu"}  # the native runner's: tests/native/test_registry_ops.py
        assert family in known and dtype in TOLERANCES and reason


def test_importing_kernels_is_cheap():
    code = "import sys, toolkit.kernels; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_planners_of_an_op_take_the_same_arguments():
    """Runners call whichever was chosen in the same way."""
    for op in registry.load().values():
        plans = [i.plan for i in op.implementations.values() if i.plan is not None]
        assert len({tuple(inspect.signature(plan).parameters) for plan in plans}) <= 1, op.name
