"""What a model that is not loaded can do, from its files: so that asking loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.artifacts.recipe import open_recipe
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text_head import pooling_config
from toolkit.chat.template import ChatTemplate
from toolkit.engine.load.setup import tokenizer_dir
from toolkit.serve.generation.parsing import Formats
from toolkit.serve.ollama import cards
from toolkit.serve.options import ServerSettings


def shown(
    name: str, path: Path, chat_template: str | None, settings: ServerSettings, session_len: int | None
) -> dict[str, Any]:
    """As /api/show has it. ``session_len``: the most that a conversation may have, None = what the model states.

    Raises ToolkitError for a model that cannot be read.
    """
    directory = tokenizer_dir(path)
    tokenizer, recipe = Tokenizer.open(directory), open_recipe(directory)
    picture = None if recipe is None else recipe.written
    template = ChatTemplate.open(tokenizer, directory, chat_template, picture=picture)
    formats = Formats.choose(tokenizer, template, settings.tool_call_parser, settings.reasoning_parser)
    embeds = pooling_config(directory) is not None
    can = cards.Abilities(tokenizer, template.source, formats, embeds, sees=recipe is not None)
    return cards.shown(cards.Listed(name, session_len=session_len, path=directory), can)
