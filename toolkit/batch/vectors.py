"""The vectors of a batch's answers as one file, in the order of the lines: .npy, Parquet, or JSON lines."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from toolkit.base import extras
from toolkit.base.whole_file import sync
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.openai.batches.results import lines_at, places

FORMS = (".npy", ".parquet", ".jsonl")
ROWS = 4096  # of a Parquet file that are written at once
Vectors = NDArray[np.float32]
Rows = Iterator[tuple[str, Vectors | None]]


def answers_file(target: Path) -> Path:
    """Where a run keeps its answers until all are there: beside the target, hidden."""
    return target.with_name(f".{target.name}.partial.jsonl")


def check_target(target: Path) -> None:
    """Raise UsageError for a file of another kind."""
    if target.suffix not in FORMS:
        raise UsageError(f"{target}: expected a file that ends in {', '.join(FORMS)}, found {target.suffix or 'none'}")
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: expected a file for the vectors, found something else")
    if target.suffix == ".parquet":
        extras.require("pyarrow", "a .parquet file of vectors")


def collect(answers: Path, target: Path) -> tuple[int, int]:
    """Write what the answers hold to ``target``, whole or not at all. (vectors, numbers in each). Lines that failed
    are rows of NaN in .npy, null in the others. Raises ToolkitError where there is no vector at all, or no room."""
    order = places(answers)
    width = next((len(v) for _, v in _rows(answers, order) if v is not None), 0)
    if not width:
        told = next(map(_fault, lines_at(answers, order)), "there is none")
        raise ToolkitError(f"no line has a vector: {told} (answers: {answers})")
    made = target.with_name(f".{target.name}.writing")
    try:
        _WRITERS[target.suffix](made, _rows(answers, order), len(order), width)
        sync(made)
        os.replace(made, target)
    except OSError as error:
        raise ToolkitError(f"{target}: cannot be written ({error.strerror}); all answers are in {answers}") from error
    finally:
        made.unlink(missing_ok=True)
    return len(order), width


def _rows(answers: Path, order: list[int]) -> Rows:
    return map(_read, lines_at(answers, order))


def _read(line: bytes) -> tuple[str, Vectors | None]:
    """(custom_id, the vector or None) of an answer."""
    answer = orjson.loads(line)
    body = (answer["response"] or {}).get("body") or {}
    data = body.get("data")
    name = answer["custom_id"] or ""
    return name, np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4") if data else None


def _fault(line: bytes) -> str:
    """Why an answer has none."""
    answer = orjson.loads(line)
    body = (answer["response"] or {}).get("body") or {}
    return str((body.get("error") or answer["error"] or {}).get("message", "the answer holds none"))


def _npy(file: Path, rows: Rows, count: int, width: int) -> None:
    """Not by a map of the file: on a full disk that ends the process."""
    nothing = np.full(width, np.nan, "<f4")
    with file.open("wb") as out:
        told = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
        np.lib.format.write_array_header_1_0(out, told)
        for _, row in rows:
            out.write((nothing if row is None else row.reshape(width)).tobytes())


def _jsonl(file: Path, rows: Rows, count: int, width: int) -> None:
    with file.open("wb") as out:
        for name, row in rows:
            line = {"custom_id": name, "embedding": row}
            out.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


def _parquet(file: Path, rows: Rows, count: int, width: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.float32(), width)
    schema = pa.schema([("custom_id", pa.string()), ("embedding", vector)])
    with parquet.ParquetWriter(file, schema) as out:
        held: list[tuple[str, Vectors | None]] = []

        def write() -> None:
            names = pa.array([name for name, _ in held], pa.string())
            vectors = pa.array([None if row is None else row.tolist() for _, row in held], vector)
            out.write_table(pa.table([names, vectors], schema=schema))
            held.clear()

        for row in rows:
            held.append(row)
            if len(held) == ROWS:
                write()
        if held:
            write()


_WRITERS: dict[str, Callable[[Path, Rows, int, int], None]] = {".npy": _npy, ".parquet": _parquet, ".jsonl": _jsonl}
