"""The loop over a batch's lines: so many at a time are asked, and each answer is written as it comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import orjson
from starlette.types import ASGIApp

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.errors import UsageError
from toolkit.serve.generation.read import SMALL
from toolkit.serve.http.access.users import work_of
from toolkit.serve.http.replies import as_json
from toolkit.serve.openai.batches import results
from toolkit.serve.openai.batches.ask import Answer, ask
from toolkit.serve.openai.batches.lines import Asked, Line, LineFault, Source
from toolkit.serve.openai.batches.results import Results
from toolkit.serve.openai.batches.seen import Seen

AGAIN = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds until a line that the server could not take is asked again
QUEUE = spelled("max_queue").encode()  # is named where the queue is full, in a 429 alone
LOOK_S = 0.1  # how often it is looked whether there is room for more, where no line ends
BREATH = 256  # lines between which others have their turn, where lines cost no waiting


Write = Callable[[bytes, bool], None]  # takes a line of an answer, and whether its status is 200


class Stopped(Exception):
    """The server is on its way down: what is not answered stays so."""


@dataclass
class Tally:
    """How far a batch has come, earlier runs counted; ``earlier``: the lines of those. Tokens are this run's."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    earlier: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def count(self, good: bool) -> None:
        if good:
            self.completed += 1
        else:
            self.failed += 1

    def spend(self, answer: Answer) -> None:
        """Add the tokens that an answer says it took."""
        try:
            used = orjson.loads(answer.body).get("usage") or {}
        except (ValueError, AttributeError):
            return
        self.prompt_tokens += used.get("prompt_tokens", used.get("input_tokens", 0)) or 0
        self.completion_tokens += used.get("completion_tokens", used.get("output_tokens", 0)) or 0


class Turns:
    """As many lines at once as ``most()`` says from time to time. The next is of the owner who has fewest, and of the
    batch that has asked first: owners have theirs in turn, and batches of one owner."""

    def __init__(self, most: Callable[[], int]) -> None:
        self.running = 0
        self._most = most
        self._of: Counter[str] = Counter()
        self._given = 0
        self._last: Counter[str] = Counter()  # ``_given`` when an owner last had a turn
        self._asking: list[list[str]] = []  # of each that waits its owner
        self._left = asyncio.Event()

    async def begin(self) -> None:
        owner = work_of.get() or ""
        place = [owner]
        self._asking.append(place)
        try:
            while self.running >= self._most() or self._next() is not place:
                self._left.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._left.wait()
        finally:
            self._asking = [other for other in self._asking if other is not place]
            self._left.set()
        self.running += 1
        self._of[owner] += 1
        self._given += 1
        self._last[owner] = self._given

    def _next(self) -> list[str]:
        return min(self._asking, key=lambda place: (self._of[place[0]], self._last[place[0]]))

    async def opened(self) -> None:
        """Returns when lines may be asked at all."""
        while self._most() <= 0:
            await asyncio.sleep(LOOK_S)

    def end(self) -> None:
        self.running -= 1
        self._of[work_of.get() or ""] -= 1
        self._left.set()


def resume(tally: Tally, seen: Seen, *files: Results) -> None:
    """Count what ``files`` hold of earlier runs."""
    for file in files:
        for done in file.done():
            if seen.answered(done.number, done.digest):
                tally.earlier += 1
                tally.count(done.good)


def check(source: Source, salt: bytes, seen: Seen, tally: Tally, target: str) -> None:
    """Count the lines of ``source``. Raises UsageError where one that is answered in ``target`` has changed since."""
    number = 0
    for line in source:
        number = line.number
        tally.total += 1
        if (digest := seen.digest(number)) is not None and digest != digest_of(line, salt):
            raise UsageError(_changed(source, f"line {number}", target))
    if (last := seen.last()) > number:
        raise UsageError(_changed(source, f"line {last}, which is gone,", target))


def _changed(source: Source, what: str, target: str) -> str:
    return (
        f"{source.name}: {what} is not what {target} has the answer to: it has changed since, or the model or an option"
        " has; undo that, or write to another file"
    )


def digest_of(line: Line, salt: bytes) -> str:
    """What tells one line from another, 16 hexadecimal digits. ``salt``: what else its request is made from, at most 64
    bytes."""
    return blake2b(line.data, digest_size=8, key=salt, person=line.length.to_bytes(8)).hexdigest()


def name_of(source: Source, line: Line) -> str | None:
    """The custom_id of a line, where it has one."""
    try:
        return source.request(line).custom_id
    except LineFault as fault:
        return fault.custom_id


async def run(
    app: ASGIApp,
    source: Source,
    salt: bytes,
    seen: Seen,
    tally: Tally,
    turns: Turns,
    write: Write,
    *,
    prepare: Callable[[Asked], Any] = lambda asked: asked.body,
    told: Callable[[], None] = lambda: None,
) -> None:
    """Ask ``app`` every line of ``source`` that has no answer yet. ``prepare``: the body that is sent; ``told`` is
    called after each answer.

    Raises Stopped where the server ends meanwhile, and what writing raises; lines that are being answered then have
    no answer.
    """

    def put(line: bytes, good: bool) -> None:
        write(line, good)
        tally.count(good)
        told()

    async def one(line: Line, digest: str, asked: Asked) -> None:
        answer = await _answer(app, asked.url, as_json(prepare(asked)), turns)
        tally.spend(answer)
        good = answer.status == 200
        name, request_id = asked.custom_id, answer.request_id
        put(results.answered(line.number, digest, name, answer.status, request_id, answer.body), good)

    try:
        async with asyncio.TaskGroup() as tasks:
            for i, line in enumerate(source):
                if i % BREATH == 0:
                    await asyncio.sleep(0)
                before = seen.digest(line.number)
                digest = digest_of(line, salt)
                try:
                    big = line.length > SMALL
                    asked = await asyncio.to_thread(source.request, line) if big else source.request(line)
                    if (first := seen.first_with(asked.custom_id, line.number)) != line.number:
                        text = f"custom_id: line {first} has the same; it is answered there"
                        raise LineFault("duplicate_custom_id", text, asked.custom_id)
                except LineFault as fault:
                    if before is None:
                        put(results.failed(line.number, digest, fault.custom_id, fault.code, str(fault)), False)
                    continue
                if before is None:
                    await turns.begin()
                    task = tasks.create_task(one(line, digest, asked))
                    task.add_done_callback(lambda _: turns.end())  # also of one that was cancelled before it began
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _answer(app: ASGIApp, url: str, body: bytes, turns: Turns) -> Answer:
    """The answer to one line, asked again while the server cannot take it: a few times, but as long as it lasts where
    others fill the queue, which says nothing against the line and costs nothing. Raises Stopped."""
    asked = begun = 0
    while True:
        # A task of its own: the server has a request for as long, and sleep and new weights wait for all that it has.
        answer = await asyncio.create_task(ask(app, url, body))
        begun += QUEUE not in answer.body
        if answer.status not in (429, 503) or begun > len(AGAIN):
            return answer
        if b'"code":"shutting_down"' in answer.body:
            raise Stopped
        await asyncio.sleep(AGAIN[min(asked, len(AGAIN) - 1)])
        asked += 1
        await turns.opened()
