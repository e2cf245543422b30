"""Llama 3.1 and later: an answer that is nothing but ``{"name": …, "parameters": {…}}``, several joined by ";", perhaps
behind ``<|python_tag|>``."""

import re

from toolkit.parsers import json_calls
from toolkit.parsers.formats import ToolFormat, Written

# The beginning of such an object: its first key, whole or not yet.
_MAY_BE = re.compile(r'\s*(?:\{\s*(?:"(?:[a-z]*|(?:name|type|id|function|parameters|arguments)".*)?)?)?', re.DOTALL)
_IS = re.compile(r'\s*\{\s*"(?:name|type|id|function|parameters|arguments)"')


def _bare(start: str) -> bool | None:
    if _IS.match(start):
        return True
    return None if _MAY_BE.fullmatch(start) else False


FORMAT = ToolFormat(
    name="llama3",
    aliases=("llama3_json", "llama4_json", "llama"),
    marks=(("<|python_tag|>", ""),),
    read=json_calls.read,
    parts=json_calls.parts,
    written=Written('{"name": "%s", "parameters": ', "}", between="; ", trigger='{"name": "'),
    signs=(("parameters", "ipython"), ("parameters", "python_tag")),
    bare=_bare,
)
