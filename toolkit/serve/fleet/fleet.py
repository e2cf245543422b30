"""Models that are loaded when they are asked for, and give their memory back to others."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import field
from typing import Any, Literal, Protocol

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.errors import ToolkitError
from toolkit.serve.fleet.catalog import Listed
from toolkit.serve.http.errors import ApiError, not_served
from toolkit.serve.http.sharing.places import Places

logger = logging.getLogger("toolkit.serve")
LOOK_S = 0.02  # how often it is looked whether a model's last request has ended
TICK_S = 1.0
State = Literal["unloaded", "loading", "loaded", "sleeping"]


class Running(Protocol):
    """A model's server. ``memory``: bytes that it may take."""

    url: str
    memory: int

    def alive(self) -> bool: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


Launch = Callable[[Listed], Running]  # starts a model's server and returns when it answers; in a thread


class Swapped(ApiError):
    """A request was ended because its model has to make room."""

    def __init__(self, name: str, patience: float) -> None:
        text = (
            f"{name} has to make room for another model, and requests that came meanwhile have ended after "
            f"{patience:g} s (the server's {spelled('swap_patience')}); ask again"
        )
        super().__init__(503, text, code="model_swapped")


@dataclass(eq=False)
class Guest:
    """A request to a model that cannot leave yet; ``over``: it is being ended."""

    task: asyncio.Task[Any] | None
    over: bool = False

    def end(self) -> None:
        if self.task is not None and not self.over:
            self.over = True
            self.task.cancel()


@dataclass
class Model:
    """``memory``: what it took when it was loaded last, before that its files. ``users``: requests it is answering.
    ``leaving``: another waits for its memory; who comes meanwhile is one of its ``guests``. ``closed``: it goes to
    sleep as soon as they are done; who asks for it waits for its turn."""

    listed: Listed
    memory: int
    state: State = "unloaded"
    server: Running | None = None
    users: int = 0
    used: float = 0.0
    leaving: bool = False
    closed: bool = False
    guests: set[Guest] = field(default_factory=set)


class Fleet:
    """``budget``: bytes that loaded models may take together, None = no limit. The one used longest ago goes to sleep
    first: its process stays, so that it is soon there again. ``idle_timeout``: seconds after which an unused model's
    process ends; 0 = never. ``swap_patience``: seconds that a model which makes room waits for requests that came after
    the one it makes room for; 0 = until they are done. ``at_once``: requests that are answered together, more wait for
    their users' turn; None = no limit."""

    def __init__(
        self,
        models: Sequence[Listed],
        launch: Launch,
        *,
        budget: int | None = None,
        idle_timeout: float = 0.0,
        swap_patience: float = 0.0,
        at_once: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launch = launch
        self._budget = budget
        self._idle_timeout = idle_timeout
        self._patience = swap_patience
        self._clock = clock
        self._slots = Places(at_once) if at_once else None
        self._turn = asyncio.Lock()  # models come and go one at a time
        self._tasks: set[asyncio.Task[None]] = set()  # loads under way
        self.on_end: Callable[[str], object] = lambda url: None  # gets the URL of each server that has ended
        self.models = [Model(listed, listed.weight_bytes()) for listed in models]

    def names(self) -> list[str]:
        """What a request's ``model`` may be."""
        return [name for model in self.models for name in model.listed.names]

    def find(self, name: str | None) -> Model:
        """The model that answers to ``name``, the first for None. Raises ApiError 404."""
        for model in self.models:
            if name is None or name in model.listed.names:
                return model
        raise not_served(name, self.names())

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[Running]:
        """The server of a model, loaded where it is not; it stays meanwhile. Raises ApiError, Swapped where it has to
        go before the end."""
        model, guest = self.find(name), None
        async with nullcontext() if self._slots is None else self._slots.place():
            if model.state != "loaded" or model.closed or model.server is None or not model.server.alive():
                await self._in_turn(model)
            else:
                model.users += 1
                if model.leaving:
                    guest = Guest(asyncio.current_task())
                    model.guests.add(guest)
            try:
                assert model.server is not None
                yield model.server
            except asyncio.CancelledError:
                if guest is None or not guest.over or guest.task is None or guest.task.uncancel():
                    raise  # its client has left
                raise Swapped(model.listed.name, self._patience) from None
            finally:
                model.users -= 1
                if guest is not None:
                    model.guests.discard(guest)
                model.used = self._clock()

    async def _in_turn(self, model: Model) -> None:
        """Load a model and count its user, as a task of the fleet: a client that leaves ends its waiting alone."""
        left = False

        async def load() -> None:
            async with self._turn:
                if left:  # before anything was begun
                    return
                await self._load(model)
                model.users += not left

        task = asyncio.create_task(load())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            left = True
            if task.done() and not task.cancelled() and task.exception() is None:
                model.users -= 1  # it had been counted already
            raise

    async def watch(self) -> None:
        """End the processes of models that nobody has used for long, until cancelled."""
        while True:
            await asyncio.sleep(min(TICK_S, self._idle_timeout / 2 or TICK_S))
            for model in self.models:
                if self._unused(model):
                    async with self._turn:
                        if self._unused(model):  # others may have come and gone while it was waited for
                            idle = self._clock() - model.used
                            logger.info("%s: unloaded, unused for %.0f s", model.listed.name, idle)
                            await self._end(model)

    def _unused(self, model: Model) -> bool:
        """For so long that its process is to end."""
        idle = self._clock() - model.used
        return 0 < self._idle_timeout < idle and model.server is not None and not model.users

    async def close(self) -> None:
        """End all processes."""
        async with self._turn:
            for model in self.models:
                await self._end(model)

    async def _load(self, model: Model) -> None:
        if model.server is not None and not model.server.alive():
            await self._end(model)
        if model.state == "loaded":
            return
        await self._make_room(model)
        began = self._clock()
        try:
            if model.state == "sleeping" and model.server is not None:
                await asyncio.to_thread(model.server.wake)
            else:
                model.state = "loading"
                model.server = await asyncio.to_thread(self._launch, model.listed)
        except ToolkitError as error:
            await self._end(model)
            raise ApiError(503, f"{model.listed.name}: cannot be loaded: {error}", code="model_not_loaded") from error
        except BaseException:
            await self._end(model)
            raise
        model.memory, model.state, model.used = model.server.memory, "loaded", self._clock()
        logger.info("%s: loaded in %.2f s", model.listed.name, model.used - began)
        await self._make_room(model)  # it may take more than its files

    async def _make_room(self, wanted: Model) -> None:
        """Put others to sleep, those used longest ago first, until ``wanted`` fits or is alone."""
        while self._budget is not None:
            loaded = [m for m in self.models if m.state == "loaded" and m is not wanted]
            if not loaded or sum(m.memory for m in loaded) + wanted.memory <= self._budget:
                return
            await self._put_to_sleep(min(loaded, key=lambda m: (m.users > 0, m.used)))

    async def _put_to_sleep(self, model: Model) -> None:
        """Once its requests are done. As long as it cannot leave for one that was there before, others cost nobody any
        time and may come; then those have ``swap_patience`` seconds."""
        model.leaving = True
        try:
            while model.users > len(model.guests):
                await asyncio.sleep(LOOK_S)
            model.closed = True
            until = self._clock() + (self._patience or math.inf)
            while model.users:
                if self._clock() >= until:
                    for guest in model.guests:
                        guest.end()
                await asyncio.sleep(LOOK_S)
            assert model.server is not None
            await asyncio.to_thread(model.server.sleep)
            model.state = "sleeping"
            logger.info("%s: sleeps", model.listed.name)
        except ToolkitError as error:
            logger.error("%s: cannot sleep, so it is ended: %s", model.listed.name, error)
            await self._end(model)
        finally:
            model.leaving = model.closed = False

    async def _end(self, model: Model) -> None:
        server, model.server, model.state = model.server, None, "unloaded"
        if server is not None:
            await asyncio.to_thread(server.close)
            self.on_end(server.url)

    def cards(self) -> list[dict[str, Any]]:
        """For /v1/models: each name, what it is of, and how it is."""
        found = []
        for model in self.models:
            for name in model.listed.names:
                parent = {"parent": model.listed.name} if name != model.listed.name else {}
                found.append({"name": name, "state": model.state, **parent})
        return found
