"""llama.cpp's own routes: POST /completion, /infill and /apply-template, GET /props and /slots."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response as HttpResponse

from toolkit import __version__
from toolkit.serve.generation.plain import Plain
from toolkit.serve.generation.read import parse, refuse_pictures, translated
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.openapi.schema import EVENTS, answered, describe
from toolkit.serve.http.replies import COMMENT, EventReply, JsonReply, Wire, event, json_response
from toolkit.serve.llama_cpp.answers import LlamaAnswer, LlamaPrompt, LlamaProps, LlamaSlot
from toolkit.serve.llama_cpp.fields import Generation, InfillRequest, LlamaRequest, TemplateRequest
from toolkit.serve.llama_cpp.told import Told, settings
from toolkit.serve.openai.infill import with_gap
from toolkit.serve.state import ServerState

router = APIRouter()
BODIES: list[type[BaseModel]] = [LlamaRequest, InfillRequest, TemplateRequest]
WIRE = Wire(event, ApiError.envelope, ping=COMMENT)  # without OpenAI's [DONE]


@router.post(
    "/completion", **describe(LlamaRequest, "Continue a text, as llama.cpp has it", LlamaAnswer, stream=EVENTS)
)
async def completion(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, LlamaRequest)
    return await _answer(state, asked, asked.prompt, size)


@router.post(
    "/infill", **describe(InfillRequest, "Fill a gap in a text, as llama.cpp has it", LlamaAnswer, stream=EVENTS)
)
async def infill(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, InfillRequest)
    gap = with_gap(state.engine.tokenizer, "input_prefix", asked.input_prefix, asked.input_suffix, asked.prompt or "")
    others = "".join(f"{extra.text}\n" for extra in asked.input_extra or ())
    return await _answer(state, asked, others + gap, size)


async def _answer(state: ServerState, asked: Generation, prompt: str | list[int], size: int) -> HttpResponse:
    model = asked.model or state.model_name
    request = await translated(state, lambda: asked.asked(model, prompt), size)
    state.admit(request, request.token_limit)
    told = Told(asked, Plain(state, request, f"llama-{uuid.uuid4().hex}"))
    return EventReply(told.chunks(), WIRE) if asked.stream else JsonReply(told.whole, WIRE)


@router.post("/apply-template", **describe(TemplateRequest, "The prompt that a conversation becomes", LlamaPrompt))
async def apply_template(raw: Request) -> HttpResponse:
    state, asked, size = await parse(raw, TemplateRequest)
    state.check_ready(asked.model or state.model_name, waits=False)

    def render() -> str:
        messages = [message.for_template() for message in asked.messages]
        refuse_pictures(messages, "messages", "a prompt is told as text alone; leave the images out")
        return asked.render(state.template_of(asked.model or state.model_name), messages)

    return json_response({"prompt": await state.lanes.run(render, size)})


@router.get("/props", **answered("What the server is, as llama.cpp tells it", LlamaProps))
async def props(raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    engine = state.engine
    drawn = settings(state.defaults, engine.session_len) | {"n_predict": -1}
    told: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": engine.session_len, "speculative": False, "params": drawn},
        "total_slots": engine.max_batch_size,
        "model_path": state.model_name,  # where it lies is not told to clients
        "model_alias": state.model_name,
        "chat_template": state.template.source,
        "modalities": {"vision": state.eyes is not None, "audio": False},
        "build_info": f"toolkit {__version__}",
        "is_sleeping": state.sleeping,
    }
    return json_response(told)


@router.get("/slots", **answered("Places in the batch, as llama.cpp tells of them", list[LlamaSlot]))  # type: ignore[arg-type]
async def slots(raw: Request) -> HttpResponse:
    state: ServerState = raw.app.state.server
    engine, busy = state.engine, len(state.active)
    if raw.query_params.get("fail_on_no_slot", "0") not in ("", "0") and busy >= engine.max_batch_size:
        raise ApiError(503, "no slot available; try again later", code="no_slot")
    common = {"n_ctx": engine.session_len, "speculative": False}
    return json_response([{"id": i, **common, "is_processing": i < busy} for i in range(engine.max_batch_size)])
