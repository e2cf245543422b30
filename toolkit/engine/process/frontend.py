"""The engine as the rest of the toolkit uses it: prompts as token ids in, Responses out, while others run beside."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weight_files.find import gguf_name
from toolkit.base.user_path import user_path
from toolkit.configs.engine import EngineConfig
from toolkit.configs.lmdeploy import notices
from toolkit.engine.cache.told import Listener
from toolkit.engine.constraints.grammar_cost import HopelessError, Hostility
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.engine.load.ranks import leads
from toolkit.engine.load.setup import Facts, Packed, Progress, find
from toolkit.engine.load.start import lend, start
from toolkit.engine.process.adapter_names import AdapterNames
from toolkit.engine.process.loop import Loop, ThreadLoop
from toolkit.engine.process.outage import PATIENCE, Outage
from toolkit.engine.process.peers import Peers
from toolkit.engine.process.streams import Streams, polled
from toolkit.engine.process.wakeup import Bell
from toolkit.engine.process.weights import Weights
from toolkit.engine.request import EngineRequest
from toolkit.engine.sampling_params import resolve
from toolkit.engine.text.stream import Asked, RequestStream
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.runners.base import Backend

if TYPE_CHECKING:
    import asyncio

    from toolkit.engine.process.process_loop import Child

log = logging.getLogger(__name__)
# Of a step while nobody watches: `tool batch` then answers 0 to 29 % more lines a second, and as many in each run; with
# no limit no more, and a step of a large model takes minutes.
UNWATCHED_MS = 2000.0
SCORED = GenerationConfig(max_new_tokens=1, prompt_logprobs=0)  # what a request asks for whose prompt alone is scored


class AsyncEngine:
    """One model that serves many requests at once, from any number of threads and event loops.

    ``plan``: how memory was shared out. ``runner_why``: why the model runs otherwise than was asked for or is fastest,
    ``runner_note``: what else there is to say of its runner; "" each. ``outage``: why the engine is down and whether it
    comes back, as it may where it runs in a process of its own; None while it is up. ``adapters``: its LoRA adapters.
    ``weights``: whether they are there, and how they go and come. ``peers``: other engines that it hands blocks over
    to, or takes them from."""

    def __init__(
        self, tokenizer: Tokenizer, model_name: str, adapters: tuple[str, ...] = (), empty: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.adapters = AdapterNames(self._call, adapters, model_name)
        self._streams = Streams()
        self.weights = Weights(self._call, lambda: self._streams.busy and self.healthy, empty)
        self._names = itertools.count()
        self._hostility = Hostility()
        self._bells: WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = WeakKeyDictionary()
        self._closed = False
        self._loop: Loop
        self.peers: Peers
        self._locks: list[IO[bytes]] = []  # on packed weights

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        backend_config: EngineConfig | None = None,
        backend: Backend | None = None,
        progress: Progress | None = None,
        process: bool = False,
        packed: Packed | None = None,
        patience: float = PATIENCE,
        pictures_together: int = 1,
        watched: bool = True,
        child: Child | None = None,
    ) -> AsyncEngine:
        """Open MODEL (directory, .gguf file, hub id, artifact, "demo") and get it ready to run.

        ``backend``: "turbomind" or "pytorch"; None = what ``backend_config`` is for, or what runs here. ``process``:
        run the loop in a process of its own instead of a thread; one without a sign of life for ``patience`` seconds,
        while requests wait, is restarted (0 = never). ``packed``: called with the model's path, returns where its
        weights are to be read, and a lock on them to be held until the end. ``watched``: whether somebody reads tokens
        as they come; else steps with prompts take longer, where the config says nothing. ``progress`` is called with
        one line of text each. ``child``: of ``process``, one that was started before.
        On a machine that is not the first of several, this runs ranks until the first has ended, then ends the program.
        Raises ToolkitError or UsageError, one line.
        """
        if backend not in (None, "turbomind", "pytorch"):
            raise UsageError(f"backend: expected turbomind or pytorch, found {backend!r}")
        tell = progress or log.info
        setup = replace(find(str(model), backend_config, backend, packed), pictures_together=pictures_together)
        if not watched and setup.config.target_step_ms is None:
            setup = replace(setup, config=replace(setup.config, target_step_ms=UNWATCHED_MS))
        for line in notices(setup.config):
            log.warning("%s", line)
        if not leads(setup.config):
            lend(setup, tell)
            raise SystemExit(0)
        adapters = tuple(setup.config.adapters or ())
        begun = None
        if process:
            from toolkit.engine.process.process_loop import Child, ProcessLoop  # multiprocessing, and JSON for it

            begun = (child or Child()).told(setup)
        try:
            engine = cls(Tokenizer.open(setup.tokenizer_dir), _name_of(str(model)), adapters, setup.config.empty_init)
        except BaseException:
            if begun is not None:
                begun.kill()
            raise
        engine._locks = setup.locks
        if begun is not None:
            engine._loop = ProcessLoop(setup, engine._streams.deliver, engine._lost, tell, patience, begun)
        else:
            opened = start(setup, lambda: engine.tokenizer, tell)
            engine._loop = ThreadLoop(*opened, engine._streams.deliver, engine._lost)
        engine.peers = Peers(setup.config, engine._loop, engine._facts)
        if progress is None:
            for notice in engine.plan.notices:
                log.warning("%s", notice)
        return engine

    # -- facts ----------------------------------------------------------------------------------

    def _facts(self) -> Facts:
        """For others: with other weights than its files hold it hands nothing over."""
        return self._loop.facts if self.weights.new is None else self._loop.facts.alone()

    @property
    def plan(self) -> MemoryPlan:
        return self._loop.facts.plan

    def settle(self) -> None:
        """Wait until steps take their usual time, before they are measured."""
        self._call("settle")

    def trace_ranks(self, on: bool) -> list[list[list[Any]]]:
        """As ``EngineCore.trace_ranks``."""
        found: list[list[list[Any]]] = self._call("trace_ranks", on)
        return found

    @property
    def session_len(self) -> int:
        return self._loop.facts.plan.session_len

    @property
    def max_batch_size(self) -> int:
        return self._loop.facts.plan.max_batch_size

    @property
    def runner_why(self) -> str:
        return self._loop.facts.runner_why

    @property
    def runner_note(self) -> str:
        return self._loop.facts.runner_note

    @property
    def runner_name(self) -> str:
        return self._loop.facts.runner

    @property
    def backend(self) -> Backend:
        return self._loop.facts.backend

    @property
    def blind(self) -> bool:
        """Whether it was opened without what the model sees with."""
        return self._loop.facts.blind

    @property
    def device(self) -> str:
        return self._loop.facts.device

    @property
    def dtype(self) -> str:
        return self._loop.facts.dtype

    @property
    def outage(self) -> Outage | None:
        return Outage("it was closed", restarting=False) if self._closed else self._loop.outage

    @property
    def healthy(self) -> bool:
        return self.outage is None

    def stats(self) -> dict[str, Any]:
        """Gauges and counters (see EngineCore.stats), and the number of requests the front end follows."""
        return self._loop.stats() | {"requests": len(self._streams)}

    # -- generation -----------------------------------------------------------------------------

    async def generate(
        self, token_ids: list[int], gen_config: GenerationConfig | None = None, **more: Any
    ) -> AsyncGenerator[Response, None]:
        """Deltas of one generation; the last one has a finish_reason, "error" with a message where it failed. Leaving
        the iteration early aborts the request. ``more``: fields of ``Asked``."""
        import asyncio  # what generates without a loop does without it

        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        bell = self._bells.setdefault(loop, Bell(loop))

        def wake() -> None:
            bell.ring(event)

        asked = Asked(token_ids, gen_config, **more)
        stream, refused = self._begin(asked, wake)
        if stream is None:
            assert refused is not None
            yield refused
            return
        try:
            while not stream.ended:
                delta = stream.poll()
                if delta is None:
                    await event.wait()
                    event.clear()
                else:
                    if stream.ended:  # not when the consumer comes back
                        self._retire(stream)
                    yield delta
        finally:
            self._retire(stream)

    def generate_sync(
        self, token_ids: list[int], gen_config: GenerationConfig | None = None, **more: Any
    ) -> Generator[Response, None, None]:
        """``generate`` for threads without an event loop."""
        with closing(self.generate_all([Asked(token_ids, gen_config, **more)])) as deltas:
            for _, delta in deltas:
                yield delta

    def generate_all(self, asked: Sequence[Asked]) -> Generator[tuple[int, Response], None, None]:
        """Deltas of several generations side by side, each with its place in ``asked``, for threads without an event
        loop. Leaving the iteration early aborts those that still run."""
        woken: SimpleQueue[int] = SimpleQueue()
        streams: dict[int, RequestStream] = {}
        refusals: list[tuple[int, Response]] = []
        try:
            for i, one in enumerate(asked):
                stream, refused = self._begin_alone(one, partial(woken.put, i))
                if stream is not None:
                    streams[i] = stream
                elif refused is not None:
                    refusals.append((i, refused))
            yield from refusals
            while streams:
                i = woken.get()
                if i not in streams or (delta := polled(streams[i])) is None:
                    continue  # an earlier delta has taken what it was woken for
                if streams[i].ended:
                    self._retire(streams.pop(i))
                yield i, delta
        finally:
            for stream in streams.values():
                self._retire(stream)

    def score(self, token_ids: list[int], adapter: str | None = None) -> NDArray[np.float32]:
        """Log-probability of each token after the first given those before it, float32 [len(token_ids) - 1].

        ``adapter``: one of the engine's, None for the plain model. Computes every position (no prefix hits).
        Raises ToolkitError where the request fails.
        """
        found: list[dict[int, float] | None] = []
        for delta in self.generate_sync(token_ids, SCORED, only="score", adapter=adapter):
            if delta.finish_reason in ("error", "abort"):
                raise ToolkitError(delta.error_message or "the request was aborted")
            found = delta.prompt_logprobs or found
        return np.array([p[t] for p, t in zip(found[1:], token_ids[1:], strict=True) if p is not None], np.float32)

    def abort(self, request_id: str) -> None:
        """End a request; its stream yields what is left and a Response with finish_reason "abort"."""
        if (own := self._streams.id_of(request_id)) is not None:
            self._loop.abort(own)

    def end_session(self, session: str) -> None:
        """Let the KV blocks kept for a session be used for others."""
        if not self._closed:
            self._loop.end_session(session)

    def tell_blocks(self, listener: Listener) -> None:
        """Have ``listener`` told which whole blocks the prefix cache has. Raises UsageError for an engine in another
        process."""
        if not isinstance(self._loop, ThreadLoop):
            raise UsageError("tell_blocks: expected an engine in this process (process=False)")
        self._call("tell_blocks", listener)

    def close(self) -> None:
        """End what runs and free the model. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        for lock in self._locks:
            lock.close()
        self.weights.close()
        self._streams.fail_all("the engine was closed")

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- requests in flight ---------------------------------------------------------------------

    def _begin(self, asked: Asked, wake: Callable[[], None]) -> tuple[RequestStream | None, Response | None]:
        """A stream whose request is on its way, or the Response that refuses it."""
        config, token_ids = asked.gen_config or GenerationConfig(), list(asked.token_ids)
        number = next(self._names)
        name = f"request-{number}" if asked.request_id is None else asked.request_id
        own = name if asked.request_id is None else f"{name}#{number}"
        try:
            params = resolve(config, self.tokenizer, len(token_ids), self.session_len)
            params = replace(params, hurried=self._hostility.there)
            number = self.adapters.number(asked.adapter)
            pictures = list(asked.pictures)
            request = EngineRequest(
                own,
                token_ids,
                params,
                asked.session,
                asked.only,
                asked.priority,
                number,
                pictures,
                asked.progress,
                asked.whose,
                list(asked.prediction),
                second=asked.second,
                lend=config.with_cache,
                room=asked.room,
                source=(config.migration_request or {}).get("remote_engine_id", ""),
                salt=asked.salt,
            )
            if config.preserve_cache and request.session is None:
                request.session = self.peers.preserve(name)
            stream = RequestStream(own, token_ids, config, self.tokenizer, wake, asked.timings, name)
            self._send(stream, request, config.logits_processors or [])
        except ToolkitError as e:
            if isinstance(e, HopelessError):
                self._hostility.met()
            code = 400 if isinstance(e, UsageError) else 503
            return None, _refusal(len(token_ids), str(e), code)
        return stream, None

    def _begin_alone(self, asked: Asked, wake: Callable[[], None]) -> tuple[RequestStream | None, Response | None]:
        """``_begin``, and a Response that refuses this request where it fails in whatever way."""
        try:
            return self._begin(asked, wake)
        except Exception as error:
            log.exception("request %s failed", asked.request_id)
            return None, _refusal(len(asked.token_ids), str(error) or type(error).__name__, 500)

    def _send(self, stream: RequestStream, request: EngineRequest, processors: list[Any]) -> None:
        """Follow the stream, and hand its request to the loop. Raises where neither can be."""

        def send() -> None:
            if self._closed:
                raise ToolkitError("the engine was closed; open another")
            if why := self.weights.why_not:
                raise ToolkitError(why)
            self._loop.add(request, processors)

        self._streams.follow(stream, send)

    def _retire(self, stream: RequestStream) -> None:
        """Follow a stream no more; what still runs of it is aborted."""
        if self._streams.leave(stream) and not self._closed:
            self._loop.abort(stream.id)

    def _lost(self, outage: Outage) -> None:
        """Called by the loop's thread when the loop is gone."""
        self.weights.lost()
        self._streams.fail_all(str(outage))

    def _call(self, name: str, *arguments: Any) -> Any:
        """What the core's method of that name does, between steps. Raises what it raises, and ToolkitError where the
        engine is down."""
        return self._loop.call(name, arguments).result()


def _refusal(prompt_len: int, text: str, code: int) -> Response:
    return Response(finish_reason="error", error_code=code, error_message=text, input_token_len=prompt_len)


def _name_of(model: str) -> str:
    """What users call the model: a hub id or "demo" as given, of a path its last part."""
    path = user_path(model)
    return gguf_name(path.resolve()) if path.exists() else model
