"""A server class for ``ray.serve.llm``: ``LLMConfig(server_cls="toolkit.serve.ray.llm:Server", …)``. Ray's ingress and
routers stand in front of our replicas, in place of our own front."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

from ray.serve.llm import LLMConfig
from ray.serve.llm.openai_api_models import ChatCompletionResponse, CompletionResponse, EmbeddingResponse, ErrorResponse

from toolkit.base.record import plain, read
from toolkit.engine.load.setup import CONFIGS
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.ray.asked import Asked
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.ray.plan import Model
from toolkit.serve.ray.replica import Replica

JSON = (b"content-type", b"application/json")
_OWN = {f.name for f in fields(RaySettings)} - {"replicas", "model_name", "ray_address", "write_config"}


class Server:
    """Implements Ray's ``LLMServerProtocol``. ``engine_kwargs``: options of ``tool serve ray`` by their Python names
    (requests call adapters MODEL:NAME, as Ray routes them); ``backend``: turbomind (default) or pytorch. Raises
    ToolkitError, UsageError."""

    def __init__(self, llm_config: LLMConfig) -> None:
        self._config = llm_config
        model, settings = _read(llm_config)
        self._replica = Replica(plain(model), plain(settings))

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Of Ray Serve's deployment: what the config says; a core where it does not say what a replica needs."""
        found: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        actor = found.setdefault("ray_actor_options", {})
        actor.setdefault("num_cpus", 1)
        if llm_config.runtime_env:
            actor.setdefault("runtime_env", {}).update(llm_config.runtime_env)
        return found

    async def start(self) -> None:
        """It has, when it was made."""

    async def check_health(self) -> None:
        self._replica.check_health()

    async def llm_config(self) -> LLMConfig:
        return self._config

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for part in self._answer("/v1/chat/completions", request, ChatCompletionResponse):
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for part in self._answer("/v1/completions", request, CompletionResponse):
            yield part

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for part in self._answer("/v1/embeddings", request, EmbeddingResponse):
            yield part

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        from ray.llm._internal.serve.core.configs.openai_api_models import ScoreResponse

        async for part in self._answer("/v1/score", request, ScoreResponse):
            yield part

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        from ray.llm._internal.serve.core.configs.openai_api_models import TokenizeResponse

        async for part in self._answer("/tokenize", request, TokenizeResponse):
            yield part

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        from ray.llm._internal.serve.core.configs.openai_api_models import DetokenizeResponse

        async for part in self._answer("/detokenize", request, DetokenizeResponse):
            yield part

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        yield _error(501, {"message": "transcriptions: not served by this package", "type": "NotImplementedError"})

    async def _answer(self, path: str, request: Any, kind: type[Any]) -> AsyncGenerator[Any, None]:
        """Events of a stream as they are, a whole answer as ``kind``, or an ErrorResponse."""
        body = json.dumps(request.model_dump(mode="json", by_alias=True, exclude_unset=True)).encode()
        asked = Asked("POST", path, [JSON], body)
        status, streams, whole = 500, False, b""
        async with aclosing(self._replica.answer(asked)) as answer:
            async for messages in answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        status = message["status"]
                        streams = dict(message["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
                    else:
                        whole += message.get("body", b"")
                events, end, rest = whole.rpartition(b"\n\n")
                if streams and status == 200 and end:
                    whole = rest
                    yield (events + end).decode()
        if streams and status == 200:
            return
        told = json.loads(whole)
        yield kind.model_validate(told) if status == 200 else _error(status, told["error"])


def _error(status: int, told: dict[str, Any]) -> Any:
    return ErrorResponse.model_validate(
        {"error": {"message": told["message"], "type": told["type"], "param": told.get("param"), "code": status}}
    )


def _read(config: LLMConfig) -> tuple[Model, RaySettings]:
    """Raises UsageError for an option that there is not, ToolkitError for a model that cannot be read."""
    given = dict(config.engine_kwargs)
    backend = given.pop("backend", "turbomind")
    if backend not in CONFIGS:
        raise UsageError(f"engine_kwargs: backend: expected {' or '.join(CONFIGS)}, found {backend!r:.40}")
    if isinstance(adapters := given.get("adapters"), dict):  # Ray routes requests to them by such names
        given["adapters"] = {f"{config.model_id}:{name}": path for name, path in adapters.items()}
    template = given.pop("chat_template", None)
    try:
        settings = read(RaySettings, {name: given.pop(name) for name in _OWN & set(given)})
        engine = read(CONFIGS[backend], given)
    except ValueError as error:
        raise UsageError(f"engine_kwargs: {error}") from None
    loading: Any = config.model_loading_config
    source = loading.model_source or config.model_id
    if not isinstance(source, str):
        raise ToolkitError("model_source: expected a name or a directory, found a bucket; copy it to every machine")
    model = Model.of(source, engine, template, config.model_id)
    return replace(model, fingerprint=None), settings  # nothing to hold this machine's files against
