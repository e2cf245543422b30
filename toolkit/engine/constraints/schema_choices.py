"""``oneOf`` of parts of which no value fits two says the same as ``anyOf``, which xgrammar holds to."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.constraints.schema_values import Item, kinds_of, value_key, well_formed

Keys = frozenset[Any]
_DEPTH = 4  # references to references that are followed
_PARTS, _VALUES = 64, 1024  # more are not compared: the server waits meanwhile


def apart(parts: list[Any], root: Any) -> bool:
    """Whether it is certain that no value fits two of ``parts``, schemas in the document ``root``."""
    if len(parts) > _PARTS:
        return False
    found = [_Part.of(_sound(_resolved(part, root)), root) for part in parts]
    return all(_apart(one, other) for one, other in combinations(found, 2))


@dataclass(frozen=True)
class _Part:
    """``keys``: of its values, None where they are not few. ``kinds``: their types, none where that is not known.
    ``told``: the keys of the values of each property that it requires and names the values of."""

    schema: Any
    keys: Keys | None
    kinds: frozenset[str]
    told: dict[str, Keys]

    @staticmethod
    def of(schema: Any, root: Any) -> _Part:
        values = _values(schema)
        kinds = frozenset(_kinds(schema, values)) if isinstance(schema, dict) else frozenset[str]()
        told = {}
        if kinds == {"object"} and values is None:
            known = schema.get("properties", {})
            for name in {name for name in schema.get("required", []) if name in known}:
                if (some := _values(_resolved(known[name], root))) is not None:
                    told[name] = _keys(some)
        return _Part(schema, None if values is None else _keys(values), kinds, told)


def _apart(one: _Part, other: _Part) -> bool:
    if one.schema is False or other.schema is False:
        return True
    if one.keys is not None and other.keys is not None:
        return one.keys.isdisjoint(other.keys)
    if one.kinds and other.kinds and not one.kinds & other.kinds:
        return True
    return any(one.told[name].isdisjoint(other.told[name]) for name in one.told.keys() & other.told.keys())


def _sound(part: Any) -> Any:
    """Without words that say nothing; whoever reads the part itself tells of them."""
    return well_formed(part, lambda *told: None) if isinstance(part, dict) else part


def _resolved(part: Any, root: Any) -> Any:
    for _ in range(_DEPTH):
        if not isinstance(part, dict) or not str(part.get("$ref", "")).startswith("#/"):
            break
        target = root
        for name in part["$ref"][2:].split("/"):
            target = target.get(name) if isinstance(target, dict) else None
        part = target
    return part


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
    values = item.get("enum")
    return values if isinstance(values, list) and len(values) <= _VALUES else None


def _keys(values: list[Any]) -> Keys:
    return frozenset(value_key(value) for value in values)
