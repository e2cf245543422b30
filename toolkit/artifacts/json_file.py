"""Reading JSON that somebody else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError

MAX_JSON_BYTES = 512 << 20


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises ToolkitError that names the file and the position of what is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ToolkitError(f"{path}: expected a JSON file of at most {MAX_JSON_BYTES} bytes, found {size}")
        text = path.read_bytes().decode("utf-8-sig")
        return json.loads(text)
    except FileNotFoundError:
        raise ToolkitError(f"{path}: no such file") from None
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ToolkitError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise ToolkitError(
            f"{path}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; restore the file"
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of absurd length
        raise ToolkitError(f"{path}: not valid JSON: {str(error).splitlines()[0]}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Like ``read_json``, but the top level must be an object."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ToolkitError(f"{path}: expected a JSON object, found {_kind(data)}")
    return data


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def write_json_object(path: Path, data: dict[str, Any]) -> None:
    """Write indented UTF-8 JSON, as the ecosystem's config files are."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
