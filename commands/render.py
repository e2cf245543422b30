"""``tool render``: the prompt that a chat template makes of messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.commands.options import json_object, read_tools
from toolkit.errors import UsageError


def run(
    template: Annotated[
        str,
        typer.Option(help="A model (directory, hub id, demo), a built-in name (tool list), a .json or .jinja file."),
    ],
    model: Annotated[
        str | None, typer.Option(help="The model whose tokenizer is used with a built-in template or a file.")
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the token ids as JSON.")] = False,
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with the tools as requests have them, over those of the input.")
    ] = None,
    chat_template_kwargs: Annotated[str | None, typer.Option(help="JSON object of variables for the template.")] = None,
    no_generation_prompt: Annotated[
        bool, typer.Option("--no-generation-prompt", help="End behind the last message, not where an answer begins.")
    ] = False,
) -> None:
    """Read messages from standard input (JSON: a list, or a request with messages and tools) and print the prompt.

    Example: tool render --template demo < messages.json
    """
    from toolkit.artifacts.source import resolve_model
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.chat import builtin
    from toolkit.chat.template import ChatTemplate

    named = builtin.find(template) is not None or template.endswith((".jinja", ".jinja2", ".j2", ".json"))
    request = _request()
    variables = _variables(request, chat_template_kwargs)
    if told := read_tools("--tools", tools) or request.get("tools"):
        variables["tools"] = told
    path = resolve_model(model or ("demo" if named else template))
    tokenizer = Tokenizer.open(path)
    made = ChatTemplate.open(tokenizer, path, template if named else None)
    prompt = made.render(request["messages"], add_generation_prompt=not no_generation_prompt, **variables)
    if tokens:
        print(json.dumps(tokenizer.encode(prompt, add_special_tokens=False)))
    else:
        sys.stdout.write(prompt.encode("utf-8", "replace").decode())  # half a character as tokenizers are given it


def _variables(request: dict[str, Any], more: str | None) -> dict[str, Any]:
    """What the template is given besides, of the request and of --chat-template-kwargs."""
    found = request.get("chat_template_kwargs") or {}
    if not isinstance(found, dict):
        raise UsageError(f"standard input: chat_template_kwargs: expected a JSON object, found {found!r:.60}")
    found = found if more is None else {**found, **json_object("--chat-template-kwargs", more)}
    if ours := sorted({"self", "messages", "add_generation_prompt"} & set(found)):
        raise UsageError(f"chat_template_kwargs: {ours[0]!r} is the request's own; it cannot be set here")
    return found


def _request() -> dict[str, Any]:
    try:
        data = json.loads(sys.stdin.buffer.read())  # UTF-8 with or without its mark, whatever the locale is
    except (ValueError, RecursionError) as error:
        raise UsageError(f"standard input: expected JSON messages ({error})") from error
    request = {"messages": data} if isinstance(data, list) else data
    if not isinstance(request, dict) or not isinstance(request.get("messages"), (list, str)):
        raise UsageError('standard input: expected a list of messages, or {"messages": …}')
    return request
