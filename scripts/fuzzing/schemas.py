"""Schemas drawn at random, answers that a grammar made of them allows, and whether those are what the schema asks for:
either every word of a schema is held to, or the schema is refused by the name of a word.

A vocabulary of one token a byte has no text that a tokenizer would hide. Answers are checked by ``jsonschema``.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError, validators
from jsonschema.exceptions import SchemaError

from toolkit.engine.constraints.grammar import Grammars
from toolkit.engine.constraints.grammar_cost import check_cost
from toolkit.engine.constraints.grammar_format import check_format, fitted_format
from toolkit.errors import UsageError

EOS = 256
LONGEST = 400  # bytes of an answer; what is longer is not looked at
_ENDS = frozenset(b'"}],')
_WARNING = re.compile(r"support|ignoring|URI should|falling back", re.IGNORECASE)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    """By the standard's own language of patterns, in which \\W is all but ASCII's letters."""
    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


_VALIDATOR = validators.extend(Draft202012Validator, {"pattern": _pattern})


class Bytes:
    """A vocabulary: one token a byte, and an end."""

    special_ids = frozenset({EOS})
    eos_ids = (EOS,)
    token_bytes = [bytes([b]) for b in range(256)] + [b"</s>"]


@dataclass
class Tally:
    """``outcomes``: how many schemas ended how. ``faults``: a line for each answer, or warning, that must not be."""

    outcomes: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)  # by which a schema was refused
    answers: int = 0
    faults: list[str] = field(default_factory=list)


def grammars() -> Grammars:
    return Grammars(Bytes(), EOS + 1)  # type: ignore[arg-type]


def try_schema(made: Grammars, schema: Any, draw: Random, answers: int, tally: Tally) -> None:
    """Count one schema's outcome and its faults in ``tally``; ``answers`` are drawn of it."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        tally.outcomes["no schema"] += 1
        _refusal(schema)  # whatever it is, it is told of in a line
        return
    if (why := _refusal(schema)) is not None:
        tally.outcomes["refused by its name"] += 1
        tally.words[" ".join(re.findall(r"'[\w$]+'|beside", why)[:3])] += 1
        return
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    try:
        with _warnings() as said:
            compiled = made._compilers.compile(fitted_format(form))
    except RuntimeError as e:
        tally.outcomes["refused by the library"] += 1
        tally.words[" ".join(str(e).split(": ", 1)[-1].split())[:70]] += 1
        return
    if told := said():
        tally.faults.append(f"warns: {json.dumps(schema)}: {told[0]}")
    tally.outcomes["taken"] += 1
    validator = _VALIDATOR(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for _ in range(answers):
        text = answer(made, compiled, draw)
        if text is None:
            continue
        tally.answers += 1
        if (fault := _fault(validator, text)) is not None:
            tally.faults.append(f"not held: {json.dumps(schema)}: {text!r}: {fault}")
            return


def answer(made: Grammars, compiled: Any, draw: Random) -> bytes | None:
    """Bytes drawn from what is allowed next, at first any, then those that end soon; None for an answer without end."""
    from toolkit.engine.constraints.grammar import Compiled

    state = made.state(Compiled(compiled, True, 0), [])
    mask = np.zeros((1, -(-(EOS + 1) // 32)), np.int32)
    text, wild = b"", draw.choice((2, 8, 30, 80))
    while len(text) < LONGEST:
        state.fill(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: EOS + 1]).tolist()
        if not allowed:
            return None
        token = _draw(allowed, draw, len(text) < wild)
        meant = state.meant(token)
        if meant == EOS:
            return text
        text += bytes([meant])
        if state.accept(meant):
            return text
    return None


def _draw(allowed: list[int], draw: Random, wild: bool) -> int:
    if EOS in allowed and (not wild or draw.random() < 0.3):
        return EOS
    ends = [token for token in allowed if token in _ENDS]
    if not wild and ends:
        return draw.choice(ends) if draw.random() < 0.9 else draw.choice(allowed)
    plain = [token for token in allowed if chr(token) in 'abcx01259.-eE"\\}],{[']
    return draw.choice(plain) if plain and draw.random() < 0.8 else draw.choice(allowed)


def _fault(validator: Any, text: bytes) -> str | None:
    try:
        value = json.loads(text.decode())
    except UnicodeDecodeError:
        return None  # single bytes, as no tokenizer has them for letters: no text at all
    except ValueError as e:
        return f"no JSON: {e}"
    found = next(iter(validator.iter_errors(value)), None)
    return None if found is None else found.message[:200]


def _refusal(schema: Any) -> str | None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    try:
        check_format(form)
        check_cost(fitted_format(form))
    except UsageError as e:
        assert "\n" not in str(e), str(e)
        return str(e)
    return None


@contextmanager
def _warnings() -> Iterator[Callable[[], list[str]]]:
    """What xgrammar itself prints meanwhile of words that it steps over."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: told
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            told = [line for line in file.read().decode(errors="replace").splitlines() if _WARNING.search(line)]


def of_suite(folder: Path) -> list[Any]:
    """The schemas of the official JSON-Schema-Test-Suite."""
    files = sorted((folder / "tests" / "draft2020-12").rglob("*.json"))
    return [group["schema"] for file in files for group in json.loads(file.read_text(encoding="utf-8"))]


def drawn(draw: Random, depth: int = 3) -> Any:
    """A schema of some words, most of one type's."""
    if draw.random() < 0.02:
        return draw.random() < 0.8
    kinds = [_integer, _number, _string, _array, _object, _object, _values, _choices, _nothing]
    schema = draw.choice(kinds)(draw, depth)
    if draw.random() < 0.05:
        schema |= draw.choice(kinds)(draw, depth)
    if draw.random() < 0.1:
        schema[draw.choice(("title", "description", "default", "x-more"))] = draw.choice(("a", 1))
    if draw.random() < 0.04:
        schema |= {draw.choice(("not", "contains", "if", "propertyNames", "unevaluatedItems")): drawn(draw, depth - 1)}
    if depth == 3 and draw.random() < 0.25:
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}, "b": schema}, "required": ["a"]}
        schema["$defs"] = {"d": drawn(draw, 1), "e": drawn(draw, 1)}
    if draw.random() < 0.15 and "type" in schema:
        del schema["type"]
    return schema


_NAMES = ("a", "b", "ab", "title", "default", "x_1", 'q"', "ö", "b\\")


def _some(draw: Random, words: dict[str, Callable[[], Any]], chance: float = 0.35) -> dict[str, Any]:
    return {word: make() for word, make in words.items() if draw.random() < chance}


def _bounds(draw: Random, make: Callable[[], Any]) -> dict[str, Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return _some(draw, dict.fromkeys(names, make), 0.3)


def _integer(draw: Random, depth: int) -> dict[str, Any]:
    made = _bounds(draw, lambda: draw.choice((draw.randint(-20, 20), draw.randint(-3000, 3000), 2.0, 1.5, 10**12)))
    multiple = _some(draw, {"multipleOf": lambda: draw.choice((1, 2, 3, 5, 7, 10, 3.0, 0.5, 2000))}, 0.3)
    return {"type": "integer"} | made | multiple


def _number(draw: Random, depth: int) -> dict[str, Any]:
    values = (0, 1, -1, 0.5, -2.5, 10, 99.99, 1e-3, 1e-9, 0.1234567, -7.25, 1e10, 123456, -1e3, 3e15, 1e300)
    made = _bounds(draw, lambda: draw.choice((*values, round(draw.uniform(-50, 50), draw.randint(0, 4)))))
    return (
        {"type": draw.choice(("number", "number", ["number", "null"]))}
        | made
        | _some(draw, {"multipleOf": lambda: 2}, 0.05)
    )


_FORMATS = (
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer", "regex", "idn-email", "iri", "int32", "password"),
)
_PATTERNS = (
    *(
        "^a+$",
        "^[a-z]{1,3}$",
        "ab",
        "^x",
        "x$",
        r"^\d{2,4}$",
        "^(a|b)+c?$",
        r"^\w+$",
        "^[^x]*$",
        "^.$",
        r"^\S+$",
        "a|b",
    ),
    *(
        "^a|b$",
        r"^\s?$",
        r'^"+$',
        r"^\\$",
        "^(?:a)?$",
        "^(?=a)a$",
        r"\bA",
        r"^[\w.-]+@x$",
        "^a{2}$",
        "",
        "^ö$",
        "$^",
        "a^b",
    ),
)


def _string(draw: Random, depth: int) -> dict[str, Any]:
    words = {
        "minLength": lambda: draw.randint(0, 4),
        "maxLength": lambda: draw.randint(0, 6),
        "pattern": lambda: draw.choice(_PATTERNS),
        "format": lambda: draw.choice(_FORMATS),
    }
    return {"type": "string"} | _some(draw, words, 0.25)


def _array(draw: Random, depth: int) -> dict[str, Any]:
    def part() -> Any:
        return drawn(draw, depth - 1) if depth > 0 else draw.choice(({}, {"type": "integer"}, True, False))

    words: dict[str, Callable[[], Any]] = {
        "prefixItems": lambda: [part() for _ in range(draw.randint(1, 3))],
        "minItems": lambda: draw.randint(0, 3),
        "maxItems": lambda: draw.randint(0, 4),
        "uniqueItems": lambda: draw.random() < 0.3,
        "minContains": lambda: draw.randint(0, 2),
    }
    rare = {"items": part, "unevaluatedItems": part}
    return {"type": "array"} | _some(draw, words, 0.2) | _some(draw, {"items": part}, 0.7) | _some(draw, rare, 0.05)


def _object(draw: Random, depth: int) -> dict[str, Any]:
    def part() -> Any:
        return drawn(draw, depth - 1) if depth > 0 else draw.choice(({"type": "integer"}, {"type": "string"}, {}, True))

    def names() -> list[str]:
        return draw.sample(_NAMES, draw.randint(0, 3))

    def few() -> Any:
        return draw.choice(({"pattern": "^[ab]$"}, {"enum": ["a", 1]}, {"maxLength": 2}, {"const": "b"}, {}, True))

    words: dict[str, Callable[[], Any]] = {
        "required": names,
        "additionalProperties": lambda: draw.choice((True, False, part())),
        "patternProperties": lambda: {
            draw.choice(("^a", "^x_", "b", "^[ab]+$", "^.*$", "^\\w$")): part() for _ in "ab"
        },
        "unevaluatedProperties": lambda: draw.choice((True, False, part())),
        "minProperties": lambda: draw.randint(0, 3),
        "maxProperties": lambda: draw.randint(0, 4),
        "propertyNames": few,
        "dependentRequired": lambda: {"a": ["b"]},
    }
    chances = (0.5, 0.4, 0.12, 0.06, 0.15, 0.15, 0.08, 0.02)
    made = {word: make() for (word, make), chance in zip(words.items(), chances, strict=True) if draw.random() < chance}
    if draw.random() < 0.8:
        made["properties"] = {name: part() for name in names()}
    return {"type": "object"} | made


def _values(draw: Random, depth: int) -> dict[str, Any]:
    values = (
        1,
        1.0,
        1.5,
        "a",
        'q"\\',
        True,
        None,
        [],
        {"title": 1},
        {"title": 2},
        [1, "ö"],
        {},
        10**20,
        1e20,
        "\n",
        -0.0,
        2**60,
    )
    if draw.random() < 0.5:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _choices(draw: Random, depth: int) -> dict[str, Any]:
    if depth <= 0:
        return {"type": draw.choice(("null", "boolean"))}
    parts = [drawn(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    return {draw.choice(("anyOf", "anyOf", "oneOf", "allOf")): parts}


def _nothing(draw: Random, depth: int) -> dict[str, Any]:
    several = draw.sample(("null", "boolean", "integer", "number", "string", "array", "object"), draw.randint(1, 3))
    return draw.choice(({}, {"type": several}, {"type": several[0]}))
