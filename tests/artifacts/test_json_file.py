"""One reader for all JSON that somebody else wrote: a value that is safe to print and to walk, or one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.artifacts.json_file import MAX_DEPTH, parse_json, read_json, read_json_object
from toolkit.errors import ToolkitError


def nested(levels: int) -> bytes:
    return b'{"a":[' * (levels // 2) + b"1" + b"]}" * (levels // 2)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1, column 2"),
        (b'{"a": \xff}', "byte 0xff at 6"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b'{"\\udfff": 1}', "half a surrogate pair"),
        (nested(MAX_DEPTH + 10), "at most 200 levels"),
        (b"[" * 100_000, "not valid JSON"),
        (b"9" * 100_000, "not valid JSON"),
    ],
)
def test_refused_in_one_line_that_names_the_file(tmp_path: Path, raw: bytes, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(raw)
    with pytest.raises(ToolkitError, match=words) as caught:
        read_json(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_what_is_sound_is_read(tmp_path: Path) -> None:
    assert parse_json(nested(MAX_DEPTH - 2), "x")["a"]
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude42", "b": NaN}', "x")["a"] == "🙂"
    assert parse_json(r'"\\ud800"', "x") == r"\ud800"  # no escape: a backslash and five letters
    with pytest.raises(ToolkitError, match="occurs twice"):
        parse_json('{"a": 1, "a": 2}', "x", unique=True)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path, "something else"),
        (Path("/dev/zero"), "something else"),
        (tmp_path / "no", "no such"),
    ):
        with pytest.raises(ToolkitError, match=words):
            read_json(path)
    (tmp_path / "list").write_text("[]")
    with pytest.raises(ToolkitError, match="expected a JSON object, found a list"):
        read_json_object(tmp_path / "list")


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: json.dumps(t).encode()))
def test_any_bytes(raw: bytes) -> None:
    try:
        found = parse_json(raw, "x")
    except ToolkitError as error:
        assert "\n" not in str(error)
    else:
        json.dumps(found, ensure_ascii=False).encode()
