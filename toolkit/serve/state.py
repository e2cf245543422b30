"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.engine.nap import ASLEEP, EMPTY, UPDATING
from toolkit.engine.pooling import Head
from toolkit.serve.generation.cache_report import Prompts
from toolkit.serve.generation.turn import behind
from toolkit.serve.http.access.quotas import Quotas
from toolkit.serve.http.access.users import current_user
from toolkit.serve.http.errors import ApiError, not_served
from toolkit.serve.http.sharing.lanes import Lanes
from toolkit.serve.http.sharing.places import Places, may_join
from toolkit.serve.lmdeploy.talks import Talks
from toolkit.serve.options import ServerSettings
from toolkit.serve.watch.metrics import ServerMetrics
from toolkit.vision.eyes import media_limits
from toolkit.vision.fetch import Fetching
from toolkit.vision.images import Rules
from toolkit.vision.sampling import media_sampling

if TYPE_CHECKING:
    from toolkit.artifacts.weight_files.new_weight_files import WeightFiles
    from toolkit.chat.embedded_text import EmbeddedText
    from toolkit.chat.template import ChatTemplate
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.messages import GenerationConfig
    from toolkit.serve.fields.protocol import SampledRequest
    from toolkit.serve.generation.parsing import Formats
    from toolkit.serve.openai.responses.kept import Store
    from toolkit.vision.eyes import Eyes


AGAIN = "-answer"  # how the engine's id of a choice ends where it goes on behind a thought that was cut


def image_rules(settings: ServerSettings) -> Rules:
    """What requests may name as pictures."""
    limits, path, hosts = settings.limits, settings.allowed_local_media_path, settings.allowed_media_domains
    return Rules(
        files=() if path is None else (path,),
        fetching=Fetching.of(hosts, settings.allow_private_media, limits.image_timeout),
        max_bytes=limits.max_image_bytes,
        max_pixels=limits.max_image_pixels,
        max_images=limits.max_images,
        of_a_kind=media_limits(settings.limit_mm_per_prompt),
        max_video_bytes=limits.max_video_bytes,
        max_video_seconds=limits.max_video_seconds,
        max_video_frames=limits.max_video_frames,
        max_decoding_bytes=limits.max_decoding_bytes,
        max_fetched_bytes=limits.max_fetched_bytes,
        max_prepared_bytes=limits.max_prepared_bytes,
        sampling=media_sampling(settings.media_io_kwargs),
    )


@dataclass(frozen=True)
class Running:
    """An engine request in flight: its ``owner``, and the session_id that its client has given it."""

    owner: str = ""
    label: int | str | None = None


@dataclass
class ServerState:
    """``of_adapters``: of those that have a template of their own. ``head``: what becomes of hidden states that
    embeddings and scores are made of. ``eyes``: None where it reads text alone. ``active``: the engine requests in
    flight, by their ids. ``admitted``: HTTP requests under way, those whose prompts are not tokens yet too;
    ``of_batches``: those of them that are lines of batches; ``of_users``: how many of them each user has. ``nap``: held
    while the model goes to sleep, wakes or gets other weights. ``to_sleep``: it will sleep once they have ended;
    ``draining``: once they have, it gets other weights; ``new_weights``: the parts of them that have come. ``closing``:
    the server is on its way down. ``loaded``: adapters that came since the start, ``unloaded``: those of the settings
    that went; ``adapter_turn``: held while one comes or goes."""

    engine: AsyncEngine
    template: ChatTemplate
    settings: ServerSettings
    defaults: GenerationConfig
    metrics: ServerMetrics
    lanes: Lanes
    formats: Formats
    kept: Store
    head: Head
    embedded: EmbeddedText
    of_adapters: dict[str, tuple[ChatTemplate, Formats]] = field(default_factory=dict)
    eyes: Eyes | None = None
    slots: Places | None = None
    active: dict[str, Running] = field(default_factory=dict)
    admitted: set[asyncio.Task[Any]] = field(default_factory=set)
    of_batches: set[asyncio.Task[Any]] = field(default_factory=set)
    of_users: Counter[str] = field(default_factory=Counter)
    nap: asyncio.Lock = field(default_factory=asyncio.Lock)
    to_sleep: bool = False
    draining: bool = False
    new_weights: WeightFiles | None = None
    closing: bool = False
    loaded: dict[str, Path] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)
    adapter_turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.prompts = Prompts()
        self.talks = Talks(self.settings.limits, self.engine.end_session)
        settings = self.settings
        self.quotas = Quotas(settings.key_requests, settings.key_tokens_per_minute, self.metrics.refused)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Room for one HTTP request under --max-concurrent-requests; waits for its user's turn."""
        async with nullcontext() if self.slots is None else self.slots.place():
            yield

    @property
    def sleeping(self) -> bool:
        """The model sleeps, or will. The engine alone knows: one that dies asleep comes back awake."""
        return self.to_sleep or self.engine.weights.asleep

    def check_ready(self, model: str, waits: bool = True) -> None:
        """Raise ApiError unless ``model`` is served here and the engine can take requests; else let the request in.
        ``waits``: whether it takes a place in the queue."""
        if model not in self.model_names:
            raise not_served(model, self.model_names)
        if self.closing:
            raise ApiError(503, "the server is shutting down; ask again later", code="shutting_down")
        if self.sleeping:
            raise ApiError(503, EMPTY if self.engine.weights.empty else ASLEEP, code="sleeping")
        if self.draining:
            raise ApiError(503, UPDATING, code="updating")
        if (error := self.unavailable()) is not None:
            raise error
        if not waits:
            return
        user = current_user()
        self._check_queue(user.id)
        if not behind.get():
            self.quotas.enter(user)
        if (task := asyncio.current_task()) is not None:  # that of the HTTP request, up to the end of its answer
            self.of_users[user.id] += task not in self.admitted
            for tasks in (self.admitted, *([self.of_batches] if behind.get() else ())):
                tasks.add(task)
            task.add_done_callback(lambda task: self._leave(task, user.id))

    def unavailable(self) -> ApiError | None:
        """What clients are told while the engine is down; None while it is not."""
        outage = self.engine.outage
        return None if outage is None else ApiError(503, str(outage), code="engine_unavailable")

    def admit(self, request: SampledRequest, token_limit: int | None, prompts: int = 1) -> None:
        """``check_ready`` for a request that asks for so many tokens behind each of its prompts; raise ApiError too
        where they are too many."""
        self.check_ready(request.model)
        self.settings.limits.check_work(request, prompts, token_limit, self.engine.session_len)

    def _check_queue(self, user_id: str) -> None:
        """Raise ApiError 429 where the queue is full: for lines of batches as soon as it is as long as it is to be."""
        places = self.settings.max_concurrent_requests or self.engine.max_batch_size
        waiting = len(self.admitted) - min(places, self.engine.max_batch_size)
        most = self.settings.limits.max_queue
        if waiting < most if behind.get() else may_join(waiting, most, user_id, self.of_users):
            return
        text = f"{waiting} requests wait already (the server's {spelled('max_queue')}); try again later"
        raise ApiError(429, text, code="too_many_requests")

    def _leave(self, task: asyncio.Task[Any], user_id: str) -> None:
        if task not in self.admitted:
            return
        self.admitted.discard(task)
        self.of_batches.discard(task)
        self.of_users[user_id] -= 1
        if not self.of_users[user_id]:
            del self.of_users[user_id]

    def priority(self, asked: int | None) -> int:
        """That of a request which asks for ``asked``. Raises ApiError where its client may not."""
        rules, own = current_user().rules, self.settings.lowest_priority
        lowest = own if rules.priority is None else rules.priority
        if asked is not None and asked < lowest:
            option = spelled("lowest_priority")
            text = (
                f"priority: found {asked}, expected at least {lowest} (the server's {option}, or what it says of a key)"
            )
            raise ApiError(400, text, param="priority", code="limit_exceeded")
        return max(asked or 0, lowest)

    @property
    def model_name(self) -> str:
        """What the model itself is called."""
        return self.settings.model_name or self.engine.model_name

    @property
    def own_names(self) -> tuple[str, ...]:
        """Those of the model itself."""
        return self.model_name, *(entry.partition("=")[0] for entry in self.settings.alias)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request's ``model`` may be: the model by any of its names, and each of its adapters."""
        return *self.own_names, *self.adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters there are now."""
        return *(name for name in self.settings.adapters if name not in self.unloaded), *self.loaded

    def template_of(self, model: str) -> ChatTemplate:
        """How a request's ``model`` is talked to."""
        return self.of_adapters[model][0] if model in self.of_adapters else self.template

    def formats_of(self, model: str) -> Formats:
        """How the answers of a request's ``model`` are read."""
        return self.of_adapters[model][1] if model in self.of_adapters else self.formats

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a request's ``model`` names, None for the model itself. Raises ApiError for one that was
        unloaded while the request waited: the model itself would give another answer."""
        if model in self.adapters:
            return model
        if model not in self.own_names:
            raise not_served(model, self.model_names)
        return None

    def abort(self, request_id: str | None = None, label: int | str | None = None, *, everything: bool = False) -> int:
        """End the choices of a request, of a client's session, or ``everything``, as far as they belong to the one who
        asks; how many there were. Each client is told."""
        owner = current_user().owner
        found = [
            engine_id
            for engine_id, running in self.active.items()
            if running.owner == owner
            and (
                everything
                or (request_id is not None and request_of(engine_id) == request_id)
                or (label is not None and running.label == label)
            )
        ]
        for engine_id in found:
            self.engine.abort(engine_id)
        return len(found)

    def runs(self, request_id: str) -> bool:
        """Whether a request is being answered."""
        return any(request_of(engine_id) == request_id for engine_id in self.active)

    def abort_all(self) -> None:
        """End every request in flight; each client is told."""
        for request_id in list(self.active):
            self.engine.abort(request_id)

    def shorten(self, text: Any) -> str:
        """``text`` for the log, cut to ``max_log_len`` characters."""
        text, limit = str(text), self.settings.max_log_len
        return text if limit is None or len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def request_of(engine_id: str) -> str:
    """The request of which an engine's request is a choice."""
    return engine_id.removesuffix(AGAIN).rpartition("-")[0]
