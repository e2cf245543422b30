"""DeepSeek V3.2: invocations in tags whose names begin with ``｜DSML｜``; each parameter says if it is a string."""

from toolkit.parsers.formats import ToolFormat, Written
from toolkit.parsers.xml_calls import Element, Tags

_TAGS = Tags(
    Element(r'<｜DSML｜invoke name="(?P<name>[^"<]+)">', "</｜DSML｜invoke>"),
    Element(r'<｜DSML｜parameter name="(?P<key>[^"<]+)"(?: string="(?P<string>true|false)")?>', "</｜DSML｜parameter>"),
)
FORMAT = ToolFormat(
    name="deepseek_v32",
    aliases=("deepseek_v3_2", "deepseek_v4"),
    marks=(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    read=_TAGS.read,
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
)
