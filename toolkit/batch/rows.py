"""Rows of a table as requests, by a template of the prompt: CSV and Parquet as ``datasets`` reads them, JSON lines, and
dicts in memory."""

from __future__ import annotations

import csv
import glob
import json
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from toolkit.batch.options import Filling
from toolkit.configs.checks import shown
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.openai.batches.lines import (
    Asked,
    Bounds,
    JsonLines,
    Line,
    LineFault,
    Source,
    custom_id,
    read_object,
    read_request,
)
from toolkit.serve.openai.batches.urls import CHAT, TEXT

TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
NAME = "custom_id"


def open_source(given: Any, filling: Filling, bounds: Bounds) -> Source:
    """The lines of a file, or dicts in memory that can be gone through several times. Raises UsageError."""
    if isinstance(given, (str, Path)):
        path = Path(given)
        if not path.is_file():
            found = "not a file" if path.exists() else "no such file"
            wanted = "requests (.jsonl)" if filling.prompt is None else "rows (.jsonl, .csv, .parquet)"
            raise UsageError(f"{path}: {found}; expected a file of {wanted}")
        kind = TABLES.get(path.suffix.lower())
        if kind is not None and filling.prompt is None:
            raise UsageError(f'prompt: needed for {path}, such as "Translate: {{text}}" with the names of its columns')
        if kind is None:
            lines: Source = JsonLines(path, bounds)
            return lines if filling.prompt is None else Rows(lines, str(path), filling, bounds)
        table = Table(path, kind)
        return Rows(Packed(table, str(path)), str(path), filling, bounds, table.columns)
    if isinstance(given, Mapping) or not hasattr(given, "__len__") or not hasattr(given, "__iter__"):
        raise UsageError(f"source: expected a file, or a list or data set of dicts, found {shown(given)}")
    packed, columns = Packed(given, "source"), getattr(given, "column_names", None)
    return Requests(packed, bounds) if filling.prompt is None else Rows(packed, "source", filling, bounds, columns)


class Packed:
    """Dicts as lines of JSON."""

    def __init__(self, rows: Iterable[Any], name: str) -> None:
        self._rows = rows
        self.name = name

    def __iter__(self) -> Iterator[Line]:
        for number, row in enumerate(self._rows, 1):
            data = _packed(row)
            yield Line(number, data, len(data))


def _packed(row: Any) -> bytes:
    try:
        return orjson.dumps(row, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json.dumps(row, default=str).encode()


class Requests:
    """Dicts in OpenAI's form of a batch."""

    def __init__(self, rows: Packed, bounds: Bounds) -> None:
        self.name = rows.name
        self._rows = rows
        self._bounds = bounds

    def __iter__(self) -> Iterator[Line]:
        return iter(self._rows)

    def request(self, line: Line) -> Asked:
        """Raises LineFault."""
        return read_request(line, self._bounds)


class Rows:
    """A request of each row. Raises UsageError for a template that the ``columns``, where they are known, do not
    fill."""

    def __init__(
        self,
        lines: Iterable[Line],
        name: str,
        filling: Filling,
        bounds: Bounds,
        columns: Iterable[str] | None = None,
    ) -> None:
        assert filling.prompt is not None
        self.name = name
        self._lines = lines
        self._bounds = bounds
        self._endpoint = filling.endpoint
        self._column = filling.id_column
        known = None if columns is None else list(columns)
        self._prompt = template("prompt", filling.prompt, known)
        self._system = None if filling.system is None else template("system", filling.system, known)
        if known is not None and self._column not in (None, *known):
            raise UsageError(f"id_column: expected one of {', '.join(known)}, found {self._column!r:.60}")

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def request(self, line: Line) -> Asked:
        """Raises LineFault."""
        row = read_object(line, self._bounds)
        name = self._name(row, line.number)
        prompt = self._prompt(row, name)
        system = None if self._system is None else self._system(row, name)
        if self._endpoint == CHAT:
            messages = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return Asked(name, CHAT, {"messages": messages})
        if self._endpoint != TEXT:
            more = {} if system is None else {"instructions": system}
            return Asked(name, self._endpoint, {"input": prompt, **more})
        return Asked(name, self._endpoint, {"prompt": prompt})

    def _name(self, row: dict[str, Any], number: int) -> str:
        if self._column is None:
            found = row.get(NAME)
            return f"row-{number}" if found in (None, "") else custom_id(str(found))
        if (found := row.get(self._column)) in (None, ""):
            raise LineFault("missing_value", f"{self._column}: expected a name for the row, found none")
        return custom_id(str(found))


def template(option: str, text: str, columns: list[str] | None) -> Callable[[dict[str, Any], str], str]:
    """A function that fills ``text``, whose ``{column}`` stand for the row's values (``{{`` for a brace), and raises
    LineFault where the row, of the given name, lacks one. Raises UsageError."""
    pieces: list[tuple[str, str | None]] = []
    try:
        for before, field, form, turn in string.Formatter().parse(text):
            if form or turn:
                raise ValueError(f"{{{field}}} with a format")
            pieces.append((before, field))
    except ValueError as error:
        raise UsageError(f"{option}: expected names of columns in braces ({{{{ for a brace), found {error}") from error
    for _, field in pieces:
        if columns is not None and field not in (None, *columns):
            raise UsageError(f"{option}: {{{field}}} is no column; there are {', '.join(columns)}")

    def fill(row: dict[str, Any], name: str) -> str:
        made = []
        for before, field in pieces:
            made.append(before)
            if field is not None:
                if (value := row.get(field)) is None:
                    raise LineFault("missing_value", f"{field}: expected a value for the {option}, found none", name)
                made.append(value if isinstance(value, str) else _packed(value).decode())
        return "".join(made)

    return fill


class Table:
    """Rows of a CSV or Parquet file as dicts, a few thousand in memory at a time. Values of CSV are texts as they stand
    there. Raises UsageError where it cannot be read."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._ends_empty = False  # rows end with a separator, as the first line does not
        self.columns = self._header() if kind == "csv" else self._schema()

    @property
    def _tabs(self) -> bool:
        return self._path.suffix.lower() == ".tsv"

    def _header(self) -> list[str]:
        first: list[str] = []
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                lines = csv.reader(file, delimiter="\t" if self._tabs else ",")
                found = next(lines, [])
                with suppress(csv.Error):  # a value may be longer than it takes
                    first = next(filter(None, lines), [])
        except (OSError, ValueError, csv.Error) as error:
            raise self._unreadable(error) from error
        if not found or len(set(found)) < len(found) or not all(found):
            raise UsageError(f"{self._path}: expected a first line that names each column once, found {found!r:.80}")
        if any(first[len(found) :]):
            raise UsageError(f"{self._path}: its first line names {len(found)} columns, its first row has {len(first)}")
        self._ends_empty = len(first) > len(found)
        return found

    def _schema(self) -> list[str]:
        from pyarrow import ArrowException, parquet

        try:
            return list(parquet.read_schema(self._path).names)
        except (OSError, ArrowException) as error:
            raise self._unreadable(error) from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import datasets

        more: dict[str, Any] = {}
        if self._kind == "csv":
            texts = datasets.Features({name: datasets.Value("string") for name in self.columns})
            more = {"features": texts, "keep_default_na": False, "sep": "\t" if self._tabs else ","}
            if self._ends_empty:  # else pandas takes the first column for names of rows, and all values move
                more |= {"index_col": False, "usecols": self.columns}
        try:
            file = glob.escape(str(self._path))  # it is taken for a pattern
            yield from datasets.load_dataset(self._kind, data_files=file, split="train", streaming=True, **more)
        except (ToolkitError, GeneratorExit):
            raise
        except Exception as error:  # pandas', pyarrow's and its own have no common name
            raise self._unreadable(error) from error

    def _unreadable(self, error: BaseException) -> UsageError:
        why = " ".join(str(error.__cause__ or error).split())
        return UsageError(f"{self._path}: cannot be read as {self._kind} ({why:.200})")
