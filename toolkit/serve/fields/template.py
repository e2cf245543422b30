"""The fields that say how a conversation becomes a prompt, for routes that go no further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.serve.fields.protocol import TemplateVariables
from toolkit.serve.fields.strict import Strict
from toolkit.serve.fields.tools import Tool

if TYPE_CHECKING:
    from toolkit.chat.template import ChatTemplate


class TemplateFields(Strict):
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: list[Tool] | None = None

    def render(self, template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt of ``messages``, as ``template`` has it. Raises as ``ChatTemplate.render``."""
        return template.render(
            messages,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None,
            add_generation_prompt=self.add_generation_prompt is not False,
            **(self.chat_template_kwargs or {}),
        )
