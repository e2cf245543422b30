"""Qwen3-Coder, Qwen3.5: ``<tool_call><function=weather><parameter=city>Paris</parameter></function></tool_call>``;
Seed-OSS, with marks of its own around them."""

from __future__ import annotations

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.xml_calls import Element, Tags

_TAGS = Tags(
    Element(r"<function=(?P<name>[^<>\n]+)>", "</function>"),
    Element(r"<parameter=(?P<key>[^<>\n]+)>", "</parameter>", lines=True),
)


def _read(text: str, functions: Functions) -> list[Call]:
    if not text.lstrip().startswith("<function="):  # the tag was the mark
        text = f"<function={text}</function>"
    return _TAGS.read(text, functions)


FORMAT = ToolFormat(
    name="qwen3_coder",
    aliases=("qwen3coder", "qwen3_xml", "qwen3_5", "interns2_preview", "seed_oss"),
    marks=(
        ("<tool_call>", "</tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
        ("<function=", "</function>"),
    ),
    read=_read,
    parts=_TAGS.parts,
    written=Written(
        "<tool_call>\n<function=%s>\n", "\n</function>\n</tool_call>", style="qwen_xml", trigger="<tool_call>"
    ),
    signs=(("<function=", "<parameter="),),
    quoted=False,
    value=("<parameter=", "</parameter>"),
    unclosed=False,
)
