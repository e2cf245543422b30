"""The engine as the rest of the toolkit uses it: prompts as token ids in, Responses out, while others run beside."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weight_files.new_weight_files import WeightFiles
from toolkit.configs.engine import EngineConfig
from toolkit.configs.lmdeploy import notices
from toolkit.engine.cache.told import Listener
from toolkit.engine.constraints.grammar_cost import HopelessError, Hostility
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.engine.load.ranks import leads
from toolkit.engine.load.setup import Facts, Packed, Progress, find, lend, start
from toolkit.engine.nap import ASLEEP, EMPTY, PARTS, UPDATING
from toolkit.engine.process.loop import Loop, ThreadLoop
from toolkit.engine.process.outage import PATIENCE, Outage
from toolkit.engine.process.peers import Peers
from toolkit.engine.process.process_loop import Child, ProcessLoop
from toolkit.engine.process.wakeup import Bell
from toolkit.engine.request import EngineOutput, EngineRequest, Only, Whose
from toolkit.engine.sampling_params import resolve
from toolkit.engine.text.stream import Asked, RequestStream, Timings
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.pictures import Picture
from toolkit.runners.base import Backend

log = logging.getLogger(__name__)
MODES = ("wait", "abort", "keep")  # what becomes of running requests when weights are replaced; as vLLM calls it
DRAIN_LOOK_S = 0.02  # how often it is looked whether the last request has ended
NOBODYS = Whose()
SCORED = GenerationConfig(max_new_tokens=1, prompt_logprobs=0)  # what a request asks for whose prompt alone is scored


class AsyncEngine:
    """One model that serves many requests at once, from any number of threads and event loops.

    ``plan``: how memory was shared out. ``runner_why``: why the model runs otherwise than was asked for or is fastest,
    ``runner_note``: what else there is to say of its runner; "" each. ``adapters``: names of its LoRA adapters.
    ``outage``: why the engine is down and whether it comes back, as it may where it runs in a process of its own; None
    while it is up. ``peers``: other engines that it hands blocks over to, or takes them from."""

    def __init__(self, tokenizer: Tokenizer, model_name: str, adapters: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._adapters = {name: number for number, name in enumerate(adapters)}
        self._adapter_numbers = itertools.count(len(adapters))  # none is used twice: caches are told apart by them
        self._adapter_lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._hostility = Hostility()
        self._bells: WeakKeyDictionary[asyncio.AbstractEventLoop, Bell] = WeakKeyDictionary()
        self._closed = False
        self._asleep: frozenset[str] = frozenset()
        self._empty = False  # it has never had weights
        self._updating = False
        self._update_lock = threading.Lock()
        self._new_weights: WeightFiles | None = None  # that it runs with
        self._loop: Loop
        self.peers: Peers
        self._facts: Facts
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
        child: Child | None = None,
    ) -> AsyncEngine:
        """Open MODEL (directory, .gguf file, hub id, artifact, "demo") and get it ready to run.

        ``backend``: "turbomind" or "pytorch"; None = what ``backend_config`` is for, or what runs here. ``process``:
        run the loop in a process of its own instead of a thread; one without a sign of life for ``patience`` seconds,
        while requests wait, is restarted (0 = never). ``packed``: called with the model's path, returns where its
        weights are to be read, and a lock on them to be held until the end. ``progress`` is called with one line of
        text each. ``child``: of ``process``, one that was started before.
        On a machine that is not the first of several, this runs ranks until the first has ended, then ends the program.
        Raises ToolkitError or UsageError, one line.
        """
        if backend not in (None, "turbomind", "pytorch"):
            raise UsageError(f"backend: expected turbomind or pytorch, found {backend!r}")
        tell = progress or log.info
        setup = replace(find(str(model), backend_config, backend, packed), pictures_together=pictures_together)
        for line in notices(setup.config):
            log.warning("%s", line)
        if not leads(setup.config):
            lend(setup, tell)
            raise SystemExit(0)
        adapters = tuple(setup.config.adapters or ())
        begun = (child or Child()).told(setup) if process else None
        try:
            engine = cls(Tokenizer.open(setup.tokenizer_dir), _name_of(str(model)), adapters)
        except BaseException:
            if begun is not None:
                begun.kill()
            raise
        engine._locks = setup.locks
        engine._empty = setup.config.empty_init
        engine._asleep = frozenset(PARTS) if engine._empty else frozenset()
        if begun is not None:
            loop = ProcessLoop(setup, engine._deliver, engine._lost, tell, patience, begun)
            engine._loop, engine._facts = loop, loop.facts
        else:
            core, engine._facts = start(setup, lambda: engine.tokenizer, tell)
            engine._loop = ThreadLoop(core, engine._deliver, engine._lost)
        engine.peers = Peers(setup.config, engine._loop, engine._facts_now)
        if progress is None:
            for notice in engine.plan.notices:
                log.warning("%s", notice)
        return engine

    # -- facts ----------------------------------------------------------------------------------

    def _facts_now(self) -> Facts:
        """Of the engine's present start; with other weights than its files hold it hands nothing over."""
        found = self._loop.facts if isinstance(self._loop, ProcessLoop) else self._facts
        return found if self._new_weights is None else found.alone()

    @property
    def plan(self) -> MemoryPlan:
        return self._facts.plan

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may use now."""
        return tuple(self._adapters)

    def trace_ranks(self, on: bool) -> list[list[list[Any]]]:
        """As ``EngineCore.trace_ranks``."""
        found: list[list[list[Any]]] = self._loop.call("trace_ranks", [on]).result()
        return found

    def load_adapter(self, name: str, path: Path) -> None:
        """Have requests use the adapter in a directory by ``name`` from now on, while others run. Raises UsageError for
        a name that is taken, ToolkitError where the adapter cannot be read or is of another model."""
        with self._adapter_lock:
            if name in (*self._adapters, self.model_name):
                raise UsageError(f"lora_name: {name!r:.80} is taken; unload that one first, or choose another name")
            number = next(self._adapter_numbers)
            self._loop.call("load_adapter", [number, str(path)]).result()
            self._adapters[name] = number

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for the adapter; those that run end as they would have. Raises UsageError where there
        is none of the name."""
        with self._adapter_lock:
            if name not in self._adapters:
                raise UsageError(
                    f"lora_name: there is no adapter {name!r:.80}; there is {', '.join(self._adapters) or 'none'}"
                )
            number = self._adapters.pop(name)
            try:
                self._loop.call("unload_adapter", [number]).result()
            except UsageError:
                self._adapters[name] = number
                raise

    @property
    def session_len(self) -> int:
        return self._facts.plan.session_len

    @property
    def max_batch_size(self) -> int:
        return self._facts.plan.max_batch_size

    @property
    def runner_why(self) -> str:
        return self._facts.runner_why

    @property
    def runner_note(self) -> str:
        return self._facts.runner_note

    @property
    def runner_name(self) -> str:
        return self._facts.runner

    @property
    def backend(self) -> Backend:
        return self._facts.backend

    @property
    def blind(self) -> bool:
        """Whether it was opened without what the model sees with."""
        return self._facts.blind

    @property
    def device(self) -> str:
        return self._facts.device

    @property
    def dtype(self) -> str:
        return self._facts.dtype

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
        self,
        token_ids: list[int],
        gen_config: GenerationConfig | None = None,
        *,
        request_id: str | None = None,
        session: str | None = None,
        timings: Timings | None = None,
        adapter: str | None = None,
        only: Only | None = None,
        priority: int = 0,
        pictures: Sequence[Picture] = (),
        progress: bool = False,
        whose: Whose = NOBODYS,
        prediction: Sequence[int] = (),
        second: int = 0,
    ) -> AsyncGenerator[Response, None]:
        """Deltas of one generation; the last one has a finish_reason, "error" with a message where it failed.

        ``session``: its KV blocks stay in the cache for the next turn until ``end_session``. Leaving the iteration
        early aborts the request. ``timings`` is filled in as things happen. ``adapter``: one of ``adapters``, None for
        the plain model. ``gen_config.n`` is the caller's business. ``only``: no token is drawn; "score" gives the
        prompt's log-probabilities (``prompt_logprobs``), "cls", "last" and "mean" its ``last_hidden_state`` as one row.
        ``priority``: the lower, the sooner it starts. ``pictures``: in the order of their places in the prompt.
        ``progress``: deltas say how far the prompt has come (``prompt_progress``). ``whose``: whose request it is.
        ``prediction``: token ids that much of the answer may be, for guesses.
        ``second``: see ``EngineRequest``.
        """
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        bell = self._bells.setdefault(loop, Bell(loop))

        def wake() -> None:
            bell.ring(event)

        common = adapter, only, priority, pictures, progress, whose, prediction, second
        asked = Asked(token_ids, gen_config, request_id, session, timings, *common)
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
                    self._retire_if_ended(stream)
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
                if i not in streams or (delta := _polled(streams[i])) is None:
                    continue  # an earlier delta has taken what it was woken for
                if streams[i].ended:
                    self._retire(streams.pop(i))
                yield i, delta
        finally:
            for stream in streams.values():
                self._retire(stream)

    def score(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Log-probability of each token after the first given those before it, float32 [len(token_ids) - 1].

        Computes every position (no prefix hits). Raises ToolkitError where the request fails.
        """
        found: list[dict[int, float] | None] = []
        for delta in self.generate_sync(token_ids, SCORED, only="score"):
            if delta.finish_reason in ("error", "abort"):
                raise ToolkitError(delta.error_message or "the request was aborted")
            found = delta.prompt_logprobs or found
        return np.array([p[t] for p, t in zip(found[1:], token_ids[1:], strict=True) if p is not None], np.float32)

    def abort(self, request_id: str) -> None:
        """End a request; its stream yields what is left and a Response with finish_reason "abort"."""
        if request_id in self._streams:
            self._loop.abort(request_id)

    def end_session(self, session: str) -> None:
        """Let the KV blocks kept for a session be used for others."""
        if not self._closed:
            self._loop.end_session(session)

    def tell_blocks(self, listener: Listener) -> None:
        """Have ``listener`` told which whole blocks the prefix cache has. Raises UsageError for an engine in another
        process."""
        if isinstance(self._loop, ProcessLoop):
            raise UsageError("tell_blocks: expected an engine in this process (process=False)")
        self._loop.call("tell_blocks", [listener]).result()

    def sleep(self) -> None:
        """Give the model's memory back until ``wake``; what still runs ends in an error, as does what comes meanwhile.
        Returns when it is done. Raises ToolkitError where the engine is down."""
        before, self._asleep = self._asleep, frozenset(PARTS)
        try:
            self._loop.call("sleep", []).result()
        except BaseException:
            self._asleep = before
            raise

    def wake(self, parts: Sequence[str] = PARTS) -> None:
        """Load what ``sleep`` gave back: "weights", "kv_cache". Raises ToolkitError where that fails; it sleeps on."""
        if unknown := next((part for part in parts if part not in PARTS), None):
            raise UsageError(f"tags: expected {' and '.join(PARTS)}, found {unknown!r:.40}")
        self._asleep = frozenset(self._loop.call("wake", list(parts)).result())

    def update_weights(self, files: WeightFiles, mode: str = "wait") -> None:
        """Run with the tensors of ``files`` in place of the model's from now on, through sleep and restart; it closes
        them when others take their place, at its end, or where this fails.

        They are named as in the model's checkpoint, and all there. ``mode`` says what becomes of requests that run:
        "wait" lets them end first, and refuses new ones meanwhile; "abort" ends them with what they have; "keep" has
        them go on behind the tokens that they have. No key, value or prefix of the old weights is used again. While a
        KV cache is slept away it stays so. Raises UsageError for a model that is packed, ToolkitError that names the
        tensor where they cannot be: the old weights are there still.
        """
        try:
            if mode not in MODES:
                raise UsageError(f"mode: expected one of {', '.join(MODES)}, found {mode!r:.40}")
            with self._update_lock:
                self._updating = mode == "wait"
                try:
                    while mode == "wait" and self._streams and self.healthy:
                        time.sleep(DRAIN_LOOK_S)
                    call = self._loop.call("update_weights", [str(files.path), mode == "keep"])
                    try:
                        self._asleep = frozenset(call.result())
                    except ToolkitError as e:
                        raise type(e)(f"update_weights: {e}") from e
                finally:
                    self._updating = False
                before, self._new_weights, self._empty = self._new_weights, files, False
        except BaseException:
            files.close()
            raise
        if before is not None:
            before.close()

    @property
    def asleep(self) -> bool:
        """Whether ``sleep`` was called and not all of the model is back, or it has no weights yet."""
        return bool(self._asleep)

    @property
    def empty(self) -> bool:
        """Whether it has no weights yet."""
        return self._empty

    def close(self) -> None:
        """End what runs and free the model. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        for lock in self._locks:
            lock.close()
        if self._new_weights is not None:
            self._new_weights.close()
        self._fail_all("the engine was closed")

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- requests in flight ---------------------------------------------------------------------

    def _begin(self, asked: Asked, wake: Callable[[], None]) -> tuple[RequestStream | None, Response | None]:
        """A stream whose request is on its way, or the Response that refuses it."""
        config, token_ids = asked.gen_config or GenerationConfig(), list(asked.token_ids)
        name = self._name(asked.request_id)
        try:
            params = resolve(config, self.tokenizer, len(token_ids), self.session_len)
            params = replace(params, hurried=self._hostility.there)
            number = self._adapter_number(asked.adapter)
            pictures = list(asked.pictures)
            request = EngineRequest(
                name,
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
                source=(config.migration_request or {}).get("remote_engine_id", ""),
            )
            if config.preserve_cache and request.session is None:
                request.session = self.peers.preserve(name)
            stream = RequestStream(name, token_ids, config, self.tokenizer, wake, asked.timings)
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

    def _adapter_number(self, name: str | None) -> int:
        if name is None:
            return -1
        if name not in self.adapters:
            known = f"one of {', '.join(self.adapters)}" if self.adapters else "none, the engine has no adapters"
            raise UsageError(f"adapter_name: expected {known}, found {name!r:.80}")
        return self._adapters[name]

    def _name(self, request_id: str | None) -> str:
        return f"request-{next(self._names)}" if request_id is None else request_id

    def _send(self, stream: RequestStream, request: EngineRequest, processors: list[Any]) -> None:
        """Register the stream, then hand the request to the loop. Raises where neither can be."""
        with self._lock:
            if self._closed:
                raise ToolkitError("the engine is closed")
            if self._asleep:
                raise ToolkitError(EMPTY if self._empty else ASLEEP)
            if self._updating:
                raise ToolkitError(UPDATING)
            if stream.id in self._streams:
                raise UsageError(f"request id {stream.id!r} is already running")
            self._streams[stream.id] = stream
            try:
                self._loop.add(request, processors)
            except BaseException:
                del self._streams[stream.id]
                raise

    def _retire_if_ended(self, stream: RequestStream) -> None:
        """Stop the engine's work on a request at the delta that ends it, not when the consumer comes back."""
        if stream.ended:
            self._retire(stream)

    def _retire(self, stream: RequestStream) -> None:
        """Forget a stream; what still runs of it is aborted."""
        if self._streams.pop(stream.id, None) is not None and not stream.engine_done and not self._closed:
            self._loop.abort(stream.id)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Called by the loop's thread. Outputs of requests that have gone are dropped."""
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.deliver(output)
                _wake(stream)

    def _lost(self, outage: Outage) -> None:
        """Called by the loop's thread when the loop is gone. One that comes back is awake, if it has weights."""
        self._asleep = frozenset(PARTS) if self._empty else frozenset()
        self._fail_all(str(outage))

    def _fail_all(self, text: str) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.deliver(EngineOutput(stream.id, finish_reason="error", error=text, error_code=503))
            _wake(stream)


def _wake(stream: RequestStream) -> None:
    try:
        stream.wake()
    except RuntimeError:  # its event loop has been closed
        log.debug("request %s: nobody listens any more", stream.id)


def _polled(stream: RequestStream) -> Response | None:
    """``poll``, and an error that ends this stream alone where it fails."""
    try:
        return stream.poll()
    except Exception as error:
        log.exception("request %s failed", stream.id)
        stream.ended = True
        return Response(finish_reason="error", error_code=500, error_message=str(error) or type(error).__name__)


def _refusal(prompt_len: int, text: str, code: int) -> Response:
    return Response(finish_reason="error", error_code=code, error_message=text, input_token_len=prompt_len)


def _name_of(model: str) -> str:
    """What users call the model: a hub id or "demo" as given, of a path its last part."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
