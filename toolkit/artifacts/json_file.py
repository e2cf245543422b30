"""Reading JSON that somebody else wrote: files go through ``read_json``, other text through ``parse_json``.

What comes back can be printed, put into messages and written again: all text in it has a UTF-8 form, and none of it is
nested deep enough to exhaust the stack of what walks it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

MAX_JSON_BYTES = 512 << 20
MAX_DEPTH = 200  # objects and lists inside one another
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises ToolkitError that names the file and the position of what is wrong."""
    try:
        if path.exists() and not path.is_file():
            raise ToolkitError(f"{path}: expected a JSON file, found something else of that name")
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ToolkitError(f"{path}: expected a JSON file of at most {MAX_JSON_BYTES} bytes, found {size}")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ToolkitError(f"{path}: no such file") from None
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_json(raw, str(path))


def parse_json(raw: bytes | str, what: str, *, unique: bool = False) -> Any:
    """Parse JSON; ``unique``: a name may occur once in an object. Raises ToolkitError that names ``what`` it is and the
    position of what is wrong."""
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw
        data = json.loads(text, object_pairs_hook=_unique if unique else None)
        if _HALF_PAIR.search(text):
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ToolkitError(
            f"{what}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from error
    except UnicodeEncodeError as error:
        raise ToolkitError(f"{what}: not valid JSON: half a surrogate pair; restore the file") from error
    except json.JSONDecodeError as error:
        raise ToolkitError(
            f"{what}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; restore the file"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of absurd length
        raise ToolkitError(f"{what}: not valid JSON: {str(error).splitlines()[0]}") from error
    _check_depth(data, what)
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check_depth(data: Any, what: str) -> None:
    level = [data] if type(data) in (dict, list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)  # the parser makes no others
        ]
        if not level:
            return
    raise ToolkitError(f"{what}: expected JSON of at most {MAX_DEPTH} levels, found more")


def read_json_object(path: Path) -> dict[str, Any]:
    """Like ``read_json``, but the top level must be an object."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ToolkitError(f"{path}: expected a JSON object, found {_kind(data)}")
    return data


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def finite(data: Any) -> Any:
    """``data`` with None for each NaN and infinity: JSON has no such numbers, and others refuse what Python writes."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write_json_object(path: Path, data: dict[str, Any]) -> None:
    """Write indented UTF-8 JSON, as the ecosystem's config files are."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
