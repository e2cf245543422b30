"""Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number among text."""

from toolkit.parsers import json_calls
from toolkit.parsers.formats import ToolFormat, Written

FORMAT = ToolFormat(
    name="hermes",
    aliases=("qwen", "qwen2d5", "qwen2_5", "qwen3", "qwen25"),
    marks=(("<tool_call>", "</tool_call>"),),
    read=json_calls.read,
    parts=json_calls.parts,
    written=Written('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"),
    signs=(("<tool_call>", "arguments"),),
)
