"""``server_cls`` of ``ray.serve.llm``: our engine where Ray's own server has vLLM, for applications that are made of
``LLMConfig`` and ``build_openai_app``.

    LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": "/models/demo-engine"},
        engine_kwargs={"session_len": 4096},   # fields of TurbomindEngineConfig
        server_cls="toolkit.serve.ray.llm.ToolkitServer",
    )

Requests and answers are the classes of vLLM, or of SGLang, of which Ray wants one installed; none of them runs a model
here.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json, to_json
from ray.llm._internal.serve.core.configs import openai_api_models as models
from ray.serve.llm import LLMConfig
from starlette.types import ASGIApp

from toolkit.base.record import plain, read
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.errors import UsageError
from toolkit.serve.ray.asked import Asked
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model
from toolkit.serve.ray.replica import Replica

JSON = [(b"content-type", b"application/json")]


class ToolkitServer:
    """Implements Ray's LLMServerProtocol. Raises UsageError for an engine_kwargs that is none of ours."""

    def __init__(self, llm_config: LLMConfig) -> None:
        self._config = llm_config
        loading = llm_config.model_loading_config
        try:
            config = read(TurbomindEngineConfig, dict(llm_config.engine_kwargs))
        except ValueError as error:
            raise UsageError(f"engine_kwargs.{error}") from None
        source = loading.model_source or llm_config.model_id
        if not isinstance(source, str):
            raise UsageError("model_source: expected a path or a hub id, found a mirror of a bucket")
        model = Model.of(source, config, None, llm_config.model_id)
        self._replica = Replica(plain(model), plain(RaySettings()))

    async def start(self) -> None:
        """The engine is open already."""

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """What the application gives, a core and no GPU where it gives nothing."""
        found = copy.deepcopy(llm_config.deployment_config)
        found["ray_actor_options"] = {"num_cpus": 1} | found.get("ray_actor_options", {})
        return found

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Where clients' connections come here directly."""
        return self._replica.app

    async def check_health(self) -> None:
        self._replica.check_health()

    async def llm_config(self) -> LLMConfig:
        return self._config

    def chat(self, request: BaseModel, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answered("/v1/chat/completions", request, models.ChatCompletionResponse)

    def completions(self, request: BaseModel, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answered("/v1/completions", request, models.CompletionResponse)

    def embeddings(self, request: BaseModel, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answered("/v1/embeddings", request, models.EmbeddingResponse)

    def score(self, request: BaseModel, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answered("/v1/score", request, models.ScoreResponse)

    def tokenize(self, request: BaseModel, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answered("/tokenize", request, models.TokenizeResponse)

    def detokenize(self, request: BaseModel, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._answered("/detokenize", request, models.DetokenizeResponse)

    async def _answered(self, path: str, request: BaseModel, kind: type[BaseModel]) -> AsyncGenerator[Any, None]:
        """Events of a stream, or one answer of ``kind``; an ErrorResponse in its place."""
        body = to_json(request.model_dump(mode="json", exclude_unset=True, exclude_none=True))
        status, streams, whole = 0, False, b""
        async with aclosing(self._replica.answer(Asked("POST", path, JSON, body))) as sent:
            async for messages in sent:
                for message in messages:
                    if message["type"] == "http.response.start":
                        status = message["status"]
                        streams = status == 200 and _is_stream(message["headers"])
                    elif streams:
                        if message.get("body"):
                            yield message["body"].decode()
                    else:
                        whole += message.get("body", b"")
        if not streams:
            yield kind.model_validate(from_json(whole)) if status == 200 else _error(status, whole)


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)


def _error(status: int, body: bytes) -> BaseModel:
    told = from_json(body).get("error", {}) if body else {}
    error = {
        "message": told.get("message", f"HTTP {status}"),
        "type": told.get("type") or "server_error",
        "param": told.get("param"),
        "code": status,
    }
    found: BaseModel = models.ErrorResponse.model_validate({"error": error})
    return found
