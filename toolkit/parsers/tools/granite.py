"""Granite 3 and 4: ``<tool_call>`` or ``<|tool_call|>`` before a list of calls or one call; no end mark is needed."""

from toolkit.parsers import json_calls
from toolkit.parsers.formats import ToolFormat, Written

FORMAT = ToolFormat(
    name="granite",
    aliases=("granite3", "granite4", "granite_20b_fc"),
    marks=(("<tool_call>", "</tool_call>"), ("<|tool_call|>", ""), ("<function_call>", "")),
    read=json_calls.read,
    parts=json_calls.parts,
    written=Written(
        '{"name": "%s", "arguments": ', "}", first="<tool_call>[", last="]", between=", ", trigger="<tool_call>["
    ),
    signs=(("<|start_of_role|>",),),
)
