"""What clients may send to /v1/responses and /v1/responses/input_tokens: OpenAI's fields.

Tools that OpenAI runs itself (web search, file search …) and items of the input that tell of their work are stepped
over, as are the fields of ``ResponsesRequest`` that say so; any other unknown field is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from toolkit.configs.checks import shown
from toolkit.serve.fields.formats import JsonSchema
from toolkit.serve.fields.parameters import stepping_over, with_parameters
from toolkit.serve.fields.protocol import CacheOptions, Effort, TemplateVariables
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.fields.tools import NAME


class Item(BaseModel):
    """Of the input; what items have besides the fields here (ids, statuses) is stepped over."""

    model_config = ConfigDict(extra="ignore", strict=True, defer_build=True)


class Part(Item):
    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class Picture(Item):
    """``image_url``: a URL or a data URL; ``detail``: as the chat API has it."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] | None = None

    @field_validator("image_url", mode="before")
    @classmethod
    def _no_file(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("expected a URL or a data URL; files (file_id) are not kept here")
        return value


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "picture" if kind == "input_image" else "text"


Texts = Annotated[list[Part], BeforeValidator(_parts, json_schema_input_type=str | list[Part])]
AnyPart = Annotated[Annotated[Part, Tag("text")] | Annotated[Picture, Tag("picture")], Discriminator(_part_kind)]
Parts = Annotated[list[AnyPart], BeforeValidator(_parts, json_schema_input_type=str | list[AnyPart])]


class Said(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    @model_validator(mode="after")
    def _shown_by_users(self) -> Said:
        if self.role != "user" and any(isinstance(part, Picture) for part in self.content):
            raise ValueError(f"input_image: only a user's message takes images, found one of role {self.role}")
        return self


def spelled(name: str, namespace: str | None) -> str:
    """The one name by which models know a tool of a namespace: two may have tools of the same name."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


class Called(Item):
    """``input``: of a custom tool, which takes text."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""
    input: str = ""


class Returned(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


class Thought(Item):
    type: Literal["reasoning"]
    summary: list[Part] = []
    content: list[Part] | None = None


class Referred(Item):
    """Stands for an item of a response that is kept."""

    type: Literal["item_reference"]
    id: str


class Skipped(Item):
    """Of what OpenAI's own tools did."""

    type: str


_KINDS = {
    "message": "said",
    "function_call": "called",
    "custom_tool_call": "called",
    "function_call_output": "returned",
    "custom_tool_call_output": "returned",
    "reasoning": "thought",
    "item_reference": "referred",
}
SKIPPED = frozenset(
    "web_search_call file_search_call computer_call computer_call_output image_generation_call code_interpreter_call "
    "local_shell_call local_shell_call_output shell_call shell_call_output apply_patch_call apply_patch_call_output "
    "tool_search_call tool_search_output mcp_list_tools mcp_approval_request mcp_approval_response mcp_call "
    "additional_tools".split()
)


def _kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else value.type
    return _KINDS.get(kind, "skipped")


AnyItem = Annotated[
    Annotated[Said, Tag("said")]
    | Annotated[Called, Tag("called")]
    | Annotated[Returned, Tag("returned")]
    | Annotated[Thought, Tag("thought")]
    | Annotated[Referred, Tag("referred")]
    | Annotated[Skipped, Tag("skipped")],
    Discriminator(_kind),
]


def _items(value: Any) -> Any:
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for i, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or (kind not in _KINDS and kind not in SKIPPED):
            raise ValueError(f"item {i}: expected one of type {', '.join(_KINDS)}, found {shown(kind or item, 40)}")
    return items


class Tool(Item):
    """``format``: of a custom tool's text; the model is told of it. ``namespace``: that it was listed in."""

    type: Literal["function", "custom"]
    name: str = Field(pattern=NAME)
    namespace: str | None = Field(None, pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


def _own_tools(value: Any) -> Any:
    """Functions and custom tools, those of namespaces among them; without what OpenAI runs."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = _own_tools(tool["tools"])
            found += [{"namespace": tool.get("name"), **t} if isinstance(t, dict) else t for t in inner]
        elif not isinstance(kind, str) or kind in ("function", "custom"):
            found.append(tool)
    return found


class Named(Strict):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class Allowed(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Named] = Field(min_length=1)


class TextFormat(Item):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """As the chat API's response_format."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = JsonSchema(schema=self.schema_ or {}, name=self.name, strict=self.strict)
        return {"type": self.type, "json_schema": schema.model_dump(by_alias=True, exclude_none=True)}


class TextConfig(Item):
    format: TextFormat | None = None


class Reasoning(Item):
    effort: Effort | None = None


Input = Annotated[
    list[AnyItem], BeforeValidator(_items, json_schema_input_type=str | list[AnyItem]), Field(min_length=1)
]


class Talk(Strict):
    """What is read before an answer, the input apart."""

    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Tool], BeforeValidator(_own_tools, json_schema_input_type=list[dict[str, Any]])] | None = None
    tool_choice: Literal["none", "auto", "required"] | Named | Allowed | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateVariables | None = None
    conversation: None = None  # not here; null is let through
    truncation: Any = None  # stepped over


class InputTokensRequest(Talk):
    model: str | None = Field(None, description="Default: the model that is served")
    input: Input | None = None
    personality: Any = None  # stepped over

    @model_validator(mode="after")
    def _says_something(self) -> InputTokensRequest:
        if not (self.input or self.instructions or self.previous_response_id):
            raise ValueError("input: required, but missing")
        return self


@stepping_over(
    "include stream_options max_tool_calls service_tier prompt_cache_key prompt_cache_retention safety_identifier "
    "client_metadata context_management access_programs image"
)
@with_parameters("temperature", "top_p")
class ResponsesRequest(Talk):
    model: ModelName = ""
    input: Input
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 30)
    metadata: dict[str, Any] | None = None
    user: str | None = None
    # Not here; an empty value is let through:
    background: Literal[False] | None = None
    prompt: None = None
    top_logprobs: Any = None
    # Without effect:
    prompt_cache_options: CacheOptions | None = None

    @field_validator("background", mode="before")
    @classmethod
    def _no_background(cls, value: Any) -> Any:
        if value is True:
            raise ValueError("nothing is answered in the background here; leave it out, and stream where it takes long")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        if value not in (None, 0):
            raise ValueError("not supported here; /v1/chat/completions has log-probabilities")
        return value
