"""DeepSeek V3.2: invocations in tags whose names begin with ``｜DSML｜``; each parameter says if it is a string."""

import re

from toolkit.parsers.formats import ToolFormat, Written
from toolkit.parsers.xml_calls import Tags

_TAGS = Tags(
    re.compile(r'<｜DSML｜invoke name="(?P<name>[^"]+)">(?P<body>.*?)</｜DSML｜invoke>', re.DOTALL),
    re.compile(
        r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="(?P<string>true|false)")?>'
        r"(?P<value>.*?)</｜DSML｜parameter>",
        re.DOTALL,
    ),
)
FORMAT = ToolFormat(
    name="deepseek_v32",
    aliases=("deepseek_v3_2", "deepseek_v4"),
    marks=(
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    ),
    read=_TAGS.read,
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
)
