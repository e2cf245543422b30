"""GLM 4.5 to 4.7: ``<tool_call>name<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>``."""

from __future__ import annotations

import re

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.xml_calls import Element, read_call

_CALL = re.compile(r"\s*(?P<name>[^\s<]+)\s*(?P<body>(?:<arg_key>.*)?)", re.DOTALL)
_PARAMETER = Element(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "</arg_value>")


def _read(text: str, functions: Functions) -> list[Call]:
    match = _CALL.fullmatch(text)
    call = read_call(match["name"], match["body"], _PARAMETER, functions) if match else None
    return [] if call is None else [call]


FORMAT = ToolFormat(
    name="glm45",
    aliases=("glm47", "glm4_moe", "glm46"),
    marks=(("<tool_call>", "</tool_call>"),),
    read=_read,
    written=Written("<tool_call>%s\n", "\n</tool_call>", style="glm_xml", trigger="<tool_call>"),
    signs=(("<arg_key>",),),
    quoted=False,
    value=("<arg_value>", "</arg_value>"),
    unclosed=False,
)
