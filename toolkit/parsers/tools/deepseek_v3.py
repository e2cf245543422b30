"""DeepSeek V3 and R1: the kind of tool, its name and a block of JSON between marks of their own."""

from __future__ import annotations

import re

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.json_calls import arguments_of, known

CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
NAME_END = "<｜tool▁sep｜>"
_BODY = re.compile(rf"\s*\w*{NAME_END}(?P<name>[^\n]+)\n```(?:json)?\s*(?P<arguments>\{{.*\}})\s*```\s*", re.DOTALL)


def read(body: re.Pattern[str], text: str, functions: Functions) -> list[Call]:
    """The call whose ``name`` and ``arguments`` are groups of ``body``, which has to match all of ``text``."""
    match = body.fullmatch(text)
    arguments = arguments_of(match["arguments"]) if match else None
    if match is None or arguments is None or not known(match["name"].strip(), functions):
        return []
    return [Call(match["name"].strip(), arguments)]


def _read(text: str, functions: Functions) -> list[Call]:
    return read(_BODY, text, functions)


FORMAT = ToolFormat(
    name="deepseek_v3",
    aliases=("deepseek_r1_0528",),
    marks=(CALL,),
    drop=CALLS,
    read=_read,
    written=Written(
        f"{CALL[0]}function{NAME_END}%s\n```json\n", f"\n```{CALL[1]}", first=CALLS[0], last=CALLS[1], trigger=CALLS[0]
    ),
    signs=((CALLS[0], "```json"),),
)
