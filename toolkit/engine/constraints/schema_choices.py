"""``oneOf`` of parts of which no value fits two says the same as ``anyOf``, which xgrammar holds to."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from toolkit.engine.constraints.schema_values import Item, kinds_of, same

_DEPTH = 4  # references to references that are followed


def apart(parts: list[Any], root: Any) -> bool:
    """Whether it is certain that no value fits two of ``parts``, schemas in the document ``root``."""
    found = [_resolved(part, root) for part in parts]
    return all(_apart(one, other, root) for one, other in combinations(found, 2))


def _resolved(part: Any, root: Any) -> Any:
    for _ in range(_DEPTH):
        if not isinstance(part, dict) or not str(part.get("$ref", "")).startswith("#/"):
            break
        target = root
        for name in part["$ref"][2:].split("/"):
            target = target.get(name) if isinstance(target, dict) else None
        part = target
    return part


def _apart(one: Any, other: Any, root: Any) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(same(a, b) for a in values for b in others)
    kinds = [set(_kinds(item, found)) for item, found in ((one, values), (other, others))]
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    return kinds == [{"object"}, {"object"}] and _told_apart(one, other, root)


def _kinds(item: Item, values: list[Any] | None) -> list[str]:
    """The types of an item's values; none where that is not known. Integers are numbers."""
    if values is None:
        named = kinds_of(item)
    else:
        of = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
        named = [of.get(type(value), "null") for value in values]
    return ["number" if kind == "integer" else kind for kind in named]


def _values(item: Any) -> list[Any] | None:
    if not isinstance(item, dict):
        return None
    if "const" in item:
        return [item["const"]]
    return item["enum"] if isinstance(item.get("enum"), list) else None


def _told_apart(one: Item, other: Item, root: Any) -> bool:
    """Whether both require a property whose values are others in each."""
    required = [item.get("required", []) for item in (one, other)]
    known = [item.get("properties", {}) for item in (one, other)]
    for name in set(required[0]) & set(required[1]) & known[0].keys() & known[1].keys():
        found = [_values(_resolved(properties[name], root)) for properties in known]
        if found[0] is not None and found[1] is not None and not any(same(a, b) for a in found[0] for b in found[1]):
            return True
    return False
