"""Text and token ids: /tokenize, /detokenize and /tokenizer_info as vLLM has them (the first two also as llama.cpp has
them), /v1/encode as LMDeploy has it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response as HttpResponse

from toolkit.serve.fields.message import Messages
from toolkit.serve.fields.protocol import TokenId
from toolkit.serve.fields.strict import Strict
from toolkit.serve.fields.template import TemplateFields
from toolkit.serve.generation.read import encode_messages, parse
from toolkit.serve.http.errors import bad_field, not_served
from toolkit.serve.http.openapi.answers import Detokenized, Encoded, Tokens
from toolkit.serve.http.openapi.schema import answered, describe
from toolkit.serve.http.replies import json_response
from toolkit.serve.state import ServerState

router = APIRouter()


class TokenizeRequest(TemplateFields):
    """A text, or a conversation that goes through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages")
    return_token_strs: bool | None = None
    content: str | None = Field(None, description="llama.cpp's name of prompt; tokens around it by add_special alone")
    add_special: bool | None = Field(None, description="llama.cpp's, beside content; default false")
    parse_special: Literal[True] | None = Field(
        None, description="llama.cpp's; no text is read without its special tokens"
    )
    with_pieces: bool | None = Field(None, description="llama.cpp's: each token as {id, piece}")

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if sum(given is not None for given in (self.prompt, self.messages, self.content)) != 1:
            raise ValueError("prompt: expected either it, messages or content")
        if self.content is None and (self.add_special is not None or self.with_pieces):
            raise ValueError(f"{'with_pieces' if self.with_pieces else 'add_special'}: only with content")
        return self

    @property
    def special(self) -> bool:
        """Whether the model's own tokens go around the text."""
        default = bool(self.add_special) if self.content is not None else self.messages is None
        return default if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]


class EncodeRequest(Strict):
    """LMDeploy's: ``do_preprocess`` sends each text through the chat template as a user's message."""

    model: str | None = None
    input: str | Annotated[list[str], Field(min_length=1)]
    do_preprocess: bool | None = None
    add_bos: bool | None = Field(None, description="Put what the model wants around a text; default true")


BODIES: list[type[BaseModel]] = [TokenizeRequest, DetokenizeRequest, EncodeRequest]


def _checked_model(state: ServerState, model: str | None) -> None:
    if model is not None and model not in state.model_names:
        raise not_served(model, state.model_names)


@router.post("/tokenize", **describe(TokenizeRequest, "Token ids of a text or a conversation", Tokens))
async def tokenize(raw: Request) -> HttpResponse:
    state, request, size = await parse(raw, TokenizeRequest)
    _checked_model(state, request.model)
    tokenizer = state.engine.tokenizer

    def render(messages: list[dict[str, Any]]) -> str:
        return request.render(state.template_of(request.model or state.model_name), messages)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, request.special)

    def strings() -> list[str]:
        return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]

    def pieces() -> list[Any]:
        return [{"id": i, "piece": _piece(tokenizer.bytes_of(i))} for i in ids]

    if request.messages is None:
        ids = await state.lanes.run(lambda: encode(request.prompt or request.content or ""), size)
    else:
        ids, *_ = await encode_messages(state, request.messages, render, encode, size)
    texts = await state.lanes.run(strings, size) if request.return_token_strs else None
    told = await state.lanes.run(pieces, size) if request.with_pieces else ids
    limit = state.engine.session_len
    return json_response({"count": len(ids), "max_model_len": limit, "tokens": told, "token_strs": texts})


def _piece(data: bytes) -> str | list[int]:
    """A token as llama.cpp tells it: its bytes where they are no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@router.post("/detokenize", **describe(DetokenizeRequest, "The text of token ids", Detokenized))
async def detokenize(raw: Request) -> HttpResponse:
    state, request, size = await parse(raw, DetokenizeRequest)
    _checked_model(state, request.model)
    tokenizer = state.engine.tokenizer
    if strange := next((i for i in request.tokens if i >= tokenizer.vocab_size), None):
        raise bad_field("tokens", f"expected ids below {tokenizer.vocab_size}, found {strange}")
    text = await state.lanes.run(lambda: tokenizer.decode(request.tokens, False), size)
    return json_response({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's


@router.get(
    "/tokenizer_info", **answered("The tokenizer's configuration, its special tokens and its chat template", None)
)
async def tokenizer_info(raw: Request) -> HttpResponse:
    tokenizer = raw.app.state.server.engine.tokenizer
    own = {k: v for k, v in tokenizer.config.items() if k != "chat_template"}
    template = tokenizer.chat_templates.get("default")
    more = {"chat_template": template} if template else {}
    return json_response({"tokenizer_class": type(tokenizer).__name__} | own | tokenizer.special_tokens | more)


@router.post("/v1/encode", **describe(EncodeRequest, "Token ids of one text or several", Encoded))
async def encode(raw: Request) -> HttpResponse:
    state, request, _ = await parse(raw, EncodeRequest)
    _checked_model(state, request.model)
    special = request.add_bos is not False
    texts = [request.input] if isinstance(request.input, str) else request.input
    state.settings.limits.check_prompts("input", len(texts))

    def work(text: str) -> list[int]:
        if request.do_preprocess:
            return state.template.encode(text)
        return state.engine.tokenizer.encode(text, special)

    rows = [await state.lanes.run(partial(work, text), len(text)) for text in texts]  # others' turns come between
    lengths = [len(row) for row in rows]
    single = isinstance(request.input, str)
    return json_response({"input_ids": rows[0] if single else rows, "length": lengths[0] if single else lengths})
