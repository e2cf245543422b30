"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, newer ones ``[TOOL_CALLS]name[ARGS]{…}`` for each."""

from __future__ import annotations

import re

from toolkit.parsers import json_calls
from toolkit.parsers.formats import Call, Functions, ToolFormat, Written

_NAMED = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\]\s*)?(?P<arguments>\{.*)", re.DOTALL
)
_read_one = json_calls.one_call(_NAMED)


def _read(text: str, functions: Functions) -> list[Call]:
    return _read_one(text, functions) or json_calls.read(text, functions)


def _parts(text: str, functions: Functions) -> list[Call | str]:
    """A list of calls cut short, or words behind ``name[ARGS]{…}``."""
    match = _NAMED.fullmatch(text)
    if match is None:
        return json_calls.parts(text, functions)
    arguments, end = json_calls.object_at(text, match.start("arguments"))
    if arguments is None or not json_calls.known(match["name"], functions):
        return []
    return [Call(match["name"], arguments, match["id"] or ""), text[end:]]


FORMAT = ToolFormat(
    name="mistral",
    marks=(("[TOOL_CALLS]", ""),),
    inner=("[CALL_ID]", "[ARGS]"),
    read=_read,
    parts=_parts,
    written=Written(
        '{"name": "%s", "arguments": ', "}", first="[TOOL_CALLS] [", last="]", between=", ", trigger="[TOOL_CALLS]"
    ),
    signs=(("[TOOL_CALLS]",),),
    short_ids=True,
)
