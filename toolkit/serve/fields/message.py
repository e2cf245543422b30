"""A conversation as clients send it: messages and the parts of their contents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from toolkit.chat.messages import TOOL_ROLES
from toolkit.configs.checks import shown
from toolkit.serve.fields.strict import Strict
from toolkit.serve.fields.tools import Hinted
from toolkit.serve.fields.volatile import without_header

CONTENT = str | list[dict[str, Any]] | dict[str, Any]


class TextPart(Strict):
    type: Literal["text"] = "text"
    text: str


def _text_parts(value: Any) -> Any:
    """A message's content: a string, OpenAI's list of parts (text, images, videos), or the object of a tool."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, (str, list)):
        raise ValueError(f"expected a string or a list of parts, found {shown(value, 40)}")
    for i, part in enumerate(value if isinstance(value, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "video_url"):
            _url(i, kind, part)
        elif kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            others = "" if kind == "text" else ", or an image_url or video_url"
            raise ValueError(
                f"part {i}: expected {{'type': 'text', 'text': …}}{others}, found {shown(kind or part, 40)}"
            )
    return value


def _url(i: int, kind: str, part: dict[str, Any]) -> None:
    given = part.get(kind)
    if not isinstance(given.get("url") if isinstance(given, dict) else given, str):
        raise ValueError(f"part {i}: expected {{'type': '{kind}', '{kind}': {{'url': …}}}}, found {shown(given, 40)}")


class Message(Hinted):
    role: Literal["system", "developer", "user", "assistant", "tool", "ipython", "environment"]
    content: Annotated[Any, PlainValidator(_text_parts, json_schema_input_type=CONTENT)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="vLLM's name of reasoning_content")
    # The rest of an answer of OpenAI's own, which clients send back as it came:
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    type: Literal["text", "message"] | None = None  # lm-eval's mark, and that of OpenAI's other API

    @model_validator(mode="after")
    def _one_name(self) -> Message:
        self.reasoning_content = self.reasoning_content or self.reasoning
        return self

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        said = bool(self.tool_calls or self.refusal or self.reasoning_content)
        null = "content" in self.model_fields_set  # an answer that was a thought alone, of which it is left out
        if self.content is None and not (self.role == "assistant" and (said or null)):
            article = "an" if self.role in ("assistant", "ipython", "environment") else "a"
            raise ValueError(f"{article} {self.role} message needs content")
        if isinstance(self.content, dict) and self.role not in TOOL_ROLES:
            raise ValueError(f"content: expected a string or a list of parts, found {shown(self.content, 40)}")
        return self

    @model_validator(mode="after")
    def _refusal_as_text(self) -> Message:
        """What an assistant has refused with is what it has said."""
        if isinstance(self.content, list):
            refused = [i for i, part in enumerate(self.content) if part["type"] == "refusal"]
            if refused and self.role != "assistant":
                raise ValueError(f"content: part {refused[0]}: a refusal is an assistant's, not a {self.role}'s")
            for i in refused:
                self.content[i] = {"type": "text", "text": self.content[i]["refusal"]}
        elif self.content is None:
            self.content = self.refusal
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; few know the role ``developer``."""
        keys = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
        message = self.model_dump(include=keys, exclude_none=True)
        if self.reasoning_content:
            message["thinking"] = self.reasoning_content  # as gpt-oss's template calls it
        if self.role not in ("system", "developer"):
            return message
        if isinstance(self.content, str):
            message["content"] = without_header(self.content)
        elif isinstance(self.content, list):
            parts = [{**x, "text": without_header(x["text"])} if "text" in x else x for x in self.content]
            message["content"] = [part for part in parts if part.get("text") != ""]
        return {**message, "role": "system"}


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Messages = Annotated[
    list[Message], BeforeValidator(_as_messages, json_schema_input_type=str | list[Message]), Field(min_length=1)
]
