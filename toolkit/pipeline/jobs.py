"""Answers of a Pipeline in the making: jobs in, pieces of Responses out, side by side in the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import Any
from uuid import uuid4

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.request import Only
from toolkit.engine.text.stream import Asked
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.eyes.pictures import Picture
from toolkit.pipeline import arguments
from toolkit.pipeline.prompts import Prompt
from toolkit.pipeline.reader import Reader
from toolkit.pipeline.results import failed, with_tensors
from toolkit.pipeline.session import Session

logger = logging.getLogger("toolkit")


@dataclass
class Job:
    """One answer to be generated. ``key``: where it goes in the results (prompt, choice).

    ``error``: why it cannot be generated; it then ends with that. ``only``: as of ``Asked``.
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

    def label(self, piece: Response) -> Response:
        """Say whose ``piece`` is: the position of its prompt, as index and as LMDeploy's session_id."""
        piece.index = piece.session_id = self.key[0]
        return piece


def jobs_of(
    reader: Reader,
    prompts: Sequence[Prompt],
    configs: Sequence[GenerationConfig],
    sessions: Sequence[Session] | None,
    adapter: str | None,
    templated: bool,
    options: dict[str, Any],
) -> Iterator[Job]:
    """One for each choice of each prompt. ``templated``: by the chat template, which gets ``options``. A prompt that
    cannot be read ends its own jobs alone."""
    template = reader.template_of(adapter)
    for i, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
        session = sessions[i] if sessions else None
        token_ids, pictures, error = list[int](), list[Picture](), None
        try:
            token_ids, pictures = reader.read(i, prompt, session, template if templated else None, options)
        except ToolkitError as e:
            error = e
        config = template.with_stops(config) if templated else config
        for choice, one in enumerate(arguments.choices(config)):
            yield Job((i, choice), token_ids, one, session, error, uuid4().hex, adapter, pictures=pictures)


class JobRunner:
    """Runs jobs on ``engine``, from any number of threads and event loops at once."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._running: dict[str, set[str]] = {}  # session id -> request ids
        self._lock = threading.Lock()  # over those

    def pieces(self, jobs: Sequence[Job]) -> Generator[tuple[int, Response], None, None]:
        """What is new of each answer, with its place in ``jobs``; the longest prompts begin first. Leaving the
        iteration stops what still runs."""
        going = []
        for i in _longest_first(jobs):
            if (end := self._end_at_once(jobs[i])) is not None:
                yield i, end
            else:
                going.append(i)
        with self._noted(jobs), closing(self._engine.generate_all([_asked(jobs[i]) for i in going])) as found:
            for place, piece in found:
                yield going[place], jobs[going[place]].label(piece)

    def answers(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Response]]:
        """Each answer once it is whole, with its place in ``jobs``."""
        whole = [Response() for _ in jobs]
        with closing(self.pieces(jobs)) as pieces:
            for i, piece in pieces:
                jobs[i].label(whole[i].extend(piece))
                if piece.finish_reason is not None:
                    yield i, whole[i] if jobs[i].only else with_tensors(whole[i])

    def streamed(self, jobs: Sequence[Job]) -> Iterator[Response]:
        """``pieces``, for a caller of the Python API."""
        with closing(self.pieces(jobs)) as pieces:
            for _, piece in pieces:
                yield with_tensors(piece)

    def hidden_states(self, rows: Sequence[list[int]], adapter: str | None, pooling: Only) -> list[Any]:
        """The pooled one of each row of token ids. Raises ToolkitError where one fails."""
        config = GenerationConfig(max_new_tokens=1)
        jobs = [Job((i, 0), ids, config, None, None, uuid4().hex, adapter, pooling) for i, ids in enumerate(rows)]
        found = dict(self.answers(jobs))
        for i in range(len(jobs)):
            if found[i].last_hidden_state is None:
                raise ToolkitError(f"inputs[{i}]: {found[i].error_message or 'the request was aborted'}")
        return [found[i].last_hidden_state[0] for i in range(len(jobs))]

    async def gather(self, jobs: Sequence[Job]) -> list[Response]:
        """All answers, in the order of ``jobs``, for asyncio. Cancelling it stops what still runs."""
        import asyncio

        tasks = {i: asyncio.ensure_future(self._answer(jobs[i])) for i in _longest_first(jobs)}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        return [tasks[i].result() for i in range(len(jobs))]

    async def _answer(self, job: Job) -> Response:
        """Never raises but for cancellation."""
        if (end := self._end_at_once(job)) is not None:
            return end
        whole, asked = Response(), _asked(job)
        try:
            with self._noted([job]):
                async with aclosing(self._engine.generate(**vars(asked))) as pieces:
                    async for piece in pieces:
                        whole.extend(piece)
        except Exception as e:
            logger.exception("request %s failed", job.request_id)
            whole = failed(whole, e)
        return with_tensors(job.label(whole))

    def abort(self, session: Session) -> None:
        """Stop what runs for a session."""
        with self._lock:
            found = list(self._running.get(session.session_id, ()))
        for request_id in found:
            self._engine.abort(request_id)

    @contextmanager
    def _noted(self, jobs: Sequence[Job]) -> Iterator[None]:
        """While it lasts, ``abort`` finds the requests of sessions."""
        owned = [(job.session.session_id, job.request_id) for job in jobs if job.session is not None]
        with self._lock:
            for name, request_id in owned:
                self._running.setdefault(name, set()).add(request_id)
        try:
            yield
        finally:
            with self._lock:
                for name, request_id in owned:
                    if running := self._running.get(name):
                        running.discard(request_id)
                        if not running:
                            del self._running[name]

    def _end_at_once(self, job: Job) -> Response | None:
        """The answer to a job that the engine need not see: its error; or none, cut by the session's length as LMDeploy
        has it, to a prompt that leaves no room for one."""
        if job.error is not None:
            return job.label(failed(Response(), job.error))
        if (found := len(job.token_ids)) < (most := self._engine.session_len):
            return None
        why = f"the prompt has {found} tokens, the session holds {most}; shorten it, or {self._engine.plan.longer()}"
        logger.warning("prompt %d: %s", job.key[0], why)
        return job.label(Response(finish_reason="length", input_token_len=found, error_message=why))


def turn(session: Session, prompt: str | tuple[Any, ...], pieces: Iterator[Response]) -> Iterator[Response]:
    """``pieces`` of the answer to a prompt, which enter the session as they are read."""
    whole = Response()  # the session may be closed meanwhile
    session.prompt, session.response = prompt, whole
    try:
        for piece in pieces:
            whole.extend(piece)
            yield piece
    finally:
        if not whole.error_message and not session.closed:
            session.history.append((prompt, whole.text))


def _asked(job: Job) -> Asked:
    session = None if job.session is None else job.session.session_id
    return Asked(
        job.token_ids, job.config, job.request_id, session, adapter=job.adapter, only=job.only, pictures=job.pictures
    )


def _longest_first(jobs: Sequence[Job]) -> list[int]:
    return sorted(range(len(jobs)), key=lambda i: -len(jobs[i].token_ids))


def shape(results: list[Response], count: int, single: bool, jobs: list[Job]) -> Any:
    """Responses -> one a prompt (a list of choices where n > 1), and a bare one for a single prompt."""
    rows: list[list[Response]] = [[] for _ in range(count)]
    for job, result in zip(jobs, results, strict=True):
        rows[job.key[0]].append(result)
    shaped = [row if len(row) > 1 else row[0] for row in rows]
    return shaped[0] if single else shaped
