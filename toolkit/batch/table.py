"""Answers as a Parquet file, a row for each line of the input in its order, made of the lines that have been kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import orjson

from toolkit.base import extras
from toolkit.base.whole_file import sync
from toolkit.errors import UsageError
from toolkit.serve.openai.batches.results import lines_at, places

SUFFIX = ".parquet"
READ_ALONE = (".csv", ".tsv")  # forms of rows that are no forms of answers
KEPT = ".jsonl"  # behind its name: where answers are until all are there
ROWS = 1024  # that are written at once


def kept_beside(target: Path) -> Path:
    """The file that grows while a table's rows are made; ``target`` itself where it is no table. Raises UsageError
    without what writes one, and for a table that answers are not written as."""
    if target.suffix.lower() in READ_ALONE:
        raise UsageError(f"{target}: expected answers in a file that ends in .jsonl or {SUFFIX}, found {target.suffix}")
    if target.suffix.lower() != SUFFIX:
        return target
    extras.require("pyarrow", str(target))
    return target.with_name(target.name + KEPT)


def write_table(kept: Path, target: Path) -> None:
    """Replace ``target`` by the rows of ``kept``: custom_id, status_code, text (of the first choice), response and
    error (as JSON). Raises OSError."""
    import pyarrow
    from pyarrow import parquet

    text = ("custom_id", "text", "response", "error")
    schema = pyarrow.schema([(name, pyarrow.string()) for name in text] + [("status_code", pyarrow.int32())])
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with parquet.ParquetWriter(scratch, schema) as writer:
            rows: list[dict[str, Any]] = []
            for line in lines_at(kept, places(kept)):
                rows.append(_row(orjson.loads(line)))
                if len(rows) == ROWS:
                    writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                    rows = []
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))
        sync(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def _row(told: dict[str, Any]) -> dict[str, Any]:
    response, error = told.get("response"), told.get("error")
    body = None if response is None else response["body"]
    return {
        "custom_id": told.get("custom_id"),
        "status_code": None if response is None else response["status_code"],
        "text": _text(body),
        "response": None if body is None else orjson.dumps(body).decode(),
        "error": None if error is None else orjson.dumps(error).decode(),
    }


def _text(body: Any) -> str | None:
    """What the model has said, where the answer is of a kind that says something."""
    try:
        if "output" in body:  # of /v1/responses, which has thoughts and calls beside it
            parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
            return "".join(part["text"] for part in parts) if parts else None
        if "data" in body:
            return cast(str, body["data"][0]["label"])  # of /classify
        choice = body["choices"][0]
        found = choice["message"]["content"] if "message" in choice else choice["text"]
    except (TypeError, LookupError):
        return None
    return found if isinstance(found, str) else None
