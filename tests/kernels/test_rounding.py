"""How far codes and draws may stand from the reference's: one step, and only where they were written."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from toolkit.kernels.op import Case, Target
from toolkit.kernels.reference.kept import kept_mass
from toolkit.kernels.registry import load
from toolkit.kernels.tolerances import compare


def judged(name, label, change):
    """What ``compare`` says of the reference itself, whose results ``change(arguments, result)`` has touched."""
    op = load()[name]
    case = next(c for c in op.cases() if c.label == label)

    def run(**arguments):
        result = op.reference(**arguments)
        changed = change(arguments, result)
        return result if changed is None else changed

    implementation = dataclasses.replace(op.implementations["reference"], run=run)
    return compare(op, implementation, case, Target("cpu", "float32", None, case.traits))


def nudge(name, steps, slot=None):
    def change(arguments, result):
        at = int(arguments["slot_mapping"][2]) if slot is None else slot(arguments["slot_mapping"].tolist())
        row = arguments[name].flatten(0, 1).view(torch.uint8)[at, 0]
        row[5] = row[5] - steps if row[5] > 100 else row[5] + steps

    return change


@pytest.mark.parametrize(
    "op, label", [("kv_write", "bits8-80"), ("rope_kv_write", "int8"), ("kv_write", "bits0-80-e4m3fn")]
)
def test_a_code_may_be_its_neighbour_but_no_other(op, label):
    assert judged(op, label, nudge("k_cache", 1)) is None
    assert judged(op, label, nudge("v_cache", 1)) is None
    said = judged(op, label, nudge("k_cache", 3))
    assert "1 of" in said and "the first at [" in said


def test_a_nibble_may_be_its_neighbour_but_no_other():
    assert judged("kv_write", "bits4-64", nudge("v_cache", 1)) is None
    assert "values differ" in judged("kv_write", "bits4-64", nudge("v_cache", 32))  # the high nibble, by two


def test_what_was_not_written_stays_as_it_was():
    unwritten = nudge("k_cache", 1, lambda slots: next(i for i in range(96) if i not in slots))
    assert "1 of" in judged("kv_write", "bits8-80", unwritten)


def test_parameters_may_be_off_by_a_last_place():
    def scaled(by):
        def change(arguments, result):
            params = arguments["k_params"].flatten(0, 1)
            params[arguments["slot_mapping"][:1]] *= by

        return change

    assert judged("kv_write", "bits8-80", scaled(1 + 2**-10)) is None
    assert judged("kv_write", "bits8-80", scaled(1.01)) is not None


def test_a_draw_on_a_border_may_fall_to_either_side():
    op = load()["sample"]
    made = next(c for c in op.cases() if c.label == "top_p").make(
        torch.float32, "cpu", torch.Generator().manual_seed(0)
    )
    mass = kept_mass(*(made[n] for n in ("logits", "temperature", "top_k", "top_p", "min_p")))
    token = int(op.reference(**made)[0])

    def case(u):
        return Case("border", lambda dtype, device, g: made | {"u": torch.cat([u.float()[None], made["u"][1:]])})

    def one_less(**arguments):
        found = op.reference(**arguments)
        kept = mass[0].diff(prepend=torch.zeros(1).double()).nonzero()[:, 0].tolist()
        found[0] = kept[kept.index(int(found[0])) - 1]
        return found

    implementation = dataclasses.replace(op.implementations["reference"], run=one_less)
    border = float(mass[0, token - 1] / mass[0, -1])
    for beside, agrees in ((3e-6, True), (1e-3, False)):
        said = compare(op, implementation, case(torch.tensor(border + beside)), Target("cpu", "float32"))
        assert (said is None) == agrees, said


def test_a_greedy_row_takes_the_largest_alone():
    def change(arguments, result):
        return result + 1

    assert "16 of 16 values differ" in judged("sample", "greedy", change)
