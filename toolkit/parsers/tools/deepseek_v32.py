"""DeepSeek V3.2: invocations in tags whose names begin with ``｜DSML｜``; each parameter says if it is a string."""

from __future__ import annotations

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.xml_calls import Element, Tags

_CALL = ("<｜DSML｜invoke name=", "</｜DSML｜invoke>")
_TAGS = Tags(
    Element(rf'{_CALL[0]}"(?P<name>[^"<]+)">', _CALL[1]),
    Element(r'<｜DSML｜parameter name="(?P<key>[^"<]+)"(?: string="(?P<string>true|false)")?>', "</｜DSML｜parameter>"),
)


def _read(text: str, functions: Functions) -> list[Call]:
    if not text.lstrip().startswith(_CALL[0]):  # the tag was the mark: the one around the calls was forgotten
        text = _CALL[0] + text + _CALL[1]
    return _TAGS.read(text, functions)


FORMAT = ToolFormat(
    name="deepseek_v32",
    aliases=("deepseek_v3_2", "deepseek_v4"),
    marks=(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        _CALL,
    ),
    drop=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    read=_read,
    parts=_TAGS.parts,
    written=Written(
        '<｜DSML｜invoke name="%s">\n',
        "\n</｜DSML｜invoke>",
        style="deepseek_xml",
        first="<｜DSML｜function_calls>\n",
        last="\n</｜DSML｜function_calls>",
        trigger="<｜DSML｜function_calls>\n",
    ),
    signs=(("｜DSML｜",), ("function_calls", "dsml_token")),
    quoted=False,
    value=("<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
    unclosed=False,
)
