"""What a batch says of options and files that cannot be: the whole line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.batch.filling import MOST_SCHEMA, Filler, Filling
from toolkit.batch.vectors import check_target, collect
from toolkit.errors import ToolkitError, UsageError

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"system": "x"}, "system: only with prompt, for rows"),
        ({"id_column": "x"}, "id_column: only with prompt, for rows"),
        ({"endpoint": "/v1/completions"}, "endpoint: only with prompt, for rows; other lines name theirs as url"),
        ({"json_schema": "{"}, "json_schema: expected a JSON schema or a file of one, found '{' ("),
    ],
)
def test_what_lines_have_no_use_for(given: dict[str, Any], told: str) -> None:
    assert refused(lambda: Filler(Filling(**given))).startswith(told)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"[1]", "json_schema: expected a JSON object, found '[1]'"),
        (b"{" + b" " * MOST_SCHEMA, f"json_schema: {{file}} has more than {MOST_SCHEMA:,} bytes"),
    ],
)
def test_a_file_of_a_schema(tmp_path: Path, data: bytes, told: str) -> None:
    file = tmp_path / "schema.json"
    file.write_bytes(data)
    assert refused(lambda: Filler(Filling(json_schema=str(file)))) == told.format(file=file)


def test_a_file_for_vectors(tmp_path: Path) -> None:
    kinds = "expected a file that ends in .npy, .parquet, .jsonl"
    assert refused(lambda: check_target(tmp_path / "a.txt")) == f"{tmp_path / 'a.txt'}: {kinds}, found .txt"
    assert refused(lambda: check_target(tmp_path / "a")) == f"{tmp_path / 'a'}: {kinds}, found none"
    (folder := tmp_path / "a.npy").mkdir()
    assert refused(lambda: check_target(folder)) == f"{folder}: expected a file for the vectors, found something else"


def test_answers_without_a_vector(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("")
    told = f"{answers}: no line has a vector; its lines say why"
    assert refused(lambda: collect(answers, tmp_path / "a.npy"), ToolkitError) == told
