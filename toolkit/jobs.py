"""Answers of a Pipeline in the making: an event loop of their own, on a thread of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from toolkit.chat.results import failed, with_tensors
from toolkit.chat.session import Session
from toolkit.engine.frontend import AsyncEngine
from toolkit.engine.request import Only
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.vision import Picture

logger = logging.getLogger("toolkit")
Emit = Callable[[Response], None]


@dataclass
class Job:
    """One answer to be generated. ``key``: where it goes in the results (prompt, choice).

    ``error``: why it cannot be generated; it then ends with that. ``only``: as of ``AsyncEngine.generate``.
    """

    key: tuple[int, int]
    token_ids: list[int]
    config: GenerationConfig
    session: Session | None
    error: ToolkitError | None
    request_id: str
    adapter: str | None = None
    only: Only | None = None
    pictures: Sequence[Picture] = ()


class JobRunner:
    """Runs jobs on ``engine``, from any number of threads at once."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._running: dict[str, set[str]] = {}  # session id -> request ids
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="toolkit-pipeline", daemon=True)
        self._thread.start()

    def submit(
        self, jobs: Sequence[Job], done: Callable[[], None] = lambda: None, emit: Emit = lambda piece: None
    ) -> Future[list[Response]]:
        """The answers, in the order of ``jobs``. ``emit`` gets each piece, ``done`` is called for each whole one."""
        return asyncio.run_coroutine_threadsafe(self._run_all(jobs, emit, done), self._loop)

    def stream(self, jobs: Sequence[Job], pieces_wanted: bool) -> Iterator[Response]:
        """Pieces as they come, or each answer once it is whole. Leaving the iteration stops what still runs."""
        pieces: queue.SimpleQueue[Response | None] = queue.SimpleQueue()
        whole: dict[int, Response] = {}

        future = self.submit(jobs, emit=pieces.put)
        future.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                if pieces_wanted:
                    yield with_tensors(piece)
                    continue
                so_far = whole.setdefault(piece.index, Response()).extend(piece)
                so_far.session_id = piece.session_id
                if piece.finish_reason is not None:
                    yield with_tensors(so_far)
            future.result()
        finally:
            future.cancel()

    def abort(self, session: Session) -> None:
        """Stop what runs for a session."""
        for request_id in list(self._running.get(session.session_id, ())):
            self._engine.abort(request_id)

    def close(self) -> None:
        """End the loop and its thread. The engine is closed by now: every request has ended with an error."""
        try:
            asyncio.run_coroutine_threadsafe(_rest_of(self._loop), self._loop).result(timeout=5)
        except TimeoutError:
            logger.warning("requests of a closed pipeline still run")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()

    async def _run_all(self, jobs: Sequence[Job], emit: Emit, done: Callable[[], None]) -> list[Response]:
        """All jobs at once, the longest prompts first; results in the order of ``jobs``."""
        order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].token_ids))
        tasks = {i: asyncio.ensure_future(self._run(jobs[i], emit, done)) for i in order}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        return [tasks[i].result() for i in range(len(jobs))]

    async def _run(self, job: Job, emit: Emit, done: Callable[[], None]) -> Response:
        """Run one job, handing each piece to ``emit``; returns the whole. Never raises but for cancellation."""
        whole = Response(index=job.key[0])
        name = None if job.session is None else job.session.session_id
        running = self._running.setdefault(name, set()) if name else set()
        running.add(job.request_id)
        try:
            if job.error is not None:
                raise job.error
            if (found := len(job.token_ids)) >= (most := self._engine.session_len):
                return self._too_long(job, found, most, emit, done)
            pieces = self._engine.generate(
                job.token_ids,
                job.config,
                request_id=job.request_id,
                session=name,
                adapter=job.adapter,
                only=job.only,
                pictures=job.pictures,
            )
            async for piece in pieces:
                _label(whole.extend(_label(piece, job)), job)
                emit(piece)
        except Exception as e:
            if not isinstance(e, ToolkitError):
                logger.exception("request %s failed", job.request_id)
            whole = _label(failed(whole, e), job)
            emit(dataclasses.replace(whole, text="", token_ids=[], logprobs=None, logits=None, last_hidden_state=None))
        finally:
            running.discard(job.request_id)
            if name and not running:
                self._running.pop(name, None)
        done()
        return whole if job.only else with_tensors(whole)

    @staticmethod
    def _too_long(job: Job, found: int, most: int, emit: Emit, done: Callable[[], None]) -> Response:
        """The answer to a prompt that leaves no room for one, as LMDeploy has it: none, cut by the session's length."""
        why = f"the prompt has {found} tokens, the session holds {most}; shorten it or raise session_len"
        logger.warning("prompt %d: %s", job.key[0], why)
        empty = _label(Response(finish_reason="length", input_token_len=found, error_message=why), job)
        emit(empty)
        done()
        return empty


def _label(piece: Response, job: Job) -> Response:
    """Say whose it is: the position of its prompt, as index and as LMDeploy's session_id."""
    piece.index = piece.session_id = job.key[0]
    return piece


async def _rest_of(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until everything else on the loop has ended."""
    if others := asyncio.all_tasks(loop) - {asyncio.current_task(loop)}:
        await asyncio.wait(others)
