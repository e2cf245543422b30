"""DeepSeek V3 and R1: the kind of tool, its name and a block of JSON between marks of their own."""

import re

from toolkit.parsers.formats import ToolFormat, Written
from toolkit.parsers.json_calls import one_call

CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
NAME_END = "<｜tool▁sep｜>"
_BODY = re.compile(rf"\s*\w*{NAME_END}(?P<name>[^\n]+)\n```(?:json)?\s*(?P<arguments>\{{.*\}})\s*```\s*", re.DOTALL)


FORMAT = ToolFormat(
    name="deepseek_v3",
    aliases=("deepseek_r1_0528",),
    marks=(CALL,),
    drop=CALLS,
    inner=(NAME_END,),
    read=one_call(_BODY),
    written=Written(
        f"{CALL[0]}function{NAME_END}%s\n```json\n", f"\n```{CALL[1]}", first=CALLS[0], last=CALLS[1], trigger=CALLS[0]
    ),
    signs=((CALLS[0], "```json"),),
)
