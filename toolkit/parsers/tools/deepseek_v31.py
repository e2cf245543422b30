"""DeepSeek V3.1: ``name<｜tool▁sep｜>{…}`` between the marks of V3."""

from __future__ import annotations

import re

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.tools.deepseek_v3 import CALL, CALLS, NAME_END, read

_BODY = re.compile(rf"\s*(?P<name>[^\n<]+){NAME_END}\s*(?P<arguments>\{{.*\}})\s*", re.DOTALL)


def _read(text: str, functions: Functions) -> list[Call]:
    return read(_BODY, text, functions)


FORMAT = ToolFormat(
    name="deepseek_v31",
    aliases=("deepseek_v3_1",),
    marks=(CALL,),
    drop=CALLS,
    read=_read,
    written=Written(f"{CALL[0]}%s{NAME_END}", CALL[1], first=CALLS[0], last=CALLS[1], between="", trigger=CALLS[0]),
    signs=((CALLS[0],),),
)
