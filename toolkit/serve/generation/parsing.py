"""How the answers of one server's model are read: chosen once from its chat template, or by name."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.parsers import grammar, registry
from toolkit.parsers.formats import ReasoningFormat, ToolFormat
from toolkit.parsers.pieces import Parser
from toolkit.parsers.thinking import Begun

if TYPE_CHECKING:
    from typing import Any

    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.chat.template import ChatTemplate
    from toolkit.serve.fields.protocol import ChatCompletionRequest

NONE = "none"  # --reasoning-parser: thoughts stay in the text
BUILT_IN = "<|python_tag|>"  # before a call of Llama 3's own tools, which its system text switches on, not the request


@dataclass(frozen=True)
class Formats:
    """``tools`` None: this model's way of calling is not known; ``reasoning`` None: thoughts are text."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer

    @classmethod
    def choose(cls, tokenizer: Tokenizer, template: ChatTemplate, tools: str | None, reasoning: str | None) -> Formats:
        """``tools``, ``reasoning``: names of parsers; None: the template's own. Raises UsageError for unknown ones."""
        called = registry.tool_format(tools) if tools else template.tool_format
        if reasoning == NONE:
            return cls(called, None, tokenizer)
        return cls(called, registry.reasoning_format(reasoning) if reasoning else template.reasoning_format, tokenizer)

    @staticmethod
    def check(tools: object, reasoning: object) -> None:
        """Raise what ``choose`` would for these names: that needs no model."""
        if tools is not None:
            registry.tool_format(str(tools))
        if reasoning not in (None, NONE):
            registry.reasoning_format(str(reasoning))

    @cached_property
    def specials(self) -> dict[str, int]:
        """Special tokens by their text."""
        texts = {self.tokenizer.decode([i], skip_special_tokens=False): i for i in sorted(self.tokenizer.special_ids)}
        return {text: i for text, i in texts.items() if text}

    @cached_property
    def shown(self) -> list[str] | None:
        """Special tokens that parsers have to see; a call that nobody asked for is text with its marks."""
        marks = (
            BUILT_IN,
            *(self.reasoning.visible if self.reasoning else ()),
            *(self.tools.visible if self.tools else ()),
        )
        found = [token for token in self.specials if any(token in mark for mark in marks)]
        return found or None

    def begun(self, prompt: str, continued: str) -> Begun:
        """Whether ``prompt`` ends within a thought, or behind one. ``continued``: the message that the answer goes on
        with, if it does."""
        end = prompt.rstrip()
        if self.reasoning is None:
            return None
        if continued:
            first, last = (
                max(map(continued.rfind, m), default=-1) for m in (self.reasoning.begins, self.reasoning.ends)
            )
            return "open" if first > last else "closed"
        if any(end.endswith(mark) for mark in self.reasoning.begins):
            return "open"
        return "closed" if any(end.endswith(mark) for mark in self.reasoning.ends) else None

    def parser(self, request: ChatCompletionRequest, begun: Begun, seed: str) -> Parser:
        """For one answer. Only the grammar of an answer that has to be a call leaves no other spelling of one."""
        functions = request.functions
        tools = self.tools if functions else None
        single = request.parallel_tool_calls is False
        return registry.open_parser(
            tools, self.reasoning, functions, seed=seed, begun=begun, single=single, guided=request.must_call
        )

    def guide(self, request: ChatCompletionRequest, begun: Begun) -> dict[str, Any] | None:
        """The grammar that the request's tools ask for."""
        functions = request.functions
        if self.tools is None or not functions:
            return None
        behind: Any = {"reasoning": self.reasoning, "begun": begun}
        several = request.may_call_again
        if request.must_call:
            return grammar.required_calls(self.tools, functions, self.specials, several, **behind)
        rule = request.response_format.rule() if request.response_format is not None else None
        if rule is not None:
            return grammar.calls_or_answer(self.tools, functions, rule, self.specials, several, **behind)
        if request.strict_functions:
            return grammar.guarded_calls(self.tools, functions, request.strict_functions, self.specials)
        return None
