"""Whether the end of a text is near, wherever it has come to by its format. xgrammar looks for what is forced as far as
that goes: of ``root ::= "a" root``, or of objects that each must hold another, for ever.

Told from the format alone, so that nothing has to be tried. What is not certain counts as far: then nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from toolkit.engine.constraints.grammar_cost import LOOKED_AT, lexemes_of, objects_in, schema_of, times_of

FAR = 1 << 11  # characters of the shortest way to an end; as often as a text is within itself
_ROUNDS = 16  # of what refers to one another, each a step further or more
_ANY = 4.0  # characters of a value of any kind
_AROUND = 6  # those of a property besides its name and its value
Lexemes = Iterable[tuple[str, str]]


def end_is_near(response_format: dict[str, Any]) -> bool:
    """Of a checked and fitted ``response_format``."""
    kind = response_format["type"]
    value: Any = response_format.get(kind)
    try:
        if kind == "json_schema":
            return _schema(schema_of(response_format)) <= FAR
        if kind == "structural_tag":
            return all(_node(node) <= FAR for node in objects_in(value))
        if kind in ("regex_schema", "grammar"):
            return _pattern(kind, value) <= FAR
    except _TooMuch:
        return False
    return kind == "json_object" or (kind == "choice" and max(map(len, value)) <= FAR)


class _TooMuch(Exception):
    """More than is looked at."""


def _node(node: dict[str, Any]) -> float:
    """Of a structural tag's own texts and schemas; nodes in it are asked by themselves."""
    farthest = float(max((len(text) for text in node.values() if isinstance(text, str)), default=0))
    match node.get("type"):
        case "json_schema" if "json_schema" in node:
            return max(farthest, _schema(node["json_schema"]))
        case "regex" if isinstance(pattern := node.get("pattern"), str):
            return _pattern("regex_schema", pattern)
        case "grammar" if isinstance(text := node.get("grammar"), str):
            return _pattern("grammar", text)
    return farthest


# -- regexes and grammars ---------------------------------------------------------------------------


def _pattern(kind: str, text: str) -> float:
    lexemes = list(islice(lexemes_of(kind, text), LOOKED_AT + 1))
    if len(lexemes) > LOOKED_AT:
        raise _TooMuch
    rules: dict[str, list[tuple[str, str]]] = {}
    own = rules.setdefault("", [])  # a regex is one rule
    for lexeme in lexemes:
        if lexeme[0] == "rule":
            own = rules.setdefault(lexeme[1].removesuffix("::=").strip(), [])
            own.append(("or", "|"))  # one that is written twice has both ways
        else:
            own.append(lexeme)
    if kind == "grammar":
        del rules[""]
    return _settled(rules, _row)


def _row(lexemes: Lexemes, known: dict[str, float]) -> tuple[float, float]:
    """The shortest text, and the longest of the shortest ways to go on, whichever was chosen. ``known``: of rules."""
    farthest = 0.0
    groups: list[list[float]] = [[math.inf, 0.0, 0.0]]  # best way so far, what this one has, and its last part

    def ended() -> None:
        nonlocal farthest
        group = groups[-1]
        group[1] += group[2]
        farthest = max(farthest, group[1])
        group[0], group[1], group[2] = min(group[0], group[1]), 0.0, 0.0

    def part(length: float) -> None:
        group = groups[-1]
        group[1], group[2] = group[1] + group[2], length

    for at, (kind, text) in enumerate(lexemes):
        if kind == "open":
            groups.append([math.inf, 0.0, 0.0])
        elif kind == "or":
            if at:  # what ``_pattern`` has put before a rule is no way of its own
                ended()
        elif kind == "close" and len(groups) > 1:
            ended()
            part(groups.pop()[0])
        elif kind == "times":
            farthest = max(farthest, groups[-1][1] + groups[-1][2])  # once it is begun
            least = times_of(text)[0]
            groups[-1][2] = groups[-1][2] * least if least else 0.0
        elif kind == "name":
            part(known.get(text, math.inf))
        else:
            part(len(text) - 2.0 if kind == "text" else 1.0)
    ended()
    return (groups[0][0], farthest) if len(groups) == 1 else (math.inf, math.inf)


def _settled(wanted: dict[str, Any], look: Callable[[Any, dict[str, float]], tuple[float, float]]) -> float:
    """The farthest end in any of ``wanted``, which refer to one another by their names. ``look``: at one, given the
    shortest texts that are known."""
    known = dict.fromkeys(wanted, math.inf)
    for _ in range(_ROUNDS):
        farthest, changed = 0.0, False
        for name in reversed(wanted):  # most refer to what comes later
            least, end = look(wanted[name], known)
            changed |= least != known[name]
            known[name], farthest = least, max(farthest, end)
        if not changed:
            return farthest
    raise _TooMuch


# -- schemas ----------------------------------------------------------------------------------------


def _schema(root: Any) -> float:
    targets = dict.fromkeys(ref for item in objects_in(root) if isinstance(ref := item.get("$ref"), str))
    looks = iter(range(LOOKED_AT))  # parts of all of them, in all rounds
    named = {"#": root, **{target: _at(root, target) for target in targets}}
    return _settled(named, lambda part, known: _Part(known, looks).seen(part))


def _at(root: Any, target: str) -> Any:
    """What a reference leads to; False where that is nothing."""
    part = root
    for step in target.removeprefix("#").split("/")[1:]:
        if isinstance(part, list) and step.isdecimal() and len(step) < 6:
            part = part[int(step)] if int(step) < len(part) else False
        else:
            part = part.get(step, False) if isinstance(part, dict) else False
    return part


class _Part:
    """``farthest``: from any place in what was looked at to its end."""

    def __init__(self, known: dict[str, float], looks: Iterator[int]) -> None:
        self._known, self._looks = known, looks
        self.farthest = 0.0

    def seen(self, schema: Any) -> tuple[float, float]:
        least = self.of(schema)
        return least, max(self.farthest, least)

    def of(self, schema: Any) -> float:
        """Characters of the shortest value."""
        if next(self._looks, None) is None:
            raise _TooMuch
        if not isinstance(schema, dict):
            return _ANY if schema is True else math.inf
        if "$ref" in schema:
            return self._known.get(schema["$ref"], math.inf)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._any(len(json.dumps(value)) for value in values)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._any(map(self.of, schema[word]))
        kinds = schema.get("type", [])
        ways = {"object": self._object, "array": self._array, "string": self._string}
        found = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
        return self._any(ways[kind](schema) if kind in ways else _ANY for kind in found) if found else _ANY

    def _any(self, ways: Iterable[float]) -> float:
        """Of several, of which one is chosen."""
        lengths = [*ways] or [math.inf]
        self._may(max(lengths))
        return min(lengths)

    def _may(self, length: float) -> None:
        """What may be begun, and has to be ended then."""
        self.farthest = max(self.farthest, length)

    def _object(self, schema: dict[str, Any]) -> float:
        least, required = 2.0, set(schema.get("required", ()))
        for name, part in schema.get("properties", {}).items():
            length = len(json.dumps(name)) + _AROUND + self.of(part)
            if name in required:
                least += length
            else:
                self._may(length)
        for part in (*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", False)):
            if part is not False:
                self._may(_AROUND + self.of(part))
        return least + (_AROUND + _ANY) * max(0, schema.get("minProperties", 0) - len(required))

    def _array(self, schema: dict[str, Any]) -> float:
        least, fewest, first = 2.0, schema.get("minItems", 0), schema.get("prefixItems", [])
        for i, part in enumerate(first):
            if i < fewest:
                least += 2 + self.of(part)
            else:
                self._may(2 + self.of(part))
        more, left = schema.get("items", True), max(0, fewest - len(first))
        length = 2 + self.of(more) if more is not False else 0.0
        self._may(length)
        return least + (left * length if left else 0.0)

    def _string(self, schema: dict[str, Any]) -> float:
        if "pattern" not in schema:
            return 2.0  # its letters are free
        return 2.0 + _pattern("regex_schema", schema["pattern"])
