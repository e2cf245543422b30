"""Breaking text between words while it comes in pieces."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.chat.wrap import Wrapper


def wrapped(pieces: list[str], width: int = 20) -> str:
    wrapper = Wrapper(width)
    return "".join(wrapper.add(piece) for piece in pieces) + wrapper.end()


def test_lines_break_between_words_however_they_come() -> None:
    text = "The capital of France is Paris, which lies on the river Seine."
    expected = "\n".join(textwrap.wrap(text, 20))
    assert wrapped([text]) == wrapped(list(text)) == expected


@pytest.mark.parametrize("size", [1, 3, 4])
def test_words_of_other_alphabets_are_not_broken(size: int) -> None:
    text = "Привет мир, это довольно длинная строка. Größere Änderungen überall möglich. Γειά σου κόσμε."
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert wrapped(pieces) == "\n".join(textwrap.wrap(text, 20))
    assert Wrapper(20).add("今天") == "今天"  # at once: no blank ends a word


def test_code_and_long_words_are_left_alone() -> None:
    text = "Do:\n```python\nprint('a line that is longer than twenty columns')\n```\nthat is all there is to it"
    lines = wrapped(list(text)).split("\n")
    assert "print('a line that is longer than twenty columns')" in lines
    assert lines[-2:] == ["that is all there is", "to it"]
    assert wrapped(["x" * 50]) == "x" * 50


@pytest.mark.parametrize("text", ["今天天气很好，我们去公园散步吧。" * 3, "  indented   twice\n\n\ttab "])
def test_nothing_is_lost_or_added_where_no_line_is_too_long(text: str) -> None:
    assert wrapped(list(text), 200) == text


@given(st.text(alphabet="ab \n`é界", max_size=80), st.integers(4, 30), st.randoms())
def test_only_blanks_become_line_ends(text: str, width: int, random) -> None:  # type: ignore[no-untyped-def]
    cuts = sorted(random.sample(range(len(text) + 1), min(3, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert wrapped(pieces, width).split() == text.split()
