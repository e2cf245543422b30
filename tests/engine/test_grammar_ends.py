"""Formats whose texts may have no end, or one that is far: what they force is not asked for."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.engine.constraints.grammar_ends import end_is_near


def grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def regex(text: str) -> dict[str, Any]:
    return {"type": "regex_schema", "regex_schema": text}


def schema(root: Any, **definitions: Any) -> dict[str, Any]:
    found = root | {"$defs": definitions} if definitions else root
    return {"type": "json_schema", "json_schema": {"schema": found}}


def holds(name: str, inner: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: inner}, "required": list(required)}


N = {"$ref": "#/$defs/n"}
TOOL = {"begin": "<tool>", "content": {"type": "json_schema", "json_schema": holds("x", {"type": "string"}, "x")}}
NEAR = [
    {"type": "json_object"},
    {"type": "choice", "choice": ["yes", "no"]},
    grammar('root ::= "a" root "b" | "c"'),
    grammar('root ::= "a" root "b" | ""'),
    grammar('root ::= root "a" | "a"'),
    grammar('root ::= a\na ::= "x" | a a'),
    grammar('# a list\nroot ::= ("a" | "b" c)* item{2,5} "z"\nc ::= [0-9]+\nitem ::= "x"'),
    regex(r"[\w.]+@\w+\.com"),
    regex("(a*)*b"),
    regex("(ab|abc|true)*yes[0-9]{3}"),
    schema(True),
    schema({}),
    schema({"enum": ["да", "нет", 3, None]}),
    schema({"type": ["string", "null"], "pattern": "^a{3}$"}),
    schema({"type": "array", "items": {"type": "integer"}, "minItems": 2}),
    schema(N, n=holds("a", N)),
    schema(N, n=holds("all", {"type": "array", "items": N}, "all")),
    schema(N, n=holds("next", {"anyOf": [N, {"type": "null"}]}, "next")),
    {"type": "structural_tag", "structural_tag": {"format": {"type": "triggered_tags", "tags": [TOOL]}}},
]
FAR = [
    {"type": "choice", "choice": ["x" * 20_000, "y"]},
    grammar('root ::= "a" root'),
    grammar('root ::= "yes" | "x" loop\nloop ::= "a" loop'),
    grammar('root ::= "yes" | a\na ::= b\nb ::= "x" a'),
    grammar("root ::= nothing"),
    grammar("\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(20)) + '\nr20 ::= "a"\nroot ::= r0'),
    regex("((a{300}){300}){300}"),
    regex("(a{8000}){8000}?"),
    regex("x|y(a{8000}){80}"),
    schema({"const": "x" * 20_000}),
    schema({"type": "string", "pattern": "^(a{300}){300}$"}),
    schema(N, n=holds("a", N, "a")),
    schema(holds("a", {"$ref": "#"}, "a")),
    schema({"anyOf": [{"type": "null"}, N]}, n=holds("a", N, "a")),
    schema(holds("m", N), n={"type": "array", "items": N, "minItems": 1}),
]


@pytest.mark.parametrize("response_format", NEAR, ids=str)
def test_the_end_is_near(response_format: dict[str, Any]) -> None:
    assert end_is_near(response_format)


@pytest.mark.parametrize("response_format", FAR, ids=lambda f: str(f)[:80])
def test_it_is_not(response_format: dict[str, Any]) -> None:
    assert not end_is_near(response_format)
