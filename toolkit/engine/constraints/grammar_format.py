"""What a ``response_format`` may be, and how large: looked at before anything is compiled.

{"type": "json_object"}
{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}     (or the schema itself under "json_schema")
{"type": "regex_schema", "regex_schema": "…"}
{"type": "grammar", "grammar": "root ::= …"}                            (EBNF)
{"type": "choice", "choice": ["yes", "no"]}
{"type": "structural_tag", "structural_tag": {"format": {…}}}          (xgrammar's, for calls; not over HTTP)
{"type": "text"}                                                        (no constraint)
"""

from __future__ import annotations

import json
from typing import Any

from toolkit.engine.constraints.grammar_schema import fitted
from toolkit.engine.constraints.schema_patterns import strange_escape, within_lines
from toolkit.errors import UsageError

TYPES = ("text", "json_object", "json_schema", "regex_schema", "grammar", "choice", "structural_tag")
MAX_TEXT = 1 << 18  # characters of a schema, regex, grammar or list of choices
MAX_DEPTH = 128  # levels of a schema's JSON: two for each object inside an object
MAX_PROPERTIES = 1000  # of all objects in a schema together
MAX_REGEX = 1 << 13  # characters of a regex or a schema's pattern
MAX_GROUPS = 64  # groups inside one another in a regex


def check_format(response_format: Any) -> None:
    """Raise UsageError, one line, unless ``response_format`` has a known type, its field, and a size within limits."""
    if not isinstance(response_format, dict) or response_format.get("type") not in TYPES:
        found = response_format.get("type") if isinstance(response_format, dict) else response_format
        raise UsageError(f"response_format: expected a type among {', '.join(TYPES)}, found {found!r:.60}")
    kind = response_format["type"]
    if kind in ("text", "json_object"):
        return
    value = response_format.get(kind)
    good = {
        "json_schema": isinstance(value, dict),
        "structural_tag": isinstance(value, dict),
        "regex_schema": isinstance(value, str) and bool(value),
        "grammar": isinstance(value, str) and bool(value),
        "choice": isinstance(value, list) and bool(value) and all(isinstance(c, str) and c for c in value),
    }[kind]
    if not good:
        wanted = {
            "json_schema": "an object",
            "structural_tag": "an object",
            "choice": "a list of non-empty strings",
        }.get(kind, "a non-empty string")
        raise UsageError(f"response_format: field {kind!r}: expected {wanted}, found {value!r:.60}")
    _check_size(kind, value)
    if kind == "regex_schema":
        _check_regex(kind, str(value))
        try:
            check_escapes(str(value))
        except UsageError as error:
            raise UsageError(f"response_format: {error}") from error
    try:  # an error of which it would be a part could not be told
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"response_format: field {kind!r}: found half a character (a surrogate)") from error


def fitted_format(response_format: dict[str, Any]) -> dict[str, Any]:
    """The same with schemas and patterns in words that xgrammar holds to. Raises UsageError, one line, where a
    ``json_schema`` says more than a grammar can, unless it is ``strict: false``. Of the arguments of calls as much is
    held to as can be.
    """
    kind = response_format["type"]
    if kind == "regex_schema":
        return {**response_format, kind: within_lines(response_format[kind])}
    if kind == "structural_tag":
        return {**response_format, kind: _fitted_nodes(response_format[kind])}
    if kind != "json_schema":
        return response_format
    named: dict[str, Any] = response_format[kind]
    schema, lost = fitted(named.get("schema", named))
    if lost and not ("schema" in named and named.get("strict") is False):
        raise UsageError(f"response_format: {beyond('the json_schema', lost)}")
    return {**response_format, kind: {**named, "schema": schema} if "schema" in named else schema}


def check_held(what: str, schema: Any) -> None:
    """Raise UsageError, one line, for a schema that is too large, or says more than a grammar can. ``what``: it is."""
    try:
        _check_size("json_schema", schema)  # first, for to look closer takes its time
    except UsageError as error:
        raise UsageError(str(error).replace("response_format: the json_schema", what)) from error
    if lost := fitted(schema)[1]:
        raise UsageError(beyond(what, lost))


def check_escapes(pattern: str) -> None:
    """Raise UsageError, one line, for a regex_schema with an escape that would be read as its letter."""
    if strange := strange_escape(pattern):
        raise UsageError(
            f"the regex_schema has {strange}, which means nothing in ECMA-262; ^ and $ are a text's start and end"
        )


def beyond(what: str, lost: list[str]) -> str:
    """What to tell of a schema of which ``fitted`` lost something."""
    return f"{what} has {lost[0]:.200}, to which no answer can be held here; leave it out, or say strict: false"


def _fitted_nodes(node: Any) -> Any:
    """A structural tag, whose schemas and patterns are in nodes of their own kinds."""
    if isinstance(node, list):
        return [_fitted_nodes(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema":
        return {**node, "json_schema": fitted(node["json_schema"])[0]}
    if node.get("type") == "regex":
        return {**node, "pattern": within_lines(node["pattern"])}
    return {name: _fitted_nodes(part) for name, part in node.items()}


def kinds_of_nodes(tag: Any) -> set[str]:
    """The types of a structural tag's nodes."""
    found: set[str] = set()
    stack = [tag]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            kind = node.get("type")
            found |= {kind} if isinstance(kind, str) else set()
            stack += [part for name, part in node.items() if name != "json_schema"]
    return found


def _check_size(kind: str, value: Any) -> None:
    """Walk plain JSON, no further than the limits reach."""
    characters, properties = 0, 0
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise _too_large(kind, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise UsageError(f"response_format: field {kind!r}: expected plain JSON values, found a key of no text")
            characters += sum(map(len, item)) + 4 * len(item)
            properties += sum(len(p) for n in ("properties", "patternProperties") if isinstance(p := item.get(n), dict))
            patterns = item.get("patternProperties")
            for pattern in (item.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
                if isinstance(pattern, str):
                    _check_regex(kind, pattern)
            stack += [(child, depth + 1) for child in item.values()]
        elif isinstance(item, list | tuple):
            characters += 2 * len(item)
            stack += [(child, depth + 1) for child in item]
        elif isinstance(item, str):
            characters += len(item) + 2
        elif item is None or isinstance(item, bool | int | float):
            characters += 4
        else:
            found = type(item).__name__
            raise UsageError(f"response_format: field {kind!r}: expected plain JSON values, found {found}")
        if characters > MAX_TEXT:
            raise _too_large(kind, f"longer than {MAX_TEXT} characters")
        if properties > MAX_PROPERTIES:
            raise _too_large(kind, f"more than {MAX_PROPERTIES} properties")


def _check_regex(kind: str, text: str) -> None:
    if len(text) > MAX_REGEX:
        raise _too_large(kind, f"a pattern of {len(text)} characters, expected at most {MAX_REGEX}")
    depth, plain = 0, iter(text)
    for character in plain:
        if character == "\\":
            next(plain, None)
        elif character in "()":
            depth += 1 if character == "(" else -1
            if depth > MAX_GROUPS:
                raise _too_large(kind, f"a pattern with more than {MAX_GROUPS} groups inside one another")


def _too_large(kind: str, what: str) -> UsageError:
    return UsageError(f"response_format: the {kind} is too large: {what}; use a smaller one")
