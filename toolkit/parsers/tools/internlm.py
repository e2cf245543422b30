"""InternLM2, InternLM2.5 and Intern-S1: ``<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>``."""

from toolkit.parsers import json_calls
from toolkit.parsers.formats import ToolFormat, Written

FORMAT = ToolFormat(
    name="internlm",
    aliases=("internlm2", "internlm3", "intern_s1"),
    marks=(("<|action_start|><|plugin|>", "<|action_end|>"), ("<|action_start|> <|plugin|>", "<|action_end|>")),
    read=json_calls.read,
    parts=json_calls.parts,
    written=Written(
        '<|action_start|><|plugin|>\n{"name": "%s", "parameters": ',
        "}<|action_end|>",
        trigger="<|action_start|><|plugin|>",
        others=("<|interpreter|>",),
    ),
    signs=(("<|plugin|>",),),
)
