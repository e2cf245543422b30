"""What Python hands to the library is a record: a value that is missing, unknown or wrong is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolkit.runners.base import RunnerError
from toolkit.runners.native import runner as native
from toolkit.runners.native.program import Program, build_program


def without(name: str) -> Any:
    def change(program: Program) -> Program:
        at = program.names.index(name)
        names, values = (x[:at] + x[at + 1 :] for x in (program.names, program.values))
        return replace(program, names=names, values=values)

    return change


def beside(name: str, value: float = 1.0) -> Any:
    return lambda program: replace(program, names=(*program.names, name), values=(*program.values, value))


def other(name: str, value: float) -> Any:
    return lambda program: beside(name, value)(without(name)(program))


@pytest.mark.parametrize(
    "change, message",
    [
        (without("vocabulary"), "vocabulary: missing"),
        (without("final_norm"), "final_norm: missing"),
        (without("sublayers.0.attention.kv_heads"), "sublayers.0.attention.kv_heads: missing"),
        (without("sublayers.1.moe.experts.2.up.matrix"), "sublayers.1.moe.experts.2.up.matrix: missing"),
        (without("sublayers.0.attention.q_norm"), "sublayers.0.attention.q_norm.* unknown"),
        (without("sublayers.0.attention"), "sublayers.0.mixer: none of a kind that is known"),
        (beside("sublayers.0.attention.colour"), "sublayers.0.attention.colour: unknown"),
        (beside("hidden"), "hidden: given twice"),
        (other("hidden", 1.5), "hidden: expected an integer"),
        (other("sublayers.0.attention.heads", float("nan")), "sublayers.0.attention.heads: expected an integer"),
        (other("sublayers.0.attention.q.matrix", 1e9), "sublayers.0.attention.q.matrix: expected"),
        (lambda program: replace(program, names=program.names[:-1]), "fewer names"),
        (lambda program: replace(program, values=program.values[:-1]), "more names"),
    ],
)
def test_a_wrong_record_is_named(change, message, drive, monkeypatch) -> None:
    monkeypatch.setattr(native, "build_program", lambda *args, **kwargs: change(build_program(*args, **kwargs)))
    with pytest.raises(RunnerError, match=message):
        drive("qwen3_moe")


def test_the_order_of_a_record_does_not_matter(drive, monkeypatch) -> None:
    def reversed_program(*args: Any, **kwargs: Any) -> Program:
        program = build_program(*args, **kwargs)
        return replace(program, names=program.names[::-1], values=program.values[::-1])

    expected = drive("qwen3_moe")
    monkeypatch.setattr(native, "build_program", reversed_program)
    found = drive("qwen3_moe")
    logits = [d.step({d.add(): [5, 6, 7]}, "all").logits for d in (expected, found)]
    assert (logits[0] == logits[1]).all()
