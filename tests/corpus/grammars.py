"""Response formats that crash, fill memory or take minutes where they are compiled or followed without limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Format = dict[str, Any]


def schema(value: Any) -> Format:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def regex(text: str) -> Format:
    return {"type": "regex_schema", "regex_schema": text}


def grammar(text: str) -> Format:
    return {"type": "grammar", "grammar": text}


def objects(depth: int) -> dict[str, Any]:
    """An object inside an object, so many times."""
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def properties(count: int) -> dict[str, dict[str, str]]:
    return {f"p{i}": {"type": "string"} for i in range(count)}


def too_large() -> Iterator[tuple[Format, str]]:
    """(what is refused before it is compiled, words of the refusal)."""
    nested = "(" * 60_000 + "a" + ")" * 60_000
    yield schema({"type": "string", "pattern": nested}), "a pattern of 120001 characters"
    yield schema({"type": "object", "patternProperties": {nested: {}}}), "a pattern of 120001 characters"
    yield schema({"anyOf": [{"items": {"pattern": "(" * 100 + ")" * 100}}]}), "more than 64 groups"
    yield regex("(" * 2000 + "a" + ")" * 2000), "more than 64 groups"
    yield regex("ab?" * 17_000), "a pattern of 51000 characters"
    yield schema({"type": "object", "properties": properties(3000)}), "more than 1000 properties"
    yield schema(objects(100)), "deeper than 128 levels"
    yield schema({"enum": ["v" * 1000] * 1000}), "longer than 262144 characters"
    yield {"type": "choice", "choice": ["x" * 400_000]}, "longer than 262144 characters"
    yield grammar("root ::= " + '"a" ' * 100_000), "longer than 262144 characters"


def too_slow() -> Iterator[Format]:
    """What compiles, and then takes longer for each token than for the one before."""
    yield regex("((a{1,300}){1,300}){1,300}")
    yield regex("(a{1,300}){1,300}")
    yield regex("(a*)*b")
    yield regex("((a*)*)*b")
    yield grammar('root ::= a\na ::= "x" | a a')
    yield grammar('root ::= a\na ::= "" | "x" a a a')
    yield regex("((a|aa)+)+b")


def heavy() -> Iterator[Format]:
    """What takes all memory or minutes to compile."""
    yield schema({"type": "object", "properties": properties(999)})
    yield schema({"type": "object", "properties": properties(999), "required": [*properties(999)]})
    yield schema({"anyOf": [{"type": "object", "properties": properties(40)} for _ in range(24)]})
    yield regex("(ab|cd)?" * 1000)
    yield regex("a{1,3}b?" * 1000)
    yield grammar("\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0')


def harmless() -> Iterator[Format]:
    """What people ask for."""
    yield {"type": "json_object"}
    yield schema({"type": "object", "properties": properties(5), "required": ["p0"]})
    yield schema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5})
    yield schema(objects(20))
    yield schema({"type": "string", "maxLength": 30})
    yield schema({"$defs": {"n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"})
    yield regex(r"[\w.]+@\w+\.com")
    yield regex(r"\d{4}-\d{2}-\d{2}")
    yield grammar('root ::= "a" root "b" | "c"')
    yield {"type": "choice", "choice": ["yes", "no", "maybe"]}
