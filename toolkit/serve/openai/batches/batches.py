"""The batches of a server: answered beside its other requests and behind them, and gone on with after a restart."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import spelled
from toolkit.errors import ToolkitError
from toolkit.serve.generation.turn import LAST, behind
from toolkit.serve.http.access.users import work_of
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.sharing.places import Places
from toolkit.serve.http.sharing.shares import Shares
from toolkit.serve.openai.batches import loop, results
from toolkit.serve.openai.batches.lines import Bounds, JsonLines
from toolkit.serve.openai.batches.loop import Stopped, Tally, Turns
from toolkit.serve.openai.batches.results import Results
from toolkit.serve.openai.batches.seen import Seen
from toolkit.serve.openai.batches.store import FileStore, StorageFull, Stored, new_id, no_room

if TYPE_CHECKING:
    from fastapi import FastAPI

    from toolkit.serve.state import ServerState

logger = logging.getLogger("toolkit.serve")
UPLOADS_AT_ONCE, OF_ONE = 8, 2  # of all keys, of each: files on their way in are on disk twice
ENDED = ("completed", "failed", "expired", "cancelled")
_SALT = b"toolkit"
_WINDOW = re.compile(r"([1-9]\d{0,2})h")
_TIMES = tuple(f"{name}_at" for name in ("in_progress", "finalizing", *ENDED, "cancelling"))


@dataclass
class Batch:
    """``output``, ``faults``: ids of the files that answers are written to, those with status 200 and the others.
    ``output_seconds``: for how long these are kept. ``times``: when which status began."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output: str
    faults: str
    output_seconds: float
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    kept: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def become(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time.time())

    def fail(self, code: str, message: str) -> None:
        self.errors.append({"code": code, "line": None, "message": message, "param": None})

    def count(self, tally: Tally) -> None:
        self.total, self.completed, self.failed = tally.total, tally.completed, tally.failed

    def card(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output if self.output in self.kept else None,
            "error_file_id": self.faults if self.faults in self.kept else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def window_seconds(text: str) -> int | None:
    """Of "24h"; None for what is no such thing."""
    found = _WINDOW.fullmatch(text)
    return None if found is None else int(found[1]) * 3600


class Batches:
    """``app``: the whole application, which lines are asked of."""

    def __init__(self, app: FastAPI, state: ServerState, store: FileStore) -> None:
        self.store = store
        self._app = app
        self._state = state
        self._all: dict[str, Batch] = {batch.id: batch for batch in store.records("batches", Batch)}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.turns = Turns(self._room)
        self._uploads = Places(UPLOADS_AT_ONCE)
        self._uploads_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        store.in_use = lambda id: self.reading(id) is not None
        store.tidy({id for batch in self._all.values() if not batch.ended for id in (batch.output, batch.faults)})

    @asynccontextmanager
    async def upload(self, owner: str) -> AsyncIterator[None]:
        """A place for a file on its way in; waits for it. However slowly a key sends, others have theirs."""
        own = self._uploads_of.setdefault(owner, asyncio.Semaphore(OF_ONE))
        async with own, self._uploads.place():
            yield

    def _room(self) -> int:
        """Lines that may be answered at once: others' requests always find free places."""
        state = self._state
        if state.closing or state.sleeping or state.draining or state.engine.outage is not None:
            return 0
        most = state.engine.max_batch_size
        places = min(state.settings.max_concurrent_requests or most, most)
        others = len(state.admitted) - len(state.of_batches)
        return max(1, min(state.settings.limits.batch_lines_at_once, places - places // 4 - others))

    def begin(self) -> None:
        """Go on with whatever has not ended; to be called in the server's event loop."""
        for batch in self._all.values():
            if not batch.ended and batch.id not in self._tasks:
                self._start(batch)

    def _start(self, batch: Batch) -> None:
        task = asyncio.create_task(self._work(batch), name=batch.id)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda done: self._tasks.pop(batch.id, None))

    def of(self, owner: str) -> list[Batch]:
        """The newest first."""
        self._expire()
        own = [batch for batch in self._all.values() if batch.owner == owner]
        return sorted(reversed(own), key=lambda b: b.created_at, reverse=True)  # those of one second stay in order

    def get(self, id: str, owner: str) -> Batch | None:
        found = self._all.get(id)
        return found if found is not None and found.owner == owner else None

    def reading(self, file: str) -> Batch | None:
        """A batch that has not ended and reads this file."""
        return next((b for b in self._all.values() if b.input_file_id == file and not b.ended), None)

    async def create(
        self, file: Stored, endpoint: str, window: str, metadata: dict[str, str] | None, output_seconds: float
    ) -> Batch:
        """Begin a batch of the lines of ``file``. Raises ApiError where there are too many."""
        limits = self.store.limits
        self._expire()
        owners = [batch.owner for batch in self._all.values() if not batch.ended]
        running, mine, what = len(owners), owners.count(file.owner), "batches that wait or run"
        if running >= limits.max_batches:
            raise limits.refusal("max_batches", None, running + 1, what, 429)
        if file.owner and mine and mine + 1 > (left := limits.max_batches - running) and self.store.shared():
            told = f"found {mine + 1} {what} of this key, expected at most the {left} that are free"
            option = f"{spelled('max_batches')} ({limits.max_batches:,})"
            raise ApiError(429, f"{told} of the server's {option}", code="limit_exceeded")
        now = int(time.time())
        batch = Batch(
            new_id("batch_"),
            file.owner,
            endpoint,
            file.id,
            window,
            now,
            now + (window_seconds(window) or 0),
            new_id("file-"),
            new_id("file-"),
            output_seconds,
            metadata,
        )
        self._all[batch.id] = batch  # it counts
        try:
            await self.store.save("batches", deepcopy(batch))
        except BaseException as error:
            self._forget(batch)
            if isinstance(error, OSError):
                raise no_room(error) from error
            raise
        self._start(batch)
        return batch

    def cancel(self, batch: Batch) -> None:
        """End a batch; the answers that there are stay."""
        if batch.ended or batch.status == "cancelling":
            return
        batch.become("cancelling")
        self._save(batch)
        if (task := self._tasks.get(batch.id)) is not None:
            task.cancel()

    def _expire(self) -> None:
        """Forget old batches, and where they are too many the oldest of whoever has most."""
        limits, now = self.store.limits, time.time()
        shares, ended = Shares(), {}
        for batch in sorted((b for b in self._all.values() if b.ended), key=lambda b: b.created_at):
            if batch.created_at + limits.file_seconds < now:
                self._forget(batch)
            else:
                ended[batch.id] = batch
                shares.add(batch.owner, 1)
        while len(ended) > limits.max_files:
            oldest = shares.greediest((batch.owner, batch) for batch in ended.values())
            assert oldest is not None
            del ended[oldest.id]
            shares.add(oldest.owner, -1)
            self._forget(oldest)

    def _forget(self, batch: Batch) -> None:
        del self._all[batch.id]
        self.store.forget_later("batches", batch.id)

    async def _work(self, batch: Batch) -> None:
        behind.set(LAST)  # of this task and those that it starts, as is the next
        work_of.set(batch.owner)
        status = "failed"
        try:
            if batch.status == "cancelling":  # the server ended before it had
                self._end(batch, "cancelled")
                return
            status = await self._answer(batch)
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the server ends; it goes on from here when it starts again
            status = "cancelled"
        except Stopped:
            return
        except StorageFull as error:
            batch.fail("storage_full", str(error))
        except OSError as error:
            batch.fail("storage_full", f"the batch's files cannot be read or written ({error.strerror})")
        except ToolkitError as error:
            batch.fail("server_error", str(error))
        except Exception:
            logger.exception("%s failed", batch.id)
            batch.fail("server_error", "Internal error; the server's log has the details")
        try:
            self._end(batch, status)
        except OSError as error:  # when the server starts again it goes on with the batch
            logger.error("%s cannot be kept: %s", batch.id, error)

    async def _answer(self, batch: Batch) -> str:
        """Answer the lines that have none; the status that it ends with."""
        store, limits = self.store, self.store.limits
        source = JsonLines(
            store.path(batch.input_file_id),
            Bounds(limits, self._state.engine.session_len),
            batch.input_file_id,
            batch.endpoint,
        )
        with ExitStack() as stack:
            good, bad = (Results(store.path(id)) for id in (batch.output, batch.faults))
            seen, tally = Seen(), Tally()
            for each in (good, bad, seen):
                stack.callback(each.close)

            def look() -> None:
                loop.resume(tally, seen, good, bad)
                loop.check(source, _SALT, seen, tally, batch.id)

            await asyncio.to_thread(look)
            batch.count(tally)
            if not 0 < tally.total <= limits.max_batch_lines:
                self._refuse(batch, tally.total)
                return "failed"
            for id, file in ((batch.output, good), (batch.faults, bad)):
                store.grow(id, file.size, batch.owner)
            if batch.status == "validating":
                batch.become("in_progress")
            self._save(batch)

            def write(line: bytes, fine: bool) -> None:
                store.grow(batch.output if fine else batch.faults, len(line), batch.owner)
                (good if fine else bad).write(line)

            try:
                async with asyncio.timeout(max(0.0, batch.expires_at - time.time())):
                    await loop.run(
                        self._app,
                        source,
                        _SALT,
                        seen,
                        tally,
                        self.turns,
                        write,
                        prepare=lambda asked: {"model": self._state.model_name, **asked.body},
                        told=lambda: batch.count(tally),
                    )
            except TimeoutError:
                await self._give_up(batch, source, tally, good, bad)
                return "expired"
            return "completed"

    def _refuse(self, batch: Batch, lines: int) -> None:
        """Say why a file is no batch."""
        if not lines:
            batch.fail("empty_file", f"{batch.input_file_id}: expected a request a line, found none")
            return
        batch.fail("too_many_requests", self.store.limits.refusal("max_batch_lines", None, lines, "lines").message)

    async def _give_up(self, batch: Batch, source: JsonLines, tally: Tally, good: Results, bad: Results) -> None:
        """The time is over: whatever has no answer gets one that says so."""
        seen = Seen()
        try:
            loop.resume(Tally(), seen, good, bad)
            text = f"the batch's time ({batch.completion_window}) was over before it was answered"
            for i, line in enumerate(source):
                if i % loop.BREATH == 0:
                    await asyncio.sleep(0)
                if seen.digest(line.number) is None:
                    name = loop.name_of(source, line)
                    digest = loop.digest_of(line, _SALT)
                    bad.write(results.failed(line.number, digest, name, "batch_expired", text))
                    tally.count(False)
        finally:
            seen.close()
        batch.count(tally)

    def _end(self, batch: Batch, status: str) -> None:
        """Keep the files that hold something, and tell."""
        store = self.store
        batch.become("finalizing")
        for id, what in ((batch.output, "output"), (batch.faults, "error")):
            path = store.path(id)
            if path.exists() and path.stat().st_size:
                name = f"{batch.id}_{what}.jsonl"
                store.save_later("files", store.register(id, batch.owner, name, "batch_output", batch.output_seconds))
                batch.kept.append(id)
            else:
                store.drop(id)
        batch.become(status)
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        self.store.save_later("batches", deepcopy(batch))  # which changes before it is written
