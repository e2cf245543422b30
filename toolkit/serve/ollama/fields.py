"""What clients may send to /api/…: Ollama's fields.

Options that set a machine up (``num_ctx``, ``num_gpu`` …) and ``keep_alive`` are stepped over: the server was started
with its own. Any other unknown field is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field, model_validator

from toolkit.serve.fields.parameters import stepping_over
from toolkit.serve.fields.protocol import Texts
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.fields.tools import Tool
from toolkit.serve.llama_cpp.sampling import LlamaSampling, MostTokens

LATEST = ":latest"  # what Ollama's clients put behind a name without a tag


def served_as(asked: str, names: Collection[str]) -> str:
    """The name among ``names`` that a client of Ollama's means, which may have put ``LATEST`` behind it."""
    return asked if asked in names else asked.removesuffix(LATEST)


@stepping_over(
    "num_ctx num_batch num_gpu main_gpu num_thread num_keep numa low_vram use_mmap use_mlock f16_kv logits_all "
    "vocab_only embedding_only"
)
class Options(LlamaSampling):
    num_predict: MostTokens = None


class Named(Strict):
    model: ModelName = ""
    keep_alive: Any = Field(None, description="Stepped over: the model stays")


class Answering(Named):
    """What /api/generate and /api/chat share."""

    stream: bool | None = Field(None, description="Default: true")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON schema")
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: Any = Field(None, description="Stepped over: a prompt that does not fit is refused")
    shift: Any = Field(None, description="Stepped over: an answer ends where the session does")

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Answering:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        return self


class CalledFunction(Strict):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class Call(Strict):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = Field(None, description="Each the file in base64")
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    name: str | None = Field(None, description="Of tool_name, in clients of 2024")
    tool_call_id: str | None = None


class ChatRequest(Answering):
    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[Tool] | None = None


class OllamaGenerateRequest(Answering):
    prompt: str | None = None
    suffix: str | None = Field(None, description="What comes behind the gap, for models that were trained on gaps")
    system: str | None = None
    images: list[str] | None = Field(None, description="Each the file in base64")
    raw: bool | None = Field(None, description="The prompt as it is, without the chat template")
    template: str | None = Field(None, description="Refused unless empty: the server was started with one")
    context: list[int] | None = Field(None, description="Refused unless empty: /api/chat takes conversations")

    @model_validator(mode="after")
    def _can_be_done(self) -> OllamaGenerateRequest:
        if self.template:
            raise ValueError("template: cannot be set by a request; start the server with --chat-template")
        if self.context:
            raise ValueError("context: not supported; send the conversation to /api/chat")
        beside = "raw=true" if self.raw else "suffix"
        for name in ("images", "system", "think") if self.raw or self.suffix else ():
            if getattr(self, name):
                raise ValueError(f"{name}: not with {beside}, which goes round the chat template")
        return self


class EmbedRequest(Named):
    input: Texts
    truncate: bool | None = Field(None, description="Cut a text that is too long; default true")
    dimensions: int | None = Field(None, ge=1, le=1 << 20, description="Keep so many of the first")
    options: dict[str, Any] | None = Field(None, description="Stepped over")


class OldEmbedRequest(Named):
    """The older form, of one text."""

    prompt: str
    options: dict[str, Any] | None = Field(None, description="Stepped over")


class ShowRequest(Strict):
    model: str | None = Field(None, description="Default: the model that is served, of several the first")
    name: str | None = Field(None, description="An older name of model")
    verbose: bool | None = Field(None, description="Stepped over")
