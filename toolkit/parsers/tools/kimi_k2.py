"""Kimi K2: ``<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``; what is before
the arguments is the call's id."""

import re

from toolkit.parsers.formats import ToolFormat, Written
from toolkit.parsers.json_calls import one_call

_CALLS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_NAME_END = "<|tool_call_argument_begin|>"
_BODY = re.compile(
    rf"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*{re.escape(_NAME_END)}\s*(?P<arguments>\{{.*\}})\s*",
    re.DOTALL,
)


FORMAT = ToolFormat(
    name="kimi_k2",
    marks=(_CALL,),
    drop=_CALLS,
    inner=(_NAME_END,),
    read=one_call(_BODY),
    written=Written(
        f"{_CALL[0]}functions.%s:0{_NAME_END}", _CALL[1], first=_CALLS[0], last=_CALLS[1], between="", trigger=_CALLS[0]
    ),
    signs=((_CALLS[0],), (_CALL[0],)),
)
