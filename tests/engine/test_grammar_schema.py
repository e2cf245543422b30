"""What a grammar holds to of a JSON schema is what the schema says; the rest is told of by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_grammar import Letters, follow
from toolkit.engine.constraints.grammar import Grammars
from toolkit.engine.constraints.grammar_format import fitted_format
from toolkit.engine.constraints.grammar_schema import fitted
from toolkit.errors import UsageError

INT, STR, OBJ = {"type": "integer"}, {"type": "string"}, {"type": "object"}
TWO = {**OBJ, "properties": {"a": INT, "b": STR}}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(Letters(), 300)  # type: ignore[arg-type]


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **more}}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({**TWO, "required": ["c"]}, [{"c": 1}, {"a": 1, "c": None}], [{"a": 1}, {}]),  # xgrammar leaves c out
        ({**OBJ, "required": ["c"]}, [{"c": 1}], [{}]),
        ({**OBJ, "required": ["c"], "additionalProperties": INT}, [{"c": 1}], [{}, {"c": "x"}]),
        ({"minimum": 2}, [2, 7], [1, "x"]),  # and these without a type
        ({"multipleOf": 5}, [5, 10], [7, "x"]),
        ({"pattern": "^a+$"}, ["a"], ["b", 1]),
        ({"maxLength": 1}, ["a"], ["aa", 1]),
        ({"required": ["a"]}, [{"a": 1}], [{}]),
        ({"anyOf": [INT, {"minimum": 5}]}, [1, 5.5], [1.5]),
        ({**STR, "enum": [1, "a", True]}, ["a"], [1, True]),
        ({"type": ["integer", "null"], "enum": [1, None, "a", True, 1.5]}, [1, None], ["a", True, 1.5]),
        ({**INT, "const": 1}, [1], [2]),
        ({"allOf": [INT], "description": "x"}, [1], ["x"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"minimum": 2}}, "description": "x"}, [2], [1]),
        ({**OBJ, "properties": {"not": INT, "if": STR}, "required": ["not"]}, [{"not": 1}], [{"not": "x"}]),
        ({"const": {"not": 1}}, None, [{"not": 2}]),
        ({"oneOf": [INT, STR]}, [1, "a"], [None]),
        ({"oneOf": [{**INT, "minimum": 2}, {**STR, "maxLength": 1}]}, [2, "a"], [1, "aa"]),
        ({**TWO, "additionalProperties": STR}, [{"a": 1, "c": "x"}, {"aa": "x"}], [{"a": "x"}, {"c": 1}]),
        ({**OBJ, "properties": {"a": False, "b": INT}, "additionalProperties": True}, [{"b": 1, "c": 1}], [{"a": 1}]),
        ({**STR, "format": "date"}, ["2024-02-29", "2026-12-31"], ["2023-02-29", "2026-11-31"]),
        ({**INT, "minimum": 1.5, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
        ({"type": "array", "prefixItems": [True, INT, False]}, [["x", 1]], [["x", "y"], ["x", 1, 1]]),
        ({**OBJ, "patternProperties": {"^a_": INT, "^b_": STR}}, [{"a_": 1, "b_": "x"}, {}], [{"a_": "x"}]),
    ],
)
def test_what_a_schema_says_is_held_to(grammars: Grammars, schema: Any, yes: list[Any] | None, no: list[Any]) -> None:
    for value in yes or ():
        assert follow(grammars, named(schema), json.dumps(value).encode()), value
    for value in no:
        assert not follow(grammars, named(schema), json.dumps(value).encode()), value


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"not": STR}, "'not'"),
        ({**OBJ, "properties": {"a": {"items": {"not": {}}}}}, "'not' at properties.a.items"),
        ({"if": INT, "then": {"minimum": 5}}, "'if'"),
        ({"type": "array", "items": INT, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": INT}, "'contains'"),
        ({**TWO, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "'type' beside 'anyOf'"),
        ({"anyOf": [INT, STR], "minimum": 5}, "'minimum' beside 'anyOf'"),
        ({"allOf": [TWO, {"required": ["a"]}]}, "'allOf' of several parts"),
        ({"$ref": "#/$defs/n", "$defs": {"n": INT}, "minimum": 5}, "'minimum' beside '$ref'"),
        ({"$ref": "http://example.com/schema"}, "'$ref' to another document"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf' of numbers that are no integers"),
        ({"multipleOf": 0.5}, "'multipleOf' of numbers that are no integers"),
        ({**STR, "pattern": "^a+$", "minLength": 2}, "'pattern' beside a length"),
        ({**STR, "pattern": r"\Aa+\Z"}, r"'pattern' with \A, which means nothing in ECMA-262"),
        ({**TWO, "patternProperties": {"^x": INT}}, "'patternProperties' beside 'properties'"),
        ({**TWO, "additionalProperties": False, "required": ["c"]}, "'required', whose c is not among"),
        ({**STR, "const": 1}, "'type' beside 'const'"),
        ({**INT, "const": float("inf")}, "'type' beside 'const'"),
        ({**INT, "enum": [float("nan")]}, "'type' beside 'enum'"),
        ({"enum": [1, 2], "minimum": 2}, "'minimum' beside 'enum'"),
        ({"anyOf": [STR, {"type": []}]}, "'type' at anyOf.1, which is not one or some of null"),
        ({"oneOf": [STR, {"type": [{}]}]}, "'oneOf', of which two parts may be true"),
        ({"oneOf": [STR, {**OBJ, "required": 5}]}, "'required' at anyOf.1, which is not a list of names"),
    ],
)
def test_what_cannot_be_held_to_is_named(schema: Any, told: str) -> None:
    with pytest.raises(UsageError) as error:
        fitted_format(named(schema))
    said = str(error.value)
    assert said.startswith("response_format: the json_schema has ") and "\n" not in said
    assert told.replace("whose c", "whose 'c'") in said
    for bare in (schema, named(schema, strict=True)["json_schema"]):
        with pytest.raises(UsageError):
            fitted_format({"type": "json_schema", "json_schema": bare})
    fitted_format(named(schema, strict=False))


def test_no_name_comes_by_its_escapes_as_another(grammars: Grammars) -> None:
    open_ = named({**TWO, "additionalProperties": True})
    assert follow(grammars, open_, b'{"c": "x"}') and not follow(grammars, open_, b'{"\\u0061": "x"}')


def test_without_strict_as_much_is_held_to_as_can_be(grammars: Grammars) -> None:
    either = {**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "not": {"required": ["c"]}}
    asked = named({"type": "array", "items": either, "uniqueItems": True}, strict=False)
    assert follow(grammars, asked, b'[{"a": 1}, {"a": 1}]') and not follow(grammars, asked, b'[{"a": "x"}]')
    assert not follow(grammars, asked, b'["x"]')  # what xgrammar makes of the schema as it is


def test_arguments_of_calls_are_held_to_as_far_as_can_be(grammars: Grammars) -> None:
    schema = {**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "required": ["c"]}
    node = {"type": "json_schema", "json_schema": schema}
    row = {"type": "sequence", "elements": [{"type": "const_string", "value": "f"}, node]}
    asked = {"type": "structural_tag", "structural_tag": {"type": "structural_tag", "format": row}}
    assert follow(grammars, asked, b'f{"a": 1, "c": 2}')
    for wrong in (b"f1", b'f{"a": 1}', b'f{"a": "x", "c": 2}'):
        assert not follow(grammars, asked, wrong)


WORDS = st.sampled_from(
    "type properties required items anyOf oneOf allOf enum const $ref not pattern minLength multipleOf "
    "patternProperties additionalProperties prefixItems uniqueItems $defs x".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),  # a body's 1e999 is infinite
    lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_looked_at_without_harm(schema: Any) -> None:
    """It is never changed; what was lost is lost once; a schema that fits fits again, as it is."""
    before = json.dumps(schema)
    made, lost = fitted(schema)
    assert json.dumps(schema) == before and all(isinstance(text, str) for text in lost)
    if not lost:
        again, lost = fitted(made)
        assert json.dumps(again) == json.dumps(made) and not lost


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"minItems": 2}}}, "at #/properties/a: expected 'items' or 'prefixItems'"),
        ({"properties": {"a/b~": {"minProperties": 1}}}, r"at #/properties/a~1b~0: expected 'properties' or"),
        ({"anyOf": [{"type": "null"}, {"items": {"minItems": 1}}]}, r"at #/anyOf/1/items: .*; found \{\"minItems\": 1"),
        (
            {"$defs": {"d": {"required": ["x", "y"], "maxProperties": 1}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
            r"at #/\$defs/d: expected maxProperties to be no less .*; say it in other words",
        ),
        (False, r"at #: expected a schema that some value fits; false fits none; found false"),
    ],
)  # fmt: skip
def test_a_schema_that_the_library_refuses_is_told_by_its_place(grammars: Grammars, schema: Any, told: str) -> None:
    with pytest.raises(UsageError, match="is not valid " + told):
        grammars.compiled(fitted_format(named(schema)))
