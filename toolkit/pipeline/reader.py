"""From a prompt to what the engine reads: rendered by its chat template, pictures seen, tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.recipe import open_recipe
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.messages import Message
from toolkit.chat.renderer import Renderer
from toolkit.chat.template import ChatTemplate
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import UsageError
from toolkit.messages import ChatTemplateConfig
from toolkit.models.eyes.pictures import Picture
from toolkit.pipeline.prompts import Prompt
from toolkit.pipeline.session import Session
from toolkit.vision.images import Rules

if TYPE_CHECKING:
    from toolkit.vision.eyes import Eyes

logger = logging.getLogger("toolkit")


class Reader:
    """Of one model. ``templates``: of adapters that have their own, by their names. ``eyes``: None where it reads text
    alone. ``max_log_len``: characters of each prompt that the log shows, None: all."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        templates: Mapping[str, ChatTemplate],
        eyes: Eyes | None,
        max_log_len: int | None,
    ) -> None:
        self.template = template
        self.templates = templates
        self.eyes = eyes
        self._tokenizer = tokenizer
        self._max_log_len = max_log_len

    @classmethod
    def open(
        cls,
        engine: AsyncEngine,
        model_path: str,
        chat_template: ChatTemplateConfig | str | None,
        renderer: Renderer,
        rules: Rules,
        max_log_len: int | None,
    ) -> Reader:
        """That of an engine's model. ``rules``: what prompts may name as pictures. Raises ToolkitError, UsageError."""
        tokenizer, session_len = engine.tokenizer, engine.session_len
        eyes, recipe = None, None if engine.blind else open_recipe(tokenizer.path)
        if recipe is not None:
            from toolkit.vision.eyes import Eyes  # and what decodes, which a model that reads text alone does without

            eyes = Eyes.of(recipe, rules, session_len)
        picture = None if recipe is None else recipe.written
        template = ChatTemplate.open(tokenizer, model_path, chat_template, renderer, picture)
        templates = ChatTemplate.of_adapters(engine.adapters.names, tokenizer, model_path, template.picture)
        return cls(tokenizer, template, templates, eyes, max_log_len)

    def template_of(self, adapter: str | None) -> ChatTemplate:
        """The adapter's, or the model's."""
        return self.templates.get(adapter or "", self.template)

    def read(
        self, i: int, prompt: Prompt, session: Session | None, template: ChatTemplate | None, options: dict[str, Any]
    ) -> tuple[list[int], list[Picture]]:
        """Token ids and pictures of prompt ``i``, with ``session``'s history before it. Without a template it is a text
        that is taken as it is. ``options``: of the template. Raises ToolkitError for a prompt that cannot be read."""
        pictures: list[Picture] = []
        if template is None:
            if not isinstance(prompt, str):
                raise UsageError("messages need the chat template: leave out do_preprocess=False, or pass text")
            text, ids = prompt, self._tokenizer.encode(prompt)
        else:
            if session is not None:
                before = session.messages()
                prompt = before + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            text = template.render(prompt, **options)
            pictures, whole = self.see(prompt, text)
            ids = self._tokenizer.encode(whole, add_special_tokens=False)
        logger.info("prompt %d, %d tokens: %r", i, len(ids), text[: self._max_log_len])
        return ids, pictures

    def see(self, prompt: Prompt, text: str) -> tuple[list[Picture], str]:
        """The pictures of a prompt, and its rendered ``text`` with their places spelled out."""
        if self.eyes is None:
            return [], text
        pictures = self.eyes.look(prompt)
        return pictures, self.eyes.spell(text, pictures)

    def count(self, messages: list[Message]) -> int:
        """Tokens that a conversation takes. Raises ToolkitError."""
        _, text = self.see(messages, self.template.render(messages))
        return len(self._tokenizer.encode(text, add_special_tokens=False))
