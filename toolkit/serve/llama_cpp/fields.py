"""What clients may send to llama.cpp's own routes: /completion, /infill and /apply-template.

Hints about slots and caches are stepped over; any other unknown field is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from toolkit.configs.checks import shown
from toolkit.serve.fields.formats import JsonOrText
from toolkit.serve.fields.message import Messages
from toolkit.serve.fields.parameters import stepping_over
from toolkit.serve.fields.protocol import CompletionRequest, TokenId
from toolkit.serve.fields.strict import Strict
from toolkit.serve.fields.template import TemplateFields
from toolkit.serve.llama_cpp.sampling import LlamaSampling, MostTokens, only


def _biases(value: Any) -> Any:
    """llama.cpp's pairs as OpenAI's object; false stands for never."""
    if not isinstance(value, list):
        return value
    made = {}
    for i, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int) or isinstance(pair[0], bool):
            raise ValueError(f"item {i}: expected [token id, bias], found {shown(pair, 40)}")
        made[str(pair[0])] = -100.0 if pair[1] is False else pair[1]
    return made


@stepping_over("cache_prompt id_slot n_keep n_discard n_cache_reuse timings_per_token sse_ping_interval")
class Generation(LlamaSampling):
    """What /completion and /infill share."""

    model: str | None = Field(None, description="Default: the server's")
    stream: bool | None = None
    n_predict: MostTokens = None
    grammar: str | None = Field(None, description="In GBNF")
    json_schema: JsonOrText | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        dict[str, float] | None,
        BeforeValidator(_biases, json_schema_input_type=dict[str, float] | list[list[Any]] | None),
    ] = None
    n_probs: int | None = Field(None, ge=0, le=20, description="Log-probabilities of so many tokens at each place")
    return_tokens: bool | None = None
    return_progress: bool | None = None
    n_cmpl: Annotated[int | None, only(1)] = Field(None, description="/v1/completions takes n")
    n_indent: Annotated[int | None, only(0)] = None
    min_keep: Annotated[int | None, only(0)] = None
    t_max_predict_ms: Annotated[int | None, only(0, or_below=True)] = None
    post_sampling_probs: Annotated[bool | None, only(False)] = None
    lora: list[Any] | None = Field(None, description="Name an adapter as model")
    samplers: Any = Field(None, description="Refused: their order is fixed")
    response_fields: Any = Field(None, description="Refused: an answer has all fields")

    @model_validator(mode="after")
    def _can_be_done(self) -> Generation:
        for name in ("lora", "samplers", "response_fields"):
            if getattr(self, name):
                raise ValueError(f"{name}: {type(self).model_fields[name].description}; leave it out")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress: only with stream=true")
        if self.grammar and self.json_schema is not None:
            raise ValueError("grammar: not together with json_schema")
        return self

    def asked(self, model: str, prompt: str | list[int]) -> CompletionRequest:
        """The same as a request of our own API. Raises pydantic's ValidationError where that cannot take it."""
        made: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.n_predict,
            "guided_grammar": self.grammar or None,
            "guided_json": self.json_schema,
            "ignore_eos": self.ignore_eos,
            "logit_bias": self.logit_bias,
            "logprobs": self.n_probs or None,
            "stream": self.stream,
            "return_progress": self.return_progress,
            **self.sampling(),
        }
        return CompletionRequest.model_validate(made)


class LlamaRequest(Generation):
    """A text or token ids to continue."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)]


class Extra(Strict):
    filename: str | None = None
    text: str


class InfillRequest(Generation):
    """A gap to fill."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = Field(None, description="What fills the gap begins so")
    input_extra: list[Extra] | None = Field(None, description="Other files, which go before it")


class TemplateRequest(TemplateFields):
    model: str | None = None
    messages: Messages
