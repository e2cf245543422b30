"""Phi-4-mini: ``functools[{"name": …, "arguments": {…}}, …]``, or the same list between ``<|tool_call|>`` marks."""

from toolkit.parsers import json_calls
from toolkit.parsers.formats import ToolFormat, Written

FORMAT = ToolFormat(
    name="phi4",
    aliases=("phi4_mini_json", "phi4_mini"),
    marks=(("<|tool_call|>", "<|/tool_call|>"), ("functools", "")),
    read=json_calls.read,
    parts=json_calls.parts,
    written=Written(
        '{"name": "%s", "arguments": ', "}", first="functools[", last="]", between=", ", trigger="functools["
    ),
    signs=(("<|/tool|>",), ("functools",)),
)
