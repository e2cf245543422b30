"""A JSON schema as xgrammar can hold to it, and what of it no grammar holds to.

xgrammar steps over what it does not know: ``not``, a second part of ``allOf``, a property that is required and not
described. An answer would look as if it had been checked. So what can be said in other words is, and the rest is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.constraints.schema_choices import apart
from toolkit.engine.constraints.schema_names import others, share_none
from toolkit.engine.constraints.schema_patterns import fault
from toolkit.engine.constraints.schema_values import (
    Item,
    Lose,
    fit_arrays,
    fit_numbers,
    fit_texts,
    fit_values,
    kinds_of,
    well_formed,
)

_SCHEMAS = ("items", "additionalProperties", "propertyNames")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OF_TYPE = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("required", "minProperties", "maxProperties"),
    ),
}
_ALSO = {"number": "integer"}
_ALONE = ("$ref", "const", "enum")  # xgrammar reads these and nothing beside them,
_CHOICES = ("anyOf", "oneOf", "allOf")  # and these, too
_ASSERTS = {"type", *_ALONE, *_CHOICES, *(word for words in _OF_TYPE.values() for word in words)}
_NEVER = (
    *("not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_READ = {*_ASSERTS, "$defs", "definitions"}
_MARK = "apart"  # no word of a schema: makes xgrammar take two for two that differ in these names alone,
_UNSEEN = (
    *("title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
)  # which it leaves out wherever they stand when it compares what it has seen
_PLAIN: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass
class _Document:
    """``places``: where in what was made there are schemas. ``references``: and what refers to them."""

    root: Any
    lost: list[str] = field(default_factory=list)
    places: set[tuple[str, ...]] = field(default_factory=set)
    references: list[tuple[str, str]] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)  # schemas with a name of their own


def fitted(schema: Any) -> tuple[Any, list[str]]:
    """The schema in words that xgrammar holds to, and which of its own it does not, each with its place: "'not' at
    properties.a". What is left out of those is as little as can be."""
    document = _Document(schema)
    if not isinstance(schema, dict | bool):
        document.lost.append("what is no schema, but neither an object nor true")
        return schema, document.lost
    made = _fitted(schema, (), document)
    if document.references:
        document.lost += [f"'$id'{at} beside references" for at in document.renamed]
    for at, target in document.references:
        if target != "#" and tuple(target[2:].split("/")) not in document.places:
            document.lost.append(f"'$ref'{at} to {target:.100}, which is no schema of this one")
    return made, document.lost


def _fitted(schema: Any, path: tuple[str, ...], document: _Document) -> Any:
    document.places.add(path)
    if not isinstance(schema, dict):
        return schema
    at = f" at {'.'.join(path)}" if path else ""

    def lose(word: str, why: str = "") -> None:
        document.lost.append(f"{word!r}{at}{why}")

    item = _without_never(well_formed(schema, lose), lose)
    if path and isinstance(schema.get("$id"), str):
        document.renamed.append(at)
    item = {word: value for word, value in item.items() if word in _READ}
    item = _typed(fit_values(_one_statement(item, document.root, lose), lose))
    for fit in (fit_texts, fit_numbers, fit_arrays, _fit_objects):
        item = fit(item, lose)
    if "$ref" in item:
        _refer(item, at, document, lose)
    item |= {word: item[word].copy() for word in (*_LISTS, *_NAMED) if word in item}
    for word, place, part in list(_parts(item)):
        if place is None:
            item[word] = _fitted(part, (*path, word), document)
        else:
            item[word][place] = _fitted(part, (*path, word, str(place)), document)
    return _marked(_with_names(item, lose))


def _without_never(item: Item, lose: Lose) -> Item:
    """Without what no grammar holds to; what says nothing goes in silence."""
    for word in [word for word in item if word in _NEVER]:
        if not (item[word] is False and word in ("not", "uniqueItems")):
            lose(word)
    return {word: value for word, value in item.items() if word not in _NEVER}


def _parts(item: Item) -> Iterator[tuple[str, Any, Any]]:
    """Word, its place behind that word (None: right there), and schema of each schema in this one."""
    for word in list(item):
        value = item[word]
        if word in _SCHEMAS:
            yield word, None, value
        elif word in _LISTS:
            yield from ((word, i, part) for i, part in enumerate(value))
        elif word in _NAMED:
            yield from ((word, name, part) for name, part in value.items())


def _one_statement(item: Item, root: Any, lose: Lose) -> Item:
    """Without what stands beside a word that is read alone. A value's type may: it chooses among the values."""
    if "anyOf" in item and any(part is not False for part in item["anyOf"]):
        item = item | {"anyOf": [part for part in item["anyOf"] if part is not False]}
    if "oneOf" in item and apart(item["oneOf"], root):
        if "anyOf" not in item:
            item = {"anyOf" if word == "oneOf" else word: value for word, value in item.items()}
    elif "oneOf" in item:
        lose("oneOf", ", of which two parts may be true at once; give each a required property with a const of its own")
    said = [word for word in (*_ALONE, *_CHOICES) if word in item]
    if not said:
        return item
    first = said[0]
    others = [word for word in item if word in _ASSERTS and word != first]
    if first in ("const", "enum") and "type" in item:
        values = item["enum"] if first == "enum" else [item["const"]]
        types = item["type"] if isinstance(item["type"], list) else [item["type"]]
        if good := [v for v in values if any(_is(v, t) for t in types)]:
            item = {word: value for word, value in item.items() if word != "type"}
            item |= {"enum": good} if first == "enum" else {}
            others.remove("type")
    if "allOf" in item and first == "allOf" and len(item["allOf"]) > 1:
        lose("allOf", " of several parts")
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


def _typed(item: Item) -> Item:
    """With the type of which its words speak, as without one xgrammar does not read them; without words of others."""
    if any(word in item for word in (*_ALONE, *_CHOICES)):
        return item
    if "type" in item:
        kinds = kinds_of(item)
    else:
        kinds = [kind for kind, words in _OF_TYPE.items() if any(word in item for word in words)]
        if item.get("multipleOf", 0.5) % 1 == 0:
            kinds[0] = "integer"
    if not kinds:
        return item
    of_others = {word for kind, words in _OF_TYPE.items() for word in words if not {kind, _ALSO.get(kind)} & set(kinds)}
    item = {word: value for word, value in item.items() if word not in of_others}
    return item | {"type": kinds[0] if len(kinds) == 1 else kinds}


def _refer(item: Item, at: str, document: _Document, lose: Lose) -> None:
    target = item["$ref"]
    if target == "#" or (target.startswith("#/") and not set("~%") & set(target)):
        document.references.append((at, target))
    else:
        lose("$ref", " to another document" if not target.startswith("#") else f" to {target:.100}, an anchor")
        del item["$ref"]


def _fit_objects(item: Item, lose: Lose) -> Item:
    """With a property for each name that is required alone, and only one word on what other properties may be."""
    if "object" not in kinds_of(item):
        return item
    item = dict(item)
    if "unevaluatedProperties" in item:
        more = item.pop("unevaluatedProperties")
        item.setdefault("additionalProperties", more)
    if item.get("propertyNames") in (True, {}):
        del item["propertyNames"]
    if item.get("propertyNames") is False:
        lose("propertyNames", ", which allows none")
        del item["propertyNames"]
    for word in ("patternProperties", "propertyNames"):
        if word in item and item.get("properties"):
            lose(word, " beside 'properties'")
            del item[word]
    if not item.get("patternProperties", True):
        del item["patternProperties"]
    patterns = item.get("patternProperties", {})
    if why := next(filter(None, map(fault, patterns)), None):
        lose("patternProperties", why)
    if patterns and "propertyNames" in item:
        lose("propertyNames", " beside 'patternProperties'")
        del item["propertyNames"]
    schemas = [json.dumps(part, sort_keys=True) for part in patterns.values()]
    if len(set(schemas)) > 1 and not share_none(list(patterns)):
        lose("patternProperties", ", of which two may fit one name")
    if False in patterns.values():
        if item.get("additionalProperties", False) is not False:
            lose("patternProperties", " that forbid names beside 'additionalProperties'")
        item["patternProperties"] = {name: part for name, part in patterns.items() if part is not False}
        if not item["patternProperties"]:
            del item["patternProperties"]
    if "propertyNames" in item and item.get("additionalProperties", True) not in (True, {}):
        lose("additionalProperties", " beside 'propertyNames'")
        del item["additionalProperties"]
    item = _with_required(item, lose)
    free = patterns or "propertyNames" in item or item.get("additionalProperties", False) is not False
    if free and item.get("minProperties", 0) > max(1, len(set(item.get("required", ())))):
        lose("minProperties", " of properties that are not all named: one may come twice")
        del item["minProperties"]
    return item


def _with_required(item: Item, lose: Lose) -> Item:
    """With a property for each name that is required alone."""
    required, known = item.get("required", []), item.get("properties", {})
    new = [name for name in dict.fromkeys(required) if name not in known]
    if not new:
        return item
    more = item.get("additionalProperties", True)
    if more is False or "patternProperties" in item or "propertyNames" in item:
        lose("required", f", whose {new[0]!r} is not among the properties")
        return {**item, "required": [name for name in required if name not in new]}
    return item | {"properties": {**known, **dict.fromkeys(new, {} if more is True else more)}}


def _with_names(item: Item, lose: Lose) -> Item:
    """Other properties by a pattern without the names of those that are described: one of these would else come as
    another once more, and count. Names have to be texts."""
    names = item.get("propertyNames")
    if names is not None:
        values = names.get("enum", [names["const"]] if "const" in names else None)
        texts = None if values is None else [value for value in values if isinstance(value, str)]
        if texts:
            item["propertyNames"] = {"enum": texts}
        elif names.get("type") != "string":
            lose("propertyNames", ", by which a name may be no text")
            del item["propertyNames"]
    known = item.get("properties", {})
    if not known or "object" not in kinds_of(item):
        return item
    required, more = item.get("required", ()), item.get("additionalProperties", False)
    item["properties"] = {name: part for name, part in known.items() if part is not False or name in required}
    if more is False:
        return item
    if (pattern := others(list(known))) is None:
        lose("additionalProperties", " beside so many properties")
        return item
    return item | {"patternProperties": {pattern: more}, "additionalProperties": False}


def _marked(item: Item) -> Item:
    """With a word that makes it another than all that differ from it in names which xgrammar does not compare."""
    held: list[Any] = [item[word] for word in ("const", "enum") if word in item]
    unseen = any(name in item.get(word, ()) for word in _NAMED for name in _UNSEEN)
    if not unseen and not (held and any(f'"{name}"' in json.dumps(held) for name in _UNSEEN)):
        return item
    return item | {_MARK: hashlib.sha256(json.dumps(item).encode()).hexdigest()[:16]}
