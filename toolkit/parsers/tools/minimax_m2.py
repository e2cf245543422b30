"""MiniMax M2: ``<minimax:tool_call><invoke name="weather"><parameter name="city">Paris</parameter></invoke>…``."""

import re

from toolkit.parsers.formats import ToolFormat, Written
from toolkit.parsers.xml_calls import Tags

_TAGS = Tags(
    re.compile(r'<invoke name="?(?P<name>[^">]+)"?>(?P<body>.*?)</invoke>', re.DOTALL),
    re.compile(r'<parameter name="?(?P<key>[^">]+)"?>(?P<value>.*?)</parameter>', re.DOTALL),
)
FORMAT = ToolFormat(
    name="minimax_m2",
    aliases=("minimax",),
    marks=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    read=_TAGS.read,
    written=Written(
        '<invoke name="%s">\n',
        "\n</invoke>",
        style="minimax_xml",
        first="<minimax:tool_call>\n",
        last="\n</minimax:tool_call>",
        trigger="<minimax:tool_call>\n",
    ),
    signs=(("<minimax:tool_call>",), ("minimax:tool_call",)),
    quoted=False,
)
