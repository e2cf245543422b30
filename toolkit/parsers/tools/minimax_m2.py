"""MiniMax M2: ``<minimax:tool_call><invoke name="weather"><parameter name="city">Paris</parameter></invoke>…``."""

from toolkit.parsers.formats import ToolFormat, Written
from toolkit.parsers.xml_calls import Element, Tags

_TAGS = Tags(
    Element(r'<invoke name="?(?P<name>[^"<>]+)"?>', "</invoke>"),
    Element(r'<parameter name="?(?P<key>[^"<>]+)"?>', "</parameter>"),
)
FORMAT = ToolFormat(
    name="minimax_m2",
    aliases=("minimax",),
    marks=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    read=_TAGS.read,
    parts=_TAGS.parts,
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
    value=("<parameter name=", "</parameter>"),
)
