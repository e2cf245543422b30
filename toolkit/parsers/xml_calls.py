"""Reads calls whose arguments stand between tags, as plain text whose type is the schema's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.parsers.formats import Call, Functions
from toolkit.parsers.json_calls import arguments_of, as_arguments, known

_TYPES = {
    "integer": (int,),
    "int": (int,),
    "number": (int, float),
    "float": (int, float),
    "boolean": (bool,),
    "bool": (bool,),
    "object": (dict,),
    "dict": (dict,),
    "array": (list,),
    "list": (list,),
    "null": (type(None),),
    "string": (str,),
    "str": (str,),
}
_LITERALS = {"true": True, "false": False, "none": None}  # as Python writes them


@dataclass(frozen=True)
class Tags:
    """``call``: groups ``name`` and ``body``; ``parameter``: ``key``, ``value`` and, where it is told, ``string`` (true
    or false). One line end on either side of a value is none of it."""

    call: re.Pattern[str]
    parameter: re.Pattern[str]

    def read(self, text: str, functions: Functions) -> list[Call]:
        """The calls that ``text`` consists of; none where there is anything else between them."""
        found: list[Call] = []
        for match in self.call.finditer(text):
            name, values = match["name"].strip(), self._values(match["body"])
            if values is None or not known(name, functions):
                return []
            schema = (functions or {}).get(name, {})
            arguments = as_arguments({key: _typed(value, told, schema, key) for key, (value, told) in values.items()})
            if arguments is None:
                return []
            found.append(Call(name, arguments))
        return [] if self.call.sub("", text).strip() else found

    def _values(self, body: str) -> dict[str, tuple[str, str | None]] | None:
        if (whole := body.strip()).startswith("{"):  # some models write JSON after all
            return None if arguments_of(whole) is None else {k: (v, None) for k, v in _texts(whole).items()}
        if self.parameter.sub("", body).strip():
            return None
        return {
            match["key"].strip(): (
                match["value"].removeprefix("\n").removesuffix("\n"),
                match.groupdict().get("string"),
            )
            for match in self.parameter.finditer(body)
        }


def _texts(whole: str) -> dict[str, str]:
    return {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in json.loads(whole).items()}


def _typed(text: str, told: str | None, schema: Mapping[str, Any], key: str) -> Any:
    """``text`` as the value that its parameter's type asks for; itself where it is no such value."""
    if told == "true":
        return text
    properties = schema.get("properties")
    wanted = _types(properties.get(key)) if isinstance(properties, Mapping) else set()
    if wanted == {str}:
        return text
    word = text.strip()
    try:
        value = json.loads(word, parse_constant=str)
    except (ValueError, RecursionError):
        value = _LITERALS.get(word.lower(), text)
    if isinstance(value, float) and value.is_integer() and int in wanted and float not in wanted:
        value = int(value)
    if wanted and type(value) not in wanted:
        return text
    return text if isinstance(value, str) else value


def _types(schema: Any) -> set[type]:
    """Python's types for the values that a schema names; empty: it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    found: set[type] = set()
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        found.update(_TYPES.get(kind, ()) if isinstance(kind, str) else ())
    for name in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(name) or () if isinstance(schema.get(name), list) else ():
            found |= _types(each)
    if not found and isinstance(schema.get("enum"), list):
        found = {type(value) for value in schema["enum"]}
    return found
