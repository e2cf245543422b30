"""``LLMEngine`` of Dynamo's backend contract (``dynamo.common.backend``), over our engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig as Registered
from dynamo.common.backend import LLMEngine, WorkerConfig
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from toolkit.chat.settings import of_model
from toolkit.configs.engine import EngineConfig
from toolkit.configs.moving import EngineRole
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.serve.dynamo.asked import chunk_of, config_of, lent, prefilled
from toolkit.serve.dynamo.options import DynamoSettings

logger = logging.getLogger("toolkit.serve")
LOOK_S = 1.0  # between two looks at how full the cache is
MODES = {
    EngineRole.Hybrid: DisaggregationMode.AGGREGATED,
    EngineRole.Prefill: DisaggregationMode.PREFILL,
    EngineRole.Decode: DisaggregationMode.DECODE,
}


class Engine(LLMEngine):
    """``path``: the model's directory, from which the front end has its tokenizer and template, too."""

    def __init__(self, path: Path, config: EngineConfig, settings: DynamoSettings) -> None:
        self._path, self._config, self._settings = path, config, settings
        self._engine: AsyncEngine | None = None
        self._defaults = of_model(path)
        self._snapshots: Any = None
        self._looks: Future[None] | None = None
        self._linked: set[str] = set()

    @property
    def name(self) -> str:
        return self._settings.model_name or self._path.name

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Engine, WorkerConfig]:
        raise UsageError("dynamo: this worker is started by `tool serve dynamo MODEL`, which has its options")

    def worker(self) -> WorkerConfig:
        given = self._settings
        return WorkerConfig(
            namespace=given.namespace,
            component=given.component,
            endpoint=given.endpoint,
            model_name=str(self._path),
            served_model_name=self.name,
            endpoint_types=given.endpoint_types,
            discovery_backend=given.discovery_backend,
            request_plane=given.request_plane,
            event_plane=given.event_plane,
            tool_call_parser=given.dyn_tool_call_parser,
            reasoning_parser=given.dyn_reasoning_parser,
            enable_kv_routing=not given.no_kv_events,
            disaggregation_mode=MODES[EngineRole(self._config.role)],
        )

    @property
    def _opened(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineShutdown("the engine is not open")
        return self._engine

    async def start(self, worker_id: int) -> Registered:
        self._loop = asyncio.get_running_loop()
        self._engine = engine = await asyncio.to_thread(self._open)
        plan = engine.plan
        return Registered(
            model=str(self._path),
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=plan.session_len,
                kv_cache_block_size=plan.block_size,
                total_kv_blocks=plan.num_blocks[0],
                max_num_seqs=plan.max_batch_size,
                max_num_batched_tokens=plan.max_prefill_token_num,
            ),
        )

    def _open(self) -> AsyncEngine:
        return AsyncEngine.open(self._path, backend_config=self._config, progress=logger.info)

    async def generate(self, request: GenerateRequest, context: Any) -> AsyncGenerator[GenerateChunk, None]:
        engine, tokens = self._opened, token_ids_to_list(request["token_ids"])
        try:
            config = config_of(request, self._defaults)
            if self._config.role == EngineRole.Prefill:
                config = GenerationConfig(max_new_tokens=1, with_cache=True)
            await self._link(request)
        except UsageError as error:
            raise InvalidArgument(str(error)) from error
        model = request.get("model")
        adapter = model if model in engine.adapters.names else None
        async with aclosing(engine.generate(tokens, config, adapter=adapter)) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "error":
                    raise _error(delta)
                chunk = chunk_of(delta, self._text)
                if delta.finish_reason is not None and self._config.role == EngineRole.Prefill:
                    chunk["disaggregated_params"] = lent(engine.peers.info())
                yield chunk

    async def _link(self, request: GenerateRequest) -> None:
        """Take blocks from the engine that has computed the prompt; without it the prompt is computed here."""
        told = prefilled(request)
        name = told.get("engine_id")
        if self._config.role != EngineRole.Decode or not name or name in self._linked:
            return
        try:
            arguments = str(name), str(told["address"]), told["tls"] is True, dict(told["in_common"])
            await asyncio.to_thread(self._opened.peers.connect, *arguments)
            self._linked.add(name)
        except (ToolkitError, TimeoutError, LookupError, TypeError, ValueError) as error:
            logger.warning("no blocks are taken from %s, prompts are computed here: %s", str(name)[:8], error)

    def _text(self, token: int) -> str:
        return self._opened.tokenizer.decode([token])

    async def cleanup(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
            self._looks = None
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
            self._engine = None

    async def health_check_payload(self) -> dict[str, Any] | None:
        bos = self._opened.tokenizer.bos_id
        found: dict[str, Any] = build_health_check_payload(bos_token_id=1 if bos is None else bos)
        return found

    # -- what routers are told ------------------------------------------------------------------

    async def kv_event_sources(self) -> list[KvEventSource]:
        if self._settings.no_kv_events:
            return []
        return [PushSource(on_ready=lambda publisher: self._opened.tell_blocks(Events(publisher)), dp_rank=0)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher
        self._looks = asyncio.run_coroutine_threadsafe(self._look(), self._loop)

    async def _look(self) -> None:
        engine = self._opened
        total = engine.plan.num_blocks[0]
        while True:
            with suppress(ToolkitError):
                stats = engine.stats()
                asked, hit = stats["prefix_queried_tokens"], stats["prefix_hit_tokens"]
                share = float(stats["kv_usage"])
                told = ComponentSnapshot(
                    kv_used_blocks=round(share * total),
                    kv_total_blocks=total,
                    gpu_cache_usage=share,
                    kv_cache_hit_rate=hit / asked if asked else None,
                    dp_rank=0,
                )
                self._snapshots.publish(0, told)
            await asyncio.sleep(LOOK_S)


class Events:
    """Implements ``toolkit.engine.cache.told.Listener`` for Dynamo's publisher of events."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def stored(self, tokens: Sequence[int], keys: Sequence[bytes], parent: bytes | None, adapter: int) -> None:
        if adapter >= 0:  # a router would need its name, which numbers do not tell
            return
        size = len(tokens) // len(keys)
        self._publisher.publish_stored(
            token_ids=list(tokens),
            num_block_tokens=[size] * len(keys),
            block_hashes=[_number(key) for key in keys],
            parent_hash=None if parent is None else _number(parent),
        )

    def removed(self, key: bytes) -> None:
        self._publisher.publish_removed(block_hashes=[_number(key)])


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)


def _error(delta: Response) -> Exception:
    text = delta.error_message or "the request failed"
    if delta.error_code == 400:
        return InvalidArgument(text)
    return EngineShutdown(text) if delta.error_code == 503 else Unknown(text)


def serve(path: Path, config: EngineConfig, settings: DynamoSettings) -> None:
    """Until SIGTERM or SIGINT. Raises ToolkitError, UsageError."""

    async def made(argv: list[str] | None) -> tuple[Engine, WorkerConfig]:
        engine = Engine(path, config, settings)
        return engine, engine.worker()

    try:
        run(Engine, [], made)
    except (ToolkitError, UsageError):
        raise
    except Exception as error:  # of many kinds, most of Rust
        raise ToolkitError(f"Dynamo's worker has ended: {' '.join(str(error).split())[:300]}") from error
