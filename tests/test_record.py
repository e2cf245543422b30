"""Records as JSON and back: what is written is read back equal, and what is wrong is named with the way to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.base.record import later, plain, read


@dataclass(frozen=True)
class Round:
    radius: float
    kind: Literal["round"] = "round"


@dataclass(frozen=True)
class Square:
    sides: tuple[int, int]
    kind: Literal["square"] = "square"


@dataclass(frozen=True)
class Drawing:
    name: str
    shapes: tuple[Round | Square, ...]
    notes: dict[str, list[str]] = field(default_factory=dict)
    file: Path | None = None
    scale: int | float | str = 1
    extra: dict[str, Any] | None = None
    late: bool = later(False)


NUMBERS = st.floats(allow_nan=False)
SHAPES = st.builds(Round, NUMBERS) | st.builds(Square)


@given(
    st.builds(
        Drawing,
        shapes=st.lists(SHAPES).map(tuple),
        file=st.none() | st.just(Path("a/b")),
        scale=st.integers() | NUMBERS | st.text(),
        extra=st.none() | st.just({"deep": [1, {"x": None}]}),
    )
)
def test_what_is_written_is_read_back(drawing: Drawing) -> None:
    assert read(Drawing, json.loads(json.dumps(plain(drawing)))) == drawing
    assert ("late" in plain(drawing)) == drawing.late, "files without it stay as they were"


@dataclass(frozen=True)
class Either:
    first: float | str
    second: str | float


def test_the_order_of_a_union_says_nothing() -> None:
    found = read(Either, {"first": 3, "second": 3})
    assert (found.first, found.second) == (3.0, 3.0) and isinstance(found.second, float)
    assert read(Either, {"first": "a", "second": "b"}) == Either("a", "b")
    with pytest.raises(ValueError, match="second: expected"):
        read(Either, {"first": 1.5, "second": [1]})


GOOD: dict[str, Any] = {"name": "a", "shapes": [{"kind": "round", "radius": 2}]}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": 3}, "^name: expected a text, found 3$"),
        ({"shapes": [{"kind": "round", "radius": "x"}]}, r"^shapes\[0\].radius: expected a number, found 'x'$"),
        ({"shapes": [{"kind": "oval"}]}, r"^shapes\[0\]: unknown kind 'oval'$"),
        ({"shapes": [{"kind": "square", "sides": [1]}]}, r"^shapes\[0\].sides: expected 2 values, found 1$"),
        ({"shapes": [3]}, r"^shapes\[0\]: expected an object, found 3$"),
        ({"shapes": None}, "^shapes: expected a list, found None$"),
        ({"notes": {"b": [1]}}, r"^notes.'b'\[0\]: expected a text, found 1$"),
        ({"colour": 1}, "^Drawing: unknown field 'colour'$"),
        ({"late": 1}, "^late: expected true or false, found 1$"),
        ({"scale": None}, "^scale: expected a whole number, found None$"),
        ({"scale": True}, "^scale: expected a whole number, found True$"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(Drawing, GOOD | change)


def test_fields_of_others_are_left_out_and_missing_ones_named() -> None:
    told = GOOD | {"colour": 1, "shapes": [{"kind": "round", "radius": 2, "pen": 4}]}
    assert read(Drawing, told, others=True) == read(Drawing, GOOD)
    with pytest.raises(ValueError, match=r"^Drawing: field 'shapes' is missing$"):
        read(Drawing, {"name": "a"})
