"""gpt-oss: a call is a message, ``<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{…}<|call|>``;
see ``harmony.py``."""

from __future__ import annotations

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.json_calls import arguments_of, known


def _read(text: str, functions: Functions) -> list[Call]:
    """``name<|message|>{…}``, the recipient and the text of a message to a function."""
    name, _, body = text.partition("<|message|>")
    arguments = arguments_of(body or "{}")
    return [Call(name, arguments)] if arguments is not None and known(name, functions) else []


FORMAT = ToolFormat(
    name="gpt_oss",
    aliases=("openai", "harmony", "gptoss"),
    marks=(),
    drop=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    read=_read,
    written=Written(
        "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
        "",
        between="<|call|><|start|>assistant",
        trigger="<|channel|>commentary to=functions.",
        # Thoughts, answers and words before a call; and where the recipient stands before the channel.
        others=("analysis", "final", *(f"commentary{kind}<|message|>" for kind in ("", " json", " <|constrain|>json"))),
    ),
    signs=(("<|channel|>", "<|start|>"),),
    harmony=True,
)
