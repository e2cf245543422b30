"""Command R, R7B and A: a list of ``{"tool_call_id": …, "tool_name": …, "parameters": {…}}`` between
``<|START_ACTION|>`` and ``<|END_ACTION|>``, of older models behind ``Action:`` in a block of JSON."""

from toolkit.parsers import json_calls
from toolkit.parsers.formats import ToolFormat, Written

FORMAT = ToolFormat(
    name="command_r",
    aliases=("command_r7b", "command_a", "cohere", "cohere_command3"),
    marks=(("<|START_ACTION|>", "<|END_ACTION|>"), ("Action: ```json", "```"), ("Action:```json", "```")),
    drop=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    read=json_calls.read,
    parts=json_calls.parts,
    written=Written(
        '{"tool_call_id": "0", "tool_name": "%s", "parameters": ',
        "}",
        first="<|START_ACTION|>[",
        last="]<|END_ACTION|>",
        between=", ",
        trigger="<|START_ACTION|>",
    ),
    thought_ends=("<|END_THINKING|>",),
    signs=(("<|START_ACTION|>",), ("tool_name", "Action:")),
)
