"""Reads calls that are JSON: an object with a name and arguments, a list of such, or several one after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from toolkit.parsers.formats import Call, Functions

_BETWEEN = re.compile(r"[ \t\r\n;,]*")
_OBJECT = re.compile(r'\{\s*"')
_JOINTS = ";,[] \t\r\n"  # between calls and around lists of them
_NAMES, _ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")


def read(text: str, functions: Functions) -> list[Call]:
    """The calls that ``text`` consists of, several joined by blanks, "," or ";"; none where it is anything else."""
    text = text.strip()
    found: list[Call] = []
    at = 0
    while at < len(text):
        try:
            data, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        for each in data if isinstance(data, list) else [data]:
            call = _call(each, functions)
            if call is None:
                return []
            found.append(call)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
    return found


def parts(text: str, functions: Functions) -> list[Call | str]:
    """``text`` as calls and what stands between them, for one that is no whole row of calls. An object that is none is
    text with all that it holds; so is everything from the first object on that is not whole."""
    found: list[Call | str] = []
    said = at = 0
    while begin := _OBJECT.search(text, at):
        try:
            data, at = _DECODER.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            break
        call = _call(data, functions)
        if call is not None:
            found += [_behind_joints(text[said : begin.start()]).rstrip(_JOINTS), call]
            said = at
    return [*found, _behind_joints(text[said:])] if found else []


def _behind_joints(text: str) -> str:
    words = text.lstrip(_JOINTS)
    before = text[: len(text) - len(words)]
    blank = before[len(before.rstrip()) :]
    return blank + words if blank == before or before.rstrip().endswith("]") else words


def arguments_of(text: str) -> str | None:
    """A JSON object as ``as_arguments`` spells it, None where ``text`` is none."""
    try:
        return as_arguments(_DECODER.decode(text.strip()))
    except (ValueError, RecursionError):
        return None


def object_at(text: str, at: int = 0) -> tuple[str | None, int]:
    """The JSON object that begins at ``at``, as ``as_arguments`` spells it, and where it ends."""
    try:
        value, at = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at
    return as_arguments(value), at


def text_at(text: str, at: int) -> tuple[str, int]:
    """The JSON string that begins at ``at``, and where it ends. Raises ValueError where there is none."""
    value, end = _DECODER.raw_decode(text, at)
    return str(value), end


def one_call(whole: re.Pattern[str]) -> Callable[[str, Functions], list[Call]]:
    """Reads a text that is one call: all of it matches ``whole``, whose groups are ``name``, ``arguments`` (JSON) and,
    where the model gives one, ``id``."""

    def read_one(text: str, functions: Functions) -> list[Call]:
        match = whole.fullmatch(text)
        arguments = arguments_of(match["arguments"]) if match else None
        if match is None or arguments is None or not known(name := match["name"].strip(), functions):
            return []
        return [Call(name, arguments, match.groupdict().get("id") or "")]

    return read_one


def as_arguments(value: Any) -> str | None:
    """An object as JSON text that any reader takes, None for what is none or has no such text."""
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # a set, bytes and the like, as calls in Python may have
        return None
    return text


def known(name: Any, functions: Functions) -> bool:
    """Whether there is a function of that name."""
    return isinstance(name, str) and bool(name) and (functions is None or name in functions)


def _call(data: Any, functions: Functions) -> Call | None:
    if isinstance(data, dict) and isinstance(data.get("function"), dict):
        data = data["function"]
    if not isinstance(data, dict):
        return None
    name = next((data[key] for key in _NAMES if key in data), None)
    if not known(name, functions):
        return None
    given: Any = next((data[key] for key in _ARGUMENTS if key in data), None)
    if given in (None, ""):
        given = {}
    arguments = arguments_of(given) if isinstance(given, str) else as_arguments(given)
    return None if arguments is None else Call(str(name), arguments)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
