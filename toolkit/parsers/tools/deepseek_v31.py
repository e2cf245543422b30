"""DeepSeek V3.1: ``name<｜tool▁sep｜>{…}`` between the marks of V3."""

from __future__ import annotations

import re

from toolkit.parsers import json_calls
from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.tools.deepseek_v3 import CALL, CALLS, NAME_END

_BODY = re.compile(rf"\s*(?P<name>[^\s<][^\n<]*){NAME_END}\s*(?P<arguments>\{{.*\}})\s*", re.DOTALL)


def _parts(text: str, functions: Functions) -> list[Call | str]:
    """Calls whose marks are missing, with words between."""
    found: list[Call | str] = []
    at = 0
    while (end := text.find(NAME_END, at)) >= 0:
        before = text[at:end].rstrip(" \t")
        name = before[max(map(before.rfind, " \t\n>")) + 1 :]
        arguments, end = json_calls.object_at(text, end + len(NAME_END))
        if arguments is None or not json_calls.known(name, functions):
            break
        found += [before.removesuffix(name).removesuffix(CALL[0]), Call(name, arguments)]
        at = end
    return [*found, text[at:]] if found else []


FORMAT = ToolFormat(
    name="deepseek_v31",
    aliases=("deepseek_v3_1",),
    marks=(CALL,),
    drop=CALLS,
    inner=(NAME_END,),
    read=json_calls.one_call(_BODY),
    parts=_parts,
    written=Written(f"{CALL[0]}%s{NAME_END}", CALL[1], first=CALLS[0], last=CALLS[1], between="", trigger=CALLS[0]),
    signs=((CALLS[0],),),
)
