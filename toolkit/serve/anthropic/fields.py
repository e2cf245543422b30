"""What clients may send to /v1/messages and /v1/messages/count_tokens: Anthropic's fields.

What a block has besides the fields here (cache hints, citations, callers) is stepped over, as are tools that Anthropic
runs itself and the fields of ``MessagesRequest`` that say so; any other unknown field is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from toolkit.configs.checks import shown
from toolkit.configs.limits import MOST
from toolkit.serve.fields.parameters import stepping_over, with_parameters
from toolkit.serve.fields.protocol import StopWord
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.fields.tools import NAME


class Block(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, defer_build=True)


class Text(Block):
    type: Literal["text"]
    text: str


def _blocks(value: Any) -> Any:
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[Text], BeforeValidator(_blocks, json_schema_input_type=str | list[Text])]


class Thinking(Block):
    type: Literal["thinking"]
    thinking: str


class Redacted(Block):
    type: Literal["redacted_thinking"]


class ToolUse(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class PlainText(Block):
    type: Literal["text"]
    data: str


class Document(Block):
    type: Literal["document"]
    source: PlainText
    title: str | None = None


class ImageData(Block):
    type: Literal["base64"]
    media_type: str
    data: str


class ImageUrl(Block):
    type: Literal["url"]
    url: str


class Image(Block):
    type: Literal["image"]
    source: ImageData | ImageUrl = Field(discriminator="type")


class SearchResult(Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts


SHOWN = ("text", "image", "document", "search_result")  # kinds that users and tools show
KINDS = (*SHOWN, "thinking", "redacted_thinking", "tool_use", "tool_result")
# Of what Anthropic's own tools did, and hints to its server:
SKIPPED = frozenset(
    "server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result "
    "bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result mcp_tool_use "
    "mcp_tool_result container_upload tool_reference browser_state".split()
)


def _known(kinds: tuple[str, ...], spelled: Any) -> BeforeValidator:
    """As ``_blocks`` (``spelled``: the type of what clients send) without those of SKIPPED; a block that is none of
    ``kinds`` is told of here."""

    def check(value: Any) -> Any:
        blocks, found = _blocks(value), []
        if not isinstance(blocks, list):
            return blocks
        for i, block in enumerate(blocks):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in kinds:
                found.append(block)
            elif not isinstance(kind, str) or kind not in SKIPPED:
                expected = f"expected one of type {', '.join(kinds)}"
                raise ValueError(f"block {i}: {expected}, found {shown(kind or block, 40)}")
        return found

    return BeforeValidator(check, json_schema_input_type=spelled)


Shown = Annotated[Text | Image | Document | SearchResult, Field(discriminator="type")]


class ToolResult(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Shown], _known(SHOWN, str | list[Shown])] = []
    is_error: bool | None = None


AnyBlock = Annotated[
    Text | Image | SearchResult | Thinking | Redacted | ToolUse | ToolResult | Document, Field(discriminator="type")
]


class InputMessage(Block):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[AnyBlock], _known(KINDS, str | list[AnyBlock])]


class Tool(Block):
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _own_tools(value: Any) -> Any:
    """Without those that Anthropic runs (web_search_20250305 …): no model here was told how to call them."""
    if not isinstance(value, list):
        return value
    return [t for t in value if not (isinstance(t, dict) and t.get("type") not in (None, "custom"))]


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name: goes with type 'tool', and only with that")
        return self


class ThinkingConfig(Block):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)


class JsonOutput(Block):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Block):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


@stepping_over(
    "cache_control context_management speed user_profile_id workspace_id betas fallbacks fallback_credit_token "
    "billing_policy"
)
class CountRequest(Strict):
    model: ModelName = ""
    messages: list[InputMessage] = Field(min_length=1)
    system: Texts | None = None
    tools: Annotated[list[Tool], BeforeValidator(_own_tools, json_schema_input_type=list[dict[str, Any]])] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = Field(None, description="An older name of output_config.format")
    thread: Any = Field(None, description="Not here: 400 unless null, in the words by which clients go on without")
    # Not here; an empty value is let through:
    container: None = None
    mcp_servers: list[None] | None = Field(None, max_length=0)
    compaction: None = None


@stepping_over("metadata service_tier inference_geo diagnostics")
@with_parameters("temperature", "top_p", "top_k")
class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, le=1 << 30)
    stop_sequences: list[StopWord] | None = Field(None, max_length=MOST["stop_words"])
    stream: bool | None = None
