"""Lines go to another process and answers come back many to a call: a call costs what some tokens cost.

One call is open there, which ends as soon as there are answers to bring (``ENOUGH``, ``SOON_S``) or as another call
comes, which brings lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from starlette.types import ASGIApp

from toolkit.serve.openai.batches.ask import ask

GATHER_S = 0.02  # lines wait for more to go with: each answer that comes makes room for one
SOON_S = 1.0  # an answer waits for more to go with
ENOUGH = 4  # or until there is one to so many lines that are still to be answered: the engine keeps enough of them

Given = tuple[int, str, bytes]  # a line: its number, where it is asked, its body
Found = tuple[int, int, bytes, str]  # an answer: the line's number, status, body, request id


class Desk:
    """Where lines are answered, by ``app``. To be used in one event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._asked: set[asyncio.Task[None]] = set()
        self._answered: list[Found] = []
        self._open: asyncio.Event | None = None  # of the call that waits for answers
        self._timer: asyncio.TimerHandle | None = None
        self._failed: Exception | None = None

    async def turn(self, lines: list[Given]) -> list[Found]:
        """Take ``lines``; the answers, of these or of earlier ones, when there are some. Raises what ``app`` does."""
        for line in lines:
            task = asyncio.create_task(self._answer(*line))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        if self._open is not None:
            self._open.set()
        self._open = mine = asyncio.Event()
        self._look()
        await mine.wait()
        if self._open is mine:
            self._open = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._failed is not None:
            raise self._failed
        answered, self._answered = self._answered, []
        return answered

    async def _answer(self, number: int, path: str, body: bytes) -> None:
        try:
            found = await ask(self._app, path, body)
        except Exception as error:  # nothing that the application answers with: a mistake of ours, which ends it all
            self._failed = error
            self._look()
            return
        self._answered.append((number, found.status, found.body, found.request_id))
        asyncio.get_running_loop().call_soon(self._look)  # when this one no longer counts as asked

    def _look(self) -> None:
        if self._open is None or not (self._answered or self._failed):
            return
        if self._failed or len(self._answered) * ENOUGH >= len(self._asked):
            self._open.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_S, self._end)

    def _end(self) -> None:
        self._timer = None
        if self._open is not None:
            self._open.set()


class Carrier:
    """Brings lines to a ``Desk`` by ``turn``. What that raises ends all lines that are there. To be used in one event
    loop."""

    def __init__(self, turn: Callable[[list[Given]], Awaitable[list[Found]]]) -> None:
        self._turn = turn
        self._numbers = count()
        self._waiting: list[Given] = []
        self._there: dict[int, asyncio.Future[tuple[int, bytes, str]]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._open = 0  # calls that have not come back
        self._soon = False  # the next one is on its way

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        number = next(self._numbers)
        self._there[number] = answer = asyncio.get_running_loop().create_future()
        self._waiting.append((number, path, body))
        self._begin()
        try:
            return await answer
        finally:
            self._there.pop(number, None)

    def _begin(self) -> None:
        if self._soon:
            return
        self._soon = True
        task = asyncio.create_task(self._call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self) -> None:
        await asyncio.sleep(GATHER_S)
        self._soon = False
        lines, self._waiting = self._waiting, []
        self._open += 1
        try:
            found = await self._turn(lines)
        except Exception as error:
            self._waiting = []
            for line in self._there.values():
                if not line.done():
                    line.set_exception(error)
            return
        finally:
            self._open -= 1
        for number, status, body, request_id in found:
            if (answer := self._there.get(number)) is not None and not answer.done():
                answer.set_result((status, body, request_id))
        if not self._open and any(not answer.done() for answer in self._there.values()):
            self._begin()
