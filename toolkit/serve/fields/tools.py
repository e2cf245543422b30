"""A request's tools and its choice among them, as OpenAI's chat API has them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field, model_validator

from toolkit.configs.checks import shown
from toolkit.engine.constraints.grammar_format import check_held
from toolkit.errors import UsageError
from toolkit.serve.fields.strict import Strict

NAME = r"^[A-Za-z0-9_.-]{1,128}$"


class Hinted(Strict):
    """What Anthropic's clients mark for its cache, LiteLLM's others too: prefixes are kept here anyway."""

    cache_control: Any = Field(None, exclude=True, description="Without effect")


class Function(Hinted):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema")
    strict: bool | None = Field(None, description="Arguments are guided by the schema")

    @model_validator(mode="after")
    def _held_to(self) -> Function:
        if self.strict and self.parameters is not None:  # without, it takes none
            try:
                check_held("the schema of the parameters", self.parameters)
            except UsageError as error:
                raise ValueError(f"strict: {error}") from error
        return self


class Tool(Hinted):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


class ToolFields(Strict):
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; true: required may be several")

    @model_validator(mode="after")
    def _tools_fit(self) -> ToolFields:
        names = Counter(tool.function.name for tool in self.tools or ())
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ValueError(f"tools: the name {twice!r} is given twice")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("tool_choice: only with tools")
        if strange := [name for name in self._chosen or () if name not in names]:
            raise ValueError(f"tool_choice: {shown(strange[0])} is not among the tools")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        """The names that tool_choice gives, if any."""
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as the chat template takes them."""
        none = self.tool_choice == "none"
        return [] if none else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """Those that the answer may call: name -> JSON schema of the parameters."""
        if self.tool_choice == "none":
            return {}
        all_of_them = {tool.function.name: tool.function.parameters or {} for tool in self.tools or ()}
        return all_of_them if self._chosen is None else {name: all_of_them[name] for name in self._chosen}

    @property
    def strict_functions(self) -> frozenset[str]:
        """Those of them whose arguments are guided wherever they are called."""
        return frozenset(t.function.name for t in self.tools or () if t.function.strict) & self.functions.keys()

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        listed = isinstance(self.tool_choice, AllowedTools) and self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool) or listed

    @property
    def may_call_again(self) -> bool:
        """Whether an answer that has to be a call may be several: asked for, since small models would not stop."""
        return self.parallel_tool_calls is True and not isinstance(self.tool_choice, NamedTool)
