"""``tool parse``: the OpenAI message that a model's raw answer is, for people who look into a parser."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.commands.options import read_tools
from toolkit.commands.output import write_json
from toolkit.errors import UsageError


def run(
    parser: Annotated[str | None, typer.Option(help="How calls of tools are written, such as hermes.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="How thoughts are marked, such as qwen3.")] = None,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with the tools as requests have them; other names are no calls.")
    ] = None,
    enable_thinking: Annotated[
        str | None,
        typer.Option(
            metavar="true|false",
            help="Whether the prompt left a thought open (true) or closed (false). Default: as such models do.",
        ),
    ] = None,
    stream_every: Annotated[
        int, typer.Option(min=0, metavar="<int>", help="Feed the parser so many bytes at a time; 0 = all at once.")
    ] = 0,
) -> None:
    """Read a model's raw answer from standard input and print the message as JSON: content, reasoning, tool calls.

    Example: tool parse --parser hermes --reasoning-parser qwen3 < raw.txt
    """
    from toolkit.parsers import registry
    from toolkit.parsers.pieces import Answer
    from toolkit.parsers.thinking import Begun

    if parser is None and reasoning_parser is None:
        raise UsageError("--parser, --reasoning-parser: expected one of them, or both, found none")
    states: dict[str | None, Begun] = {"true": "open", "false": "closed", None: None}
    if enable_thinking not in states:
        raise UsageError(f"--enable-thinking: expected true or false, found {enable_thinking!r}")
    called = registry.tool_format(parser, "--parser") if parser else None
    thought = registry.reasoning_format(reasoning_parser) if reasoning_parser else None
    reader = registry.open_parser(called, thought, _functions(tools), seed="parse", begun=states[enable_thinking])
    raw = sys.stdin.buffer.read()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    answer = Answer()
    size = stream_every or max(len(raw), 1)
    for start in range(0, len(raw), size):
        answer.take(reader.add(decoder.decode(raw[start : start + size])))
    answer.take(reader.add(decoder.decode(b"", True)))
    answer.take(reader.finish())
    write_json("-", answer.message())


def _functions(file: Path | None) -> dict[str, Any] | None:
    """Name -> schema of the parameters."""
    told = read_tools("--tools", file)
    return None if told is None else {t["function"]["name"]: t["function"].get("parameters") or {} for t in told}
