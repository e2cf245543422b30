"""A JSON schema as xgrammar can hold to it, and what of it no grammar holds to.

xgrammar steps over what it does not know: ``not``, a second part of ``allOf``, a property that is required and not
described. An answer would look as if it had been checked. So what can be said in other words is, and the rest is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Item = dict[str, Any]

_LENGTH = re.compile(r"\^\.\{(\d{1,6}),(\d{1,6})\}\$", re.ASCII)  # ^.{1,255}$
_SPANS = ("minLength", "maxLength")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OF_TYPE = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": (*_SPANS, "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    ),
}
_ALONE = ("$ref", "const", "enum")  # xgrammar reads these and nothing beside them,
_CHOICES = ("anyOf", "oneOf", "allOf")  # and these, too
_ASSERTS = {"type", *_ALONE, *_CHOICES, *(word for words in _OF_TYPE.values() for word in words)}
_NEVER = (
    *("not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_PLAIN: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def fitted(schema: Any) -> tuple[Any, list[str]]:
    """The schema in words that xgrammar holds to, and which of its own it does not, each with its place: "'not' at
    properties.a". What is left out of those is as little as can be."""
    lost: list[str] = []
    return _fitted(schema, "", lost), lost


def _fitted(schema: Any, at: str, lost: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    item = {word: value for word, value in schema.items() if word not in _NEVER or value is False}

    def lose(word: str, why: str = "") -> None:
        lost.append(f"{word!r}{f' at {at}' if at else ''}{why}")

    for word in schema.keys() - item.keys():
        lose(word)
    item = _typed(_as_length(_one_statement(item, lose)))
    _look(item, lose)
    item = _with_required(item, lose)
    for word, place, part in _parts(item):
        below = f"{at}.{word}" if at else word
        if place is None:
            item[word] = _fitted(part, below, lost)
        else:
            item[word] = item[word].copy()
            item[word][place] = _fitted(part, f"{below}.{place}", lost)
    return item


def _parts(item: Item) -> Iterator[tuple[str, Any, Any]]:
    """Word, its place behind that word (None: right there), and schema of each schema in this one."""
    for word in list(item):
        value = item[word]
        if word in _SCHEMAS:
            yield word, None, value
        elif word in _LISTS and isinstance(value, list):
            yield from ((word, i, part) for i, part in enumerate(value))
        elif word in _NAMED and isinstance(value, dict):
            yield from ((word, name, part) for name, part in value.items())


def _one_statement(item: Item, lose: Any) -> Item:
    """Without what stands beside a word that is read alone. A value's type may: it chooses among the values."""
    said = [word for word in (*_ALONE, *_CHOICES) if word in item]
    if not said:
        return item
    first = said[0]
    others = [word for word in item if word in _ASSERTS and word != first]
    if first in ("const", "enum") and "type" in item:
        values = item["enum"] if first == "enum" else [item["const"]]
        types = item["type"] if isinstance(item["type"], list) else [item["type"]]
        if isinstance(values, list) and (good := [v for v in values if any(_is(v, t) for t in types)]):
            item = {word: value for word, value in item.items() if word != "type"}
            item |= {"enum": good} if first == "enum" else {}
            others.remove("type")
    if not others:
        return item
    gone = others if first in _ALONE or not {"type", "properties"} & set(others) else said
    lose(others[0], f" beside {first!r}")
    return {word: value for word, value in item.items() if word not in gone}


def _is(value: Any, kind: Any) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and isinstance(value, (int, float)) and value % 1 == 0  # inf, nan: False
    if isinstance(value, bool):
        return bool(kind == "boolean")
    return isinstance(kind, str) and isinstance(value, _PLAIN.get(kind, ()))


def _as_length(item: Item) -> Item:
    """A pattern that says nothing but how long a text is as minLength and maxLength, of which the narrower hold:
    xgrammar cannot follow it beyond 128 letters."""
    pattern = item.get("pattern")
    if not (isinstance(pattern, str) and (found := _LENGTH.fullmatch(pattern))):
        return item
    if not all(type(item.get(name, 0)) is int for name in _SPANS):
        return item
    least, most = map(int, found.groups())
    spans = {"minLength": max(least, item.get("minLength", 0)), "maxLength": min(most, item.get("maxLength", most))}
    return {word: value for word, value in item.items() if word != "pattern"} | spans


def _typed(item: Item) -> Item:
    """With the type of which its words speak: without one xgrammar does not read them."""
    if "type" in item or any(word in item for word in (*_ALONE, *_CHOICES)):
        return item
    kinds = [kind for kind, words in _OF_TYPE.items() if any(word in item for word in words)]
    if type(item.get("multipleOf")) is int:
        kinds[0] = "integer"
    return item if not kinds else item | {"type": kinds[0] if len(kinds) == 1 else kinds}


def _look(item: Item, lose: Any) -> None:
    """Tell of what xgrammar steps over beside what it reads."""
    kinds = item.get("type")
    if kinds == []:
        lose("type", ", which names none")
    if not str(item.get("$ref", "#")).startswith("#"):
        lose("$ref", " to another document")
    if isinstance(parts := item.get("allOf"), list) and len(parts) > 1:
        lose("allOf", " of several parts")
    if "multipleOf" in item and "number" in (kinds if isinstance(kinds, list) else [kinds]):
        lose("multipleOf", " of numbers that are no integers")
    if "pattern" in item and any(word in item for word in _SPANS):
        lose("pattern", " beside a length")
    for word in ("patternProperties", "propertyNames"):
        if word in item and item.get("properties"):
            lose(word, " beside 'properties'")


def _with_required(item: Item, lose: Any) -> Item:
    """With a property for each name that is required alone."""
    required, known = item.get("required"), item.get("properties", {})
    if not (isinstance(required, list) and isinstance(known, dict)):
        return item
    new = [name for name in required if isinstance(name, str) and name not in known]
    if not new:
        return item
    others = item.get("additionalProperties", item.get("unevaluatedProperties", True))
    if others is False or "patternProperties" in item or "propertyNames" in item:
        lose("required", f", whose {new[0]!r} is not among the properties")
        return item
    return item | {"properties": {**known, **dict.fromkeys(new, {} if others is True else others)}}
