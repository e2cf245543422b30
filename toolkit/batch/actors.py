"""Lines answered by engines that are actors of Ray: each goes to the one that has the least to do, and once more to
another where that one ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.batch.blocks import Desk, Found, Given
from toolkit.batch.options import BatchSettings
from toolkit.batch.run import Answerer, opened
from toolkit.errors import ToolkitError
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.replies import send_json
from toolkit.serve.http.request_ids import HEADER
from toolkit.serve.openai.batches.ask import Answer
from toolkit.serve.ray.plan import Model

logger = logging.getLogger("toolkit.batch")
MOST_ACTORS = 3  # that one line may end before it is given up
AGAIN_S, TELL_S = 1.0, 30.0  # between two looks at an engine that is away, and two words on it
LOOK_S, HANG_S = 10.0, 60.0  # how often an actor is asked whether it is there, and how long it has to say so


@dataclass(frozen=True)
class About:
    """What an engine is; ``away``: why it refuses all for now, "" where it does not."""

    model_name: str
    session_len: int
    places: int
    away: str = ""


class Engine:
    """What an actor is: the application that a server of the model would have."""

    def __init__(self, model: dict[str, Any], settings: dict[str, Any], limits: dict[str, Any]) -> None:
        told = read(Model, model)
        told.check_files()
        server = read(BatchSettings, settings).server(read(Limits, limits))
        self._stack = ExitStack()
        self._app = self._stack.enter_context(
            opened(
                told.model,
                server,
                engine_config=told.engine,
                chat_template=told.chat_template,
                progress=lambda line: None,
            )
        )
        self._desk = Desk(self._app)

    async def about(self) -> dict[str, Any]:
        by = Answerer.of(self._app)
        if (outage := by.outage()) is not None and not outage.restarting:
            raise ToolkitError(f"the engine ended ({outage.why})")
        away = "" if outage is None else outage.why
        return {"model_name": by.model_name, "session_len": by.session_len, "places": by.places, "away": away}

    async def turn(self, lines: list[Given]) -> list[Found]:
        return await self._desk.turn(lines)


class Gone(Exception):
    """An actor that was asked has ended."""


class Actor(Protocol):
    """One of Ray, or of a test. Both raise Gone; ``about`` waits until it is there again, and raises ToolkitError where
    its engine has been given up."""

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes, str]: ...
    async def about(self) -> About: ...
    def end(self) -> None:
        """At once; another takes its place."""
        ...


class Spread:
    """An ASGI application that has ``actors`` answer."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._load = dict.fromkeys(range(len(actors)), 0)  # of those that are there
        self._actors = actors
        self._back = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._watched:
            self._watched = True
            for i in range(len(self._actors)):
                self._begin(self._watch(i))
        body = (await receive())["body"]
        found = await self._ask(scope["path"], body)
        if found is None:
            text = f"{MOST_ACTORS} engines have ended while they answered this line; it is not asked again"
            await send_json(send, 500, {"error": {"message": text, "type": "server_error", "code": "node_lost"}})
            return
        headers = [(HEADER.encode(), found.request_id.encode())]
        await send({"type": "http.response.start", "status": found.status, "headers": headers})
        await send({"type": "http.response.body", "body": found.body})

    async def _ask(self, path: str, body: bytes) -> Answer | None:
        found: Answer | None = None
        for _ in range(MOST_ACTORS):
            while not self._load:
                self._back.clear()
                await self._back.wait()
            i = min(self._load, key=self._load.__getitem__)
            self._load[i] += 1
            try:
                answer = Answer(*await self._actors[i].ask(path, body))
            except Gone as error:
                found = None
                self._leave(i, str(error))
                continue
            finally:
                if i in self._load:
                    self._load[i] = max(0, self._load[i] - 1)
            found = answer
            if answer.status != 503 or not await self._away(i):
                break
        return found

    async def _away(self, i: int) -> bool:
        """Whether it refuses a line since its engine is started anew: doing so at once, it would get all lines."""
        try:
            if i in self._load and (why := (await self._actors[i].about()).away):
                self._leave(i, why)
        except (Gone, ToolkitError):
            return False  # who asks it next sees to that, or who watches it
        return i not in self._load

    def _leave(self, i: int, why: str) -> None:
        """Give it no more lines until it is there again."""
        if i in self._load:
            logger.warning("an engine has ended (%s); its lines go to others", why)
            del self._load[i]
            self._begin(self._return(i))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _return(self, i: int) -> None:
        """Give it lines again when it is there again; until then say from time to time why it is not."""
        began = told = time.monotonic()
        while True:
            try:
                why = (await self._actors[i].about()).away
            except (Gone, ToolkitError) as error:
                why = str(error) or type(error).__name__
                if isinstance(error, ToolkitError):  # there, and given up again
                    self._actors[i].end()
            if not why:
                self._load[i] = 0
                self._back.set()
                return
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                logger.warning("an engine has been away for %.0f s: %s", told - began, why)
            await asyncio.sleep(AGAIN_S)

    async def _watch(self, i: int) -> None:
        """End it where it hangs, or refuses all, as its engine is given up: those that wait for it are then told."""
        while True:
            await asyncio.sleep(LOOK_S)
            if i not in self._load:
                continue
            began = time.monotonic()
            try:
                await asyncio.wait_for(self._actors[i].about(), HANG_S)
            except TimeoutError:
                logger.warning("an engine has not answered for %.0f s; it is replaced", time.monotonic() - began)
                self._actors[i].end()
            except ToolkitError as error:
                logger.warning("%s; it is replaced", error)
                self._actors[i].end()
            except Gone:
                pass  # who asked it sees to that
