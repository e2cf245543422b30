"""The grammar under which an answer is calls, as a ``response_format``: a structural tag, as xgrammar has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolkit.parsers import harmony
from toolkit.parsers.formats import Functions, ReasoningFormat, ToolFormat
from toolkit.parsers.thinking import Begun

_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "list": "array", "dict": "object"}
_BLANKS = 1  # at most, where JSON leaves them open: models would go on writing them
_BREAK = {"type": "const_string", "value": "\n"}
_PAUSE = {  # between a thought and the answer: at most two
    "type": "optional",
    "content": {"type": "sequence", "elements": [_BREAK, {"type": "optional", "content": _BREAK}]},
}
Specials = Mapping[str, int]  # special tokens -> their ids: grammars of text never meet these
Node = dict[str, Any]


def required_calls(
    form: ToolFormat,
    functions: Functions,
    specials: Specials,
    several: bool = False,
    *,
    reasoning: ReasoningFormat | None = None,
    begun: Begun = None,
) -> dict[str, Any]:
    """The answer is one call of one of ``functions`` (``several``: or more), behind a thought if the model thinks."""
    return _format(_row([*_thought(reasoning, begun, specials), _calls(form, functions, specials, several)]))


def calls_or_answer(
    form: ToolFormat,
    functions: Functions,
    rule: dict[str, Any],
    specials: Specials,
    several: bool = False,
    *,
    reasoning: ReasoningFormat | None = None,
    begun: Begun = None,
) -> dict[str, Any]:
    """The answer is calls as ``required_calls`` has them, or follows the response_format ``rule``."""
    answer = _answer(rule, reasoning, begun, specials)
    assert answer is not None  # of a request whose fields were checked
    either = _any([_calls(form, functions, specials, several), answer])
    return _format(_row([*_thought(reasoning, begun, specials), either]))


def _calls(form: ToolFormat, functions: Functions, specials: Specials, several: bool) -> Node:
    written = form.written
    call = _any([_call(form, name, schema, specials) for name, schema in (functions or {}).items()])
    parts = [*literal(written.first, specials), call]
    if several:
        parts.append({"type": "star", "content": _row([*literal(written.between, specials), call])})
    return _row([*parts, *literal(written.last, specials)])


def guarded_calls(form: ToolFormat, functions: Functions, strict: frozenset[str], specials: Specials) -> dict[str, Any]:
    """The answer is any text, and where it begins a call, that of one of ``functions``; arguments of those that are
    ``strict`` by their schema, of others any."""
    written = form.written
    whole = written.first + written.begin
    assert whole.startswith(written.trigger)
    trigger = literal(written.trigger, specials)
    known: dict[str, Any] = {
        n: schema if n in strict else {"type": "object"} for n, schema in (functions or {}).items()
    }
    calls = []
    for name, schema in known.items():
        begin = literal((whole % name).removeprefix(written.trigger), specials)
        calls.append(_row([*begin, _arguments(form, schema), *literal(written.end, specials)]))
    more = [_call(form, name, schema, specials) for name, schema in known.items()]
    again = {"type": "star", "content": _row([*literal(written.between, specials), _any(more)])}
    chain = [] if written.first == "" else [again]
    content = _row([*trigger[1:], _any(calls), *chain, *literal(written.last, specials)])
    if trigger[1:]:
        content = _any([content, *(_row(literal(text, specials)) for text in written.others)])
    kind = "token_dispatch" if trigger[0]["type"] == "token" else "dispatch"
    first = trigger[0].get("token", trigger[0].get("value"))
    return _format({"type": kind, "rules": [[first, content]]})


def after_thought(
    rule: dict[str, Any], reasoning: ReasoningFormat, begun: Begun, specials: Specials
) -> dict[str, Any] | None:
    """A ``response_format`` for the answer behind a thought; None where ``rule`` can only begin at once."""
    node = _answer(rule, reasoning, begun, specials)
    return None if node is None else _format(_row([*_thought(reasoning, begun, specials), node]))


def _answer(rule: dict[str, Any], reasoning: ReasoningFormat | None, begun: Begun, specials: Specials) -> Node | None:
    node = _rule(rule)
    if node is None or reasoning is None or not reasoning.harmony or begun == "closed":
        return node
    return _row([*literal(harmony.ANSWER, specials), node])


def _rule(rule: dict[str, Any]) -> Node | None:
    kind = rule["type"]
    value = rule.get(kind)
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": _BLANKS}
    if kind == "json_schema" and isinstance(value, Mapping):
        schema = value.get("schema", value)
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _BLANKS}
    if kind == "regex_schema":
        return {"type": "regex", "pattern": value}
    if kind == "grammar":
        return {"type": "grammar", "grammar": value}
    if kind == "choice" and value:
        return _any([{"type": "const_string", "value": choice} for choice in value])
    return None


def _thought(reasoning: ReasoningFormat | None, begun: Begun, specials: Specials) -> list[Node]:
    if reasoning is None or begun == "closed":
        return []
    begins, ends, pause = reasoning.begins, reasoning.ends, [_PAUSE]
    if reasoning.harmony:
        begins, ends, pause = (harmony.THOUGHT[0],), (harmony.THOUGHT[1],), []
    if not begins:
        return []
    body: Node = {
        "type": "any_text",
        "excludes": [mark for mark in ends if literal(mark, specials)[0]["type"] != "token"],
    }
    end = literal(ends[0], specials)
    if begun == "open" or (begun is None and reasoning.open):
        return [body, *end, *pause]
    begin = literal(begins[0], specials)
    return [{"type": "optional", "content": _row([*begin, body, *end, *pause])}]


def _call(form: ToolFormat, name: str, schema: Any, specials: Specials) -> Node:
    written = form.written
    begin, end = literal(written.begin % name, specials), literal(written.end, specials)
    return _row([*begin, _arguments(form, schema), *end])


def _arguments(form: ToolFormat, schema: Any) -> Node:
    made = _schema(schema) or {"type": "object", "properties": {}, "additionalProperties": False}
    node: Node = {"type": "json_schema", "json_schema": made, "style": form.written.style}
    return node | ({"max_whitespace_cnt": _BLANKS} if form.written.style == "json" else {})


def literal(text: str, specials: Specials) -> list[Node]:
    """``text`` as it is written: special tokens in it by their ids."""
    found = [mark for mark in specials if mark in text]
    parts = (
        re.split("(" + "|".join(map(re.escape, sorted(found, key=len, reverse=True))) + ")", text) if found else [text]
    )
    return [
        {"type": "token", "token": specials[part]} if part in found else {"type": "const_string", "value": part}
        for part in parts
        if part
    ]


def _row(elements: list[Node]) -> Node:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _any(elements: list[Node]) -> Node:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _format(node: Node) -> dict[str, Any]:
    return {"type": "structural_tag", "structural_tag": {"type": "structural_tag", "format": node}}


def _schema(node: Any) -> Any:
    """A JSON schema with the names that Python programmers give types in it put right."""
    if isinstance(node, list):
        return [_schema(x) for x in node]
    if not isinstance(node, dict):
        return node
    made = {k: _schema(v) for k, v in node.items()}
    kind = made.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        made["type"] = _TYPES[kind]
    return made
